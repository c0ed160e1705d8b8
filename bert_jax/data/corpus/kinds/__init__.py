"""Kinds of sources: text and JSON lines, tables, TFDS, web archives, Wikipedia, Python's prose."""
