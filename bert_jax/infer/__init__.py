"""Answers of a trained model: texts, tags, spans, vectors, translations, search (`search/`).

May import artefacts and below. Read first: loaded.py, forward.py.
"""
