"""Configurations: files, command lines, and the frozen dataclasses that they become.

Of bert_jax, it imports only `errors`. Read first: mapping.py.
"""
