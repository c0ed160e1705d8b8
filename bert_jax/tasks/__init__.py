"""Fine-tuning tasks, without jax: reading labelled files into examples, scoring predictions.

Each kind of task has a folder or a module; `retrieval/` has test collections, ranking metrics and
BM25. This package may import tokenization and files. Read first: task.py, opening.py.
"""
