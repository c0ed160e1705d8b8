"""Labelled tables of a user's own."""
