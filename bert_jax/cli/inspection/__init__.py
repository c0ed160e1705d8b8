"""Answers about a work directory: status, replay, rerun."""
