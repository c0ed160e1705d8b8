"""Training objectives: pure functions of parameters and of the rows of a batch.

They do not depend on the mesh, the training loop or files. The package may import `model`, and
names from `data` and `tasks`. Read objective.py and masked_lm.py first.
"""
