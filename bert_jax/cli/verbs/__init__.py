"""The verbs of `bert-jax`, and their options."""
