"""Overlap of texts: duplicate documents, and evaluation texts that occur in a corpus."""
