"""Checkpoint formats of other libraries: names of parameters, fields and layouts of files."""
