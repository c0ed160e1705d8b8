"""The command line: arguments (main.py), verbs, the demo, and inspection of runs.

May import every door. Read first: main.py.
"""
