"""Training objectives, as pure functions of parameters and rows.

An objective knows no mesh, no loop and no file. The package may import `model`, and names from
`data` and `tasks`. Read objective.py and masked_lm.py first.
"""
