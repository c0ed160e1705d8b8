"""Training objectives, as pure functions of parameters and rows.

An objective knows no mesh, no loop and no file. May import model, and names from data and tasks.
Read first: objective.py, masked_lm.py.
"""
