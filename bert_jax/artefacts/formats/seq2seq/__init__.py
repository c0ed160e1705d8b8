"""Encoder-decoder classes of Transformers, to and from our networks."""
