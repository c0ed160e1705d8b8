"""Kinds of sources: text and JSON lines, tables, web archives, Wikipedia, data sets of the Hub."""
