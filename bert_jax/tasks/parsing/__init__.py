"""Dependency parsing: CoNLL-U to rows, scores of arcs to trees, and trees to scores."""
