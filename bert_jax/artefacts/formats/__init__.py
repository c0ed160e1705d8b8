"""Checkpoint formats of other libraries: parameter names, configuration fields, file layouts."""
