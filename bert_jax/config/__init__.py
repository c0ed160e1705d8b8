"""Configurations: files, command lines, and the frozen dataclasses that they become.

Imports nothing of the package but errors. Read first: mapping.py.
"""
