"""The command line: arguments (main.py), verbs, the demo, and inspection of runs.

May import every other package. Read first: main.py.
"""
