"""Checkpoints: written asynchronously, read back for verification, kept by policy.

A run's directory `checkpoints` has one directory for each saved step:

    <step>/
      params/ rest/    arrays, as Orbax writes them
      record/          JSON: configuration, metrics, and shape, dtype and digest of every array
      verified.json    size and CRC of every file; written once the arrays were read back
    <step>.branch-*.json  branches that began from the step, which therefore stays

`storage.py` is the only file that knows Orbax and TensorStore; `manager.py` is what a training loop
uses.
"""
