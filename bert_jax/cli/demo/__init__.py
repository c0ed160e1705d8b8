"""`bert-jax demo`: whole ways from nothing to an answer, on text that is already there."""
