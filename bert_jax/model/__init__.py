"""The encoder: configuration, layers, attention and heads. Knows nothing of data or training."""
