"""Marks by which branches keep, for ever, the checkpoint that each began from.

A mark is a small file beside the checkpoints, `<step>.branch-<digest of the name>.json`. A branch
writes its mark without the lease of the run that it branches from, which another process may be
writing: a mark appears whole, no two branches write one file, and the run looks at the names before
it deletes.
"""

import contextlib
import datetime
import hashlib
import json
import re
from pathlib import Path

from etils import epath

from bert_jax.distributed.checkpoint.storage import AnyPath, as_path, is_remote, read_object
from bert_jax.files.staging import replace_file

_MARK = re.compile(r"(\d+)\.branch-[0-9a-f]{8}\.json")


def keep_for_branch(directory: AnyPath, step: int, branch: str) -> bool:
    """Keep the checkpoint of a step for the branch in a directory; say whether the mark is new.

    Raises:
        UserError: The directory cannot be written.
        OSError: Anything else that keeps the mark from being written.
    """
    mark = _mark(directory, step, branch)
    if mark.exists():
        return False
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content = json.dumps({"branch": branch, "step": step, "time": now}) + "\n"
    if is_remote(mark):  # an object appears whole
        mark.write_text(content)
    else:
        replace_file(Path(mark), content.encode())
    return True


def forget_branch(directory: AnyPath, step: int, branch: str) -> None:
    """Remove the mark of a branch that was not begun."""
    _mark(directory, step, branch).unlink(missing_ok=True)


def kept_steps(directory: AnyPath) -> set[int]:
    """Return the steps that branches began from."""
    return {step for step, _ in _marks(directory)}


def branches_of(directory: AnyPath) -> dict[int, list[str]]:
    """Return the work directories of branches, by the step that they began from, ascending."""
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
