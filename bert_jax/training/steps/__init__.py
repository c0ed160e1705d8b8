"""The training step, with its state, optimizers and guard, for one run or several trials."""
