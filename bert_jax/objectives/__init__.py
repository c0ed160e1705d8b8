"""Training objectives: pure functions of parameters and of the rows of a batch.

Objectives do not depend on the mesh, the training loop or files. This package may import `model`,
and some definitions from `data` and `tasks`. Read objective.py and masked_lm.py first.
"""
