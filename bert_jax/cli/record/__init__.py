"""`bert-jax record`: what a recipe reaches on fixed text in a fixed budget."""
