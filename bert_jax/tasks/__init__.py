"""Fine-tuning tasks: read labelled files into examples, and score predictions; without jax.

A folder for each kind of task; `retrieval/` has the metrics of search. May import tokenization and
files. Read first: task.py, opening.py.
"""
