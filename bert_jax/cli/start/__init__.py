"""`bert-jax start`: from files and a time to a recipe, and with --go to a model and a report."""
