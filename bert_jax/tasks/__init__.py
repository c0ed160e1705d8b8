"""Fine-tuning tasks: read labelled files into examples and score predictions, without jax.

Each kind of task has a folder or a module; `retrieval/` has the metrics of search. May import
tokenization and files. Read first: task.py, opening.py.
"""
