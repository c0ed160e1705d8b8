"""Ahead-of-time compilation for TPU slices, which predicts the cost of a step without hardware.

`hlo_cost/` adds up the cost of a compiled program and knows nothing of BERT.
May import training and below. Read first: command.py, compile.py.
"""
