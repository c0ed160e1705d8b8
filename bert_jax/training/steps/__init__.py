"""The training step: state, optimizers, guard, trials."""
