"""Foreign names and layouts of checkpoints."""
