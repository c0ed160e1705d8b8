"""Attention implementations, and the choice among them."""
