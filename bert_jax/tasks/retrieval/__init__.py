"""Retrieval without an accelerator: ranking metrics, test collections, BM25 and clustering."""
