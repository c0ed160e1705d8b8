"""Networks: their configuration, layers, attention, heads, and encoder-decoders.

This package imports no package for data or training. Read config.py, encoder.py and heads.py first.
"""
