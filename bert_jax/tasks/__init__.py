"""From labelled files to examples, and from predictions to scores; without jax."""
