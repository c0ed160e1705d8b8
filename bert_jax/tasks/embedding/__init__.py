"""Texts that belong together: files, rows and scores of an embedding model."""
