"""Fine-tuning: from an encoder and labelled files to a model for a task, with its scores."""
