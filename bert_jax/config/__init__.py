"""Configurations: files, command lines, and the frozen dataclasses that they become.

Imports nothing from the package except errors. Read first: mapping.py.
"""
