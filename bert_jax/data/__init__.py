"""Raw text to a token store (`corpus/`), and a token store to batches; on the host, without jax.

An example is a pure function of (corpus, seed, index).
May import tasks (tables, evaluation texts), tokenization and files. Read first: store.py,
pipeline.py, corpus/build.py.
"""
