"""`bert-jax record`: the loss that a recipe reaches on fixed text in a fixed time."""
