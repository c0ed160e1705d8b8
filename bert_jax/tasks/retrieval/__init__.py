"""Retrieval on the host: scores of rankings, files of test collections, words as a baseline."""
