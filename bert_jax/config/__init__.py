"""Conversion of configuration files and command lines to frozen dataclasses.

This package imports only `errors` from bert_jax. Read mapping.py first.
"""
