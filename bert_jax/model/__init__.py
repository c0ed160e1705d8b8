"""Networks: their configuration, layers, attention, heads, and encoder-decoders.

This package does not depend on the packages for data and training. Read config.py, encoder.py and
heads.py first.
"""
