"""Ahead-of-time compilation for TPU slices, which predicts the cost of a step without hardware.

`hlo_cost/` adds up the cost of a compiled program and knows nothing of BERT.
This package may import `training` and the packages below it. Read command.py and compile.py first.
"""
