"""Dependency parsing: rows from CoNLL-U, trees from scores of arcs, and scores of trees."""
