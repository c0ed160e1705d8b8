"""The verbs of `bert-jax`: what each does with its arguments."""
