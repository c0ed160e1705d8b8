"""Checkpoints: written asynchronously, read back for verification, kept by policy.

A run's directory `checkpoints` has one directory for each saved step:

    <step>/
      params/ rest/    arrays, as Orbax writes them
      record/          JSON: configuration, metrics, and shape, dtype and digest of every array
      verified.json    size and CRC of every file; written after the arrays were read back
    <step>.branch-*.json  branches that began from the step; they keep its checkpoint

Only `storage.py` uses Orbax and TensorStore; a training loop uses `manager.py`.
"""
