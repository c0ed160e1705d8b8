"""Cleaning of documents before they are tokenized: filters, duplicates, evaluation texts."""
