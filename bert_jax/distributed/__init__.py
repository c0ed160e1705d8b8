"""Training on several devices and processes: meshes (`parallel/`), checkpoints (`checkpoint/`).

All processes write a checkpoint together, and every checkpoint is verified. The package may import
`model` (axis names) and `files`. Read parallel/sharding.py and checkpoint/manager.py first.
"""
