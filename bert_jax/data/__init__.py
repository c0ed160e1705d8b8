"""Tokenizers, the token store and examples, on the host, without jax."""
