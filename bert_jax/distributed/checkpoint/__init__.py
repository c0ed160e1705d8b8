"""Checkpoints, which are written asynchronously, read back for verification, and kept by rules.

The directory `checkpoints` of a run has one directory for each saved step:

    <step>/
      params/ rest/    arrays, as Orbax writes them
      record/          JSON: configuration, metrics, and shape, dtype and digest of every array
      verified.json    size and CRC of every file; written after the arrays were read back
    <step>.branch-*.json  one file for each branch (run that began from the step's checkpoint)

Only `storage.py` uses Orbax and TensorStore. A training loop uses `manager.py`.
"""
