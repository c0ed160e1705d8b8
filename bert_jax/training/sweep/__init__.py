"""Statistics of many fine-tuning trials."""
