"""`bert-jax demo`: complete runs from raw text to an answer, on text that needs no download."""
