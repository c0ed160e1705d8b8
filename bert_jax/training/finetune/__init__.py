"""Fine-tuning: a model that answers, and its scores, from labelled files and an encoder."""
