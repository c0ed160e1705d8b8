"""Check of the chain from a directory back to its source files, for `bert-jax lineage`."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bert_jax.artefacts.saved.ancestors import REMOTE, Ancestor, file_digest
from bert_jax.artefacts.saved.lineage import RUNS, trace
from bert_jax.artefacts.saved.runs import split_name
from bert_jax.data.store import is_store, open_store
from bert_jax.distributed.checkpoint.verify import find_fault
from bert_jax.errors import UserError
from bert_jax.files.checks import DIGESTS, RECORD_FILES, check_recorded
from bert_jax.files.remote import open_workdir
from bert_jax.files.urls import scheme

State = Literal["verified", "unrecorded", "differs", "missing", "unread"]
"""Result of a check. `verified`: the content has the digest that the descendant recorded.
`unrecorded`: the content is intact, but no digest was recorded. `differs`: the content is damaged
or has another digest. `missing`: nothing was found. `unread`: the content was not read."""
_MOST_FILES = 8
_WORDS: dict[State, str] = {
    "verified": "verified",
    "unrecorded": "intact, nothing recorded to compare with",
    "differs": "DIFFERS",
    "missing": "not found",
    "unread": "not read",
}


@dataclass(frozen=True)
class Checked:
    """An ancestor with the result of its check."""

    ancestor: Ancestor
    state: State
    said: str
    """Explanation of the state; may be empty."""
    parents: tuple["Checked", ...]

    def walk(self) -> Iterator["Checked"]:
        """Yield this ancestor and everything that it was made from, depth first."""
        yield self
        for each in self.parents:
            yield from each.walk()

    def as_json(self) -> dict[str, Any]:
        """Return the chain as JSON values."""
        names = ["role", "kind", "name", "place", "step", "digest", "recorded", "note", "part"]
        return {
            **{name: getattr(self.ancestor, name) for name in names},
            "state": self.state,
            "said": self.said,
            "parents": [each.as_json() for each in self.parents],
        }


def check_lineage(
    name: str,
    near: Sequence[Path] = (),
    *,
    quick: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Checked:
    """Trace a directory to its ancestors, and compare their digests with the recorded digests.

    `name` is a directory that `trace` accepts, or WORKDIR@STEP. `near` lists further directories in
    which to search for ancestors by name. If `quick` is true, only digests from records are
    compared. Otherwise, `say` is called with a line before an ancestor's content is read. Raise a
    UserError if the directory has no lineage, or a record is malformed.
    """
    directory, step = (name, None) if Path(name).exists() else split_name(name)
    root = trace(directory, step, near)
    known: dict[tuple[str, Any], tuple[State, str]] = {}

    def check(ancestor: Ancestor) -> Checked:
        key = (ancestor.place, ancestor.step or ancestor.part)
        if not ancestor.found:
            state, said = _missing(ancestor)
        else:
            if key not in known:
                known[key] = _content(ancestor, quick, say)
            state, said = _compared(ancestor, *known[key])
        return Checked(ancestor, state, said, tuple(map(check, ancestor.parents)))

    return check(root)


def _missing(ancestor: Ancestor) -> tuple[State, str]:
    if ancestor.note and scheme(ancestor.place) is not None:
        return "unread", ancestor.note
    if ancestor.kind == "file" and (ancestor.name.startswith(REMOTE) or scheme(ancestor.name)):
        return "unread", "not a file on this machine"
    if ancestor.kind == "file" and ancestor.name == "python-docs":
        return "unread", "documentation of the packages that were installed"
    return "missing", f"at {ancestor.place}" if ancestor.place else "no place is recorded"


def _content(ancestor: Ancestor, quick: bool, say: Callable[[str], None]) -> tuple[State, str]:
    """Compare an ancestor's content with its own record; return a state and an explanation.

    For a file that can be read, the digest of its content takes the place of the explanation.
    """
    if quick:
        return "unread", ""
    say(f"reading {ancestor.place}")
    fault = ""
    try:
        if ancestor.kind in RUNS:
            if ancestor.step is None or not ancestor.digest:
                return "unread", ancestor.note or "it has saved no checkpoint"
            fault = find_fault(open_workdir(ancestor.place).checkpoints / str(ancestor.step))
        elif ancestor.kind == "corpus":
            path = Path(ancestor.place)
            stores = [path] if is_store(path) else [path / part for part in ("train", "heldout")]
            for store in stores:
                if (store / "corpus.json").is_file():
                    open_store(store, verify=True)
        elif ancestor.kind in RECORD_FILES.values():
            check_recorded(Path(ancestor.place), "sha256", DIGESTS)
        elif ancestor.kind == "file":
            digest = file_digest(Path(ancestor.place), ancestor.part)
            return ("verified", digest) if digest else ("unread", "it cannot be read")
        else:
            return "verified", ""  # `trace` has computed the digest from the weights
    except UserError as error:
        fault = f"{error}"
    except OSError as error:
        return "unread", f"{error}"
    return ("differs", fault) if fault else ("verified", "")


def _compared(ancestor: Ancestor, state: State, said: str) -> tuple[State, str]:
    """Compare an ancestor with its descendant's record; `_content` gave `state` and `said`."""
    digest = said if ancestor.kind == "file" and state == "verified" else ancestor.digest
    if state == "differs":
        return state, said
    if ancestor.recorded and digest and digest != ancestor.recorded:
        return "differs", f"digest {digest[:12]}, but {ancestor.recorded[:12]} was recorded"
    if state == "verified" and not ancestor.recorded and (ancestor.role or ancestor.kind == "file"):
        return "unrecorded", ancestor.note if ancestor.kind in RUNS else ""
    if state == "verified":
        return state, ""
    return state, said or ("the same digest in the records" if ancestor.recorded and digest else "")


def lineage_lines(root: Checked) -> list[str]:
    """Describe the chain for people: a line per ancestor, indented below its descendant."""
    counts = Counter(each.state for each in root.walk())
    whole = f"{counts['verified']} of {counts.total()} verified"
    others = [f"{counts[s]} {text}" for s, text in _WORDS.items() if s != "verified" and counts[s]]
    return [*_lines(root, 0), "", whole, *others]


def _lines(checked: Checked, depth: int) -> Iterator[str]:
    one = checked.ancestor
    what = one.kind + (f" of {one.note}" if one.kind in RECORD_FILES.values() and one.note else "")
    if one.step is not None:
        what += f", step {one.step:,}"
    if one.kind == "corpus" and one.note:
        what += f", {one.note}"
    if one.part is not None:
        what += f", bytes {one.part[0]:,} to {one.part[1]:,}"
    said = _WORDS[checked.state] + (f": {checked.said}" if checked.said else "")
    role = f"{one.role}: " if one.role else ""
    yield f"{'  ' * depth}{role}{one.place or one.name} ({what}) - {said}"
    files: dict[State, int] = {}
    for each in checked.parents:
        if each.ancestor.role == "source" and each.ancestor.kind == "file":
            files[each.state] = files.get(each.state, 0) + 1
            if files[each.state] > _MOST_FILES and each.state != "differs":
                continue
        yield from _lines(each, depth + 1)
    for state, number in files.items():
        if number > _MOST_FILES and state != "differs":
            yield f"{'  ' * (depth + 1)}{number - _MOST_FILES:,} more sources - {_WORDS[state]}"
