"""The training step, its sharding, and the loop around it."""
