"""Statistics of the trials of a fine-tuning sweep, and reports on them."""
