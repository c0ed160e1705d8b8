"""Networks: configuration, layers, attention, heads, encoder-decoders.

The package knows nothing of data or training. Read config.py, encoder.py and heads.py first.
"""
