"""Fine-tuning of an encoder on labelled files. The result is a model for a task, with scores."""
