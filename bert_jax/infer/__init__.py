"""Inference with a trained model: words, classes, tags, spans, vectors, translations and search.

May import artefacts and below. Read first: loaded.py, forward.py.
"""
