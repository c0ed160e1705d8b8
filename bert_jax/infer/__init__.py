"""Answers of a model about texts."""
