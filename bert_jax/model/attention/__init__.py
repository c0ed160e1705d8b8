"""Attention: its forms and the choice between them."""
