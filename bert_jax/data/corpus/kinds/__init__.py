"""Readers of each kind of source: text, JSON lines, tables, web archives, Wikipedia, docstrings."""
