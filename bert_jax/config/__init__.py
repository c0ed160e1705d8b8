"""Configurations: files, command lines, and the frozen dataclasses that they become.

This package imports only `errors` from bert_jax. Read first: mapping.py.
"""
