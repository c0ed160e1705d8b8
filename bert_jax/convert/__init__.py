"""Weights in other projects' names and layouts. May import the model; nothing else does so."""
