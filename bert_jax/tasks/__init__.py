"""Labelled files to examples, and predictions to scores; on the host, without jax.

A folder for each kind of task; `retrieval/` has the metrics of search.
May import tokenization and files. Read first: task.py, opening.py.
"""
