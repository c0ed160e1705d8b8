"""Fine-tuning: labelled files and a pretrained encoder to a model that answers, with its scores."""
