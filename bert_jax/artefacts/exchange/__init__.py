"""Import and export of models in other formats, with proof that the copy computes the same."""
