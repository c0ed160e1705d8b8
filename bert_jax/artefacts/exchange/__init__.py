"""Import and export of models in other formats, with proof that a copy gives the same outputs."""
