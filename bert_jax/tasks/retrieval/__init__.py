"""Retrieval on the host: ranking metrics, test collections, BM25, clustering."""
