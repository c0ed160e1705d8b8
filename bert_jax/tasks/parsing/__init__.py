"""Dependency parsing: reading CoNLL-U, finding the best trees, and scoring trees."""
