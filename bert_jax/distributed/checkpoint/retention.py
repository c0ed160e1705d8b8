"""Retention of checkpoints: rules, and marks for the checkpoints from which branches began.

A branch is a run that begins from a checkpoint of another run, its parent. A mark is a small file
beside the parent's checkpoints, `<step>.branch-<digest of the branch's name>.json`. A branch may
write its mark while the parent trains, without the parent's lease (`files.lease`): a mark appears
only when it is complete, and the parent looks for marks before it deletes.
"""

import contextlib
import datetime
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from bert_jax.config.bounds import Bounded, Count, Natural
from bert_jax.distributed.checkpoint.storage import AnyPath, as_path, read_object
from bert_jax.files.staging import replace_file
from bert_jax.files.urls import is_url

_MARK = re.compile(r"(\d+)\.branch-[0-9a-f]{8}\.json")


@dataclass(frozen=True)
class Retention(Bounded, section="checkpoint"):
    """Rules for keeping checkpoints. A checkpoint stays if at least one rule keeps it."""

    keep: Count = 3
    """Number of newest checkpoints to keep. Only checkpoints that were read back count."""
    keep_every_steps: Natural = 0
    """Interval in steps between checkpoints that are never deleted. 0 means that there are none."""
    keep_best: Natural = 0
    """Number of checkpoints to keep that have the best evaluations on the rows of the newest."""
    best_metric: str = ""
    """Evaluation metric for keep_best, such as eval/loss. Lower is better if its name ends in loss,
    otherwise higher. If empty, the first metric of the objective is used."""

    def superfluous(
        self, saved: Sequence[int], verified: Sequence[int],
        metrics: Mapping[int, Mapping[str, float]], lowest_at: int | None = None,
    ) -> list[int]:  # fmt: skip
        """Return the `saved` steps to delete. The steps in `verified` were read back.

        A checkpoint may be deleted only after `keep` newer checkpoints were read back. `lowest_at`
        is the step of the lowest training loss. The newest verified checkpoint up to this step (the
        oldest, if all are later) is kept, so that the run can return to it after a divergence.
        """
        if len(verified) < self.keep:
            return []
        oldest_kept = verified[-self.keep]
        sign = 1 if self.best_metric.endswith("loss") else -1
        ranked = sorted(
            (sign * metrics[step][self.best_metric], -step)
            for step in verified
            if math.isfinite(metrics.get(step, {}).get(self.best_metric, math.nan))
        )
        best = {-negated for _, negated in ranked[: self.keep_best]}
        if lowest_at is not None:
            best.add(max((step for step in verified if step <= lowest_at), default=verified[0]))
        return [
            step
            for step in saved
            if step < oldest_kept
            and step not in best
            and not (self.keep_every_steps and step % self.keep_every_steps == 0)
        ]


def keep_for_branch(directory: AnyPath, step: int, branch: str) -> bool:
    """Mark a checkpoint, so that it is kept for a branch; return true if the mark is new.

    `branch` is the work directory of the branch. If the checkpoints' directory cannot be written,
    raise a UserError for a known reason such as a full disk, and an OSError for another.
    """
    mark = _mark(directory, step, branch)
    if mark.exists():
        return False
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content = json.dumps({"branch": branch, "step": step, "time": now}) + "\n"
    if is_url(mark):  # a bucket shows only complete files
        mark.write_text(content)
    else:
        replace_file(Path(mark), content.encode())
    return True


def forget_branch(directory: AnyPath, step: int, branch: str) -> None:
    """Remove the mark of a branch, for a branch that failed to begin."""
    _mark(directory, step, branch).unlink(missing_ok=True)


def kept_steps(directory: AnyPath) -> set[int]:
    """Return the steps from which branches began."""
    return {step for step, _ in _marks(directory)}


def branches_of(directory: AnyPath) -> dict[int, list[str]]:
    """Return {step: work directories of the branches that began at the step}, by ascending step."""
    found: dict[int, list[str]] = {}
    for step, name in sorted(_marks(directory)):
        branch = "a branch whose mark cannot be read"
        with contextlib.suppress(OSError, ValueError, KeyError):
            branch = str(read_object(as_path(directory) / name)["branch"])
        found.setdefault(step, []).append(branch)
    return found


def _mark(directory: AnyPath, step: int, branch: str) -> epath.Path:
    name = hashlib.sha256(branch.encode()).hexdigest()[:8]
    return as_path(directory) / f"{step}.branch-{name}.json"


def _marks(directory: AnyPath) -> list[tuple[int, str]]:
    directory = as_path(directory)
    if not directory.is_dir():
        return []
    matches = (_MARK.fullmatch(path.name) for path in directory.iterdir())
    return [(int(match[1]), match[0]) for match in matches if match]
