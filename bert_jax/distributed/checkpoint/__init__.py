"""Checkpoints: written asynchronously, read back for verification, kept by policy.

A run's directory `checkpoints` has one directory for each saved step:

    <step>/
      params/ rest/    arrays, as Orbax writes them
      record/          JSON: configuration, metrics, and shape, dtype and digest of every array
      verified.json    size and CRC of every file; written after the arrays were read back
    <step>.branch-*.json  branches that began from the step; they keep its checkpoint

Only `storage.py` uses Orbax and TensorStore; a training loop uses `manager.py`.
"""

from bert_jax.distributed.checkpoint.manager import Checkpoints, SaveFailedError
from bert_jax.distributed.checkpoint.reading import (
    DamagedCheckpointError,
    Restored,
    load_newest,
    restore_step,
)
from bert_jax.distributed.checkpoint.retention import (
    Retention,
    branches_of,
    forget_branch,
    keep_for_branch,
)
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.checkpoint.verify import (
    Verdict,
    find_fault,
    is_verified,
    verified_steps,
    verify_checkpoint,
)

__all__ = [
    "Checkpoints", "DamagedCheckpointError", "Restored", "Retention", "SaveFailedError", "Verdict",
    "branches_of", "find_fault", "forget_branch", "is_verified", "keep_for_branch", "load_newest",
    "restore_step", "saved_steps", "verified_steps", "verify_checkpoint",
]  # fmt: skip
