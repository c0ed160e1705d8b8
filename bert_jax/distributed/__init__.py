"""Arrays over several devices and processes: meshes (`parallel/`) and checkpoints (`checkpoint/`).

Checkpoints are verified, and written by all processes together.
May import model (axis names) and files. Read first: parallel/sharding.py, checkpoint/manager.py.
"""
