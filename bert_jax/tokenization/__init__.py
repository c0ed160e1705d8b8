"""Tokenizers, which convert text to token ids and back: trained here or read from published files.

May import files. Read first: tokenizer.py (the protocol), load.py (the factory).
"""
