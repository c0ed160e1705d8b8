"""Retrieval on the host: scores of rankings, files of test collections, BM25, clusters."""
