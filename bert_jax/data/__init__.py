"""Data on the host, without jax: token stores from raw text (`corpus/`), batches from stores.

An example is a pure function of (corpus, seed, index). The package may import tasks (tables,
evaluation texts), tokenization and files. Read first: store.py, pipeline.py, corpus/build.py.
"""
