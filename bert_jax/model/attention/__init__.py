"""Implementations of attention, and the choice among them."""
