"""Fine-tuning: trains an encoder on labelled files; the result is a scored model for a task."""
