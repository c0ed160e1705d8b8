"""Networks: configuration, layers, attention, heads, encoder-decoders.

Knows nothing of data or training. Read first: config.py, encoder.py, heads.py.
"""
