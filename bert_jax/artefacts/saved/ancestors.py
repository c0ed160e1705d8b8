"""Ancestors of a directory: the models, corpora and files from which it was made.

A run, an average, an export, an import and a grown model record their ancestors when they are made.
A record has names, steps and digests, recursively, but no paths.
"""

import hashlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.artefacts.formats.huggingface_files import weight_files
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import short

RECORD = "lineage"
"""Key of the ancestors in a run's config.json, parity.json, import.json and growth.json."""
REMOTE = ("tfds:", "hf:")
"""Prefixes of the names of remote data sets; such names are kept whole."""
_BLOCK = 1 << 20
MAX_DEPTH = 20
"""Generations of ancestors in a record; each takes two of the 64 levels that a JSON file may have.
"""
_MAX_FILES = 20  # source files of a corpus in a descendant's record; the corpus itself lists all


@dataclass(frozen=True)
class Ancestor:
    """A directory or file that something was made from, and its own ancestors."""

    role: str
    """Use of the ancestor, such as init or data.corpus; empty for the directory being traced."""
    kind: str
    """Kind: pretraining, fine-tuning, average, export, import, growth, model, corpus or file."""
    name: str
    """Last part of the path, or a name such as tfds:wikipedia."""
    place: str = ""
    """Path on this machine; empty if unknown."""
    found: bool = False
    """Whether `place` holds something of this kind."""
    step: int | None = None
    """Step of a run's checkpoint, in updates."""
    digest: str = ""
    """Present digest of the ancestor: the digest of a checkpoint's arrays, the fingerprint of a
    corpus, or the sha256 of weights. Empty for a file, unless it was searched for by digest."""
    recorded: str = ""
    """Digest in the descendant's record; empty if the descendant recorded no digest."""
    note: str = ""
    """Remark for people, such as the class of an export or the number of unlisted sources."""
    part: tuple[int, int] | None = None
    """Range (start, end) of the bytes that were read from a file; None means all bytes."""
    parents: tuple["Ancestor", ...] = ()

    def entry(self, role: str = "", depth: int = MAX_DEPTH) -> dict[str, Any]:
        """Return the entry, with `depth` generations of ancestors, for a descendant's record."""
        files = [each for each in self.parents if each.role == "source" and each.kind == "file"]
        late = {*files[_MAX_FILES:]}
        others = [each for each in self.parents if each not in late]
        more = len(self.parents) - len(others)
        values = {
            "role": role or self.role,
            "kind": self.kind,
            "name": last_part(self.name) if self.name and self.kind == "file" else self.name,
            "step": self.step,
            "digest": self.digest or self.recorded,
            "note": f"{more:,} more sources" if more else self.note,
            "parents": [each.entry(depth=depth - 1) for each in others] if depth else [],
        }
        return {name: value for name, value in values.items() if value not in ("", None, [])}

    def walk(self, without: Collection[str] = ()) -> Iterator["Ancestor"]:
        """Yield this ancestor and all above it, depth first; leave out roles in `without`."""
        yield self
        for each in self.parents:
            if each.role not in without:
                yield from each.walk(without)


def corpus_entry(role: str, place: str, store: TokenStore) -> dict[str, Any]:
    """Return the entry for a corpus in the record of a run that has opened the corpus."""
    files = sources_of(store.meta, place)
    found = Ancestor(role, "corpus", last_part(place), digest=store.fingerprint, parents=files)
    return found.entry()


def file_entries(files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return an entry for each path in `files`, by role; only readable files get a digest."""
    return [
        Ancestor(role, "file", last_part(name), recorded=file_digest(Path(name))).entry()
        for role, name in files.items()
    ]


def weights_entry(name: str, weights: Iterable[Path]) -> dict[str, Any]:
    """Return the entry for another program's model, identified by its weight files."""
    return Ancestor("source", "model", last_part(name), recorded=_joint(weights)).entry()


def file_digest(path: Path, part: tuple[int, int] | None = None) -> str:
    """Return the sha256 (hex) of a file or of one byte range; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            start, end = part or (0, sys.maxsize)
            digest, left = hashlib.sha256(), end - start
            file.seek(start)
            while left > 0 and (data := file.read(min(left, _BLOCK))):
                digest.update(data)
                left -= len(data)
            return digest.hexdigest()
    except (OSError, ValueError):
        return ""


def weights_digest(directory: Path) -> str:
    """Return the sha256 of the weights in Hugging Face's format; empty if there are no weights."""
    return _joint(weight_files(directory))


def _joint(files: Iterable[Path]) -> str:
    """Return the sha256 of one file, or of several files' names and digests; "" for no file."""
    digests = {path.name: file_digest(path) for path in sorted(files)}
    if len(digests) < 2:
        return "".join(digests.values())
    lines = "\n".join(f"{name} {digest}" for name, digest in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def last_part(place: str | Path) -> str:
    """Return the last part of a path; a name such as tfds:wikipedia is returned unchanged."""
    name = f"{place}"
    return name if name.startswith(REMOTE) else Path(name).absolute().name


def sources_of(header: Mapping[str, Any], file: Path | str) -> tuple[Ancestor, ...]:
    """Return the files that a corpus was built from, as its header lists them in `sources`."""
    sources, parents = header.get("sources"), []
    for each in sources if isinstance(sources, list) else []:
        if not isinstance(each, Mapping) or not isinstance(name := each.get("name"), str):
            raise UserError(f"{file}: an entry of sources is {short(each)}; it must have a name")
        digest, part = each.get("sha256"), each.get("part")
        cut = part if isinstance(part, list) and [*map(type, part)] == [int, int] else None
        parents.append(
            Ancestor(
                "source", "file", name, name, Path(name).is_file(),
                recorded=digest if isinstance(digest, str) else "",
                part=(cut[0], cut[1]) if cut else None,
            )
        )  # fmt: skip
    return tuple(parents)


def known_ancestors(record: Mapping[str, Any], file: Path) -> dict[str, Ancestor]:
    """Return the ancestors in a directory's `record`, by role; `file` names the record."""
    entries = record.get(RECORD, [])
    if not isinstance(entries, list):
        raise UserError(f"{file}: {RECORD} is {short(entries)}; expected a list of ancestors")
    return {each.role: each for each in (_from_entry(entry, file) for entry in entries)}


def _from_entry(entry: Any, file: Path) -> Ancestor:
    """Rebuild an ancestor from the result of `Ancestor.entry`, without looking on disk."""
    values = entry if isinstance(entry, Mapping) else {}
    texts = {name: values.get(name, "") for name in ("role", "kind", "name", "digest", "note")}
    parents, step = values.get("parents", []), values.get("step")
    sound = isinstance(parents, list) and (step is None or type(step) is int)
    if not (values and sound and all(isinstance(text, str) for text in texts.values())):
        raise UserError(f"{file}: {RECORD} has {short(entry)}; expected role, kind, name, digest")
    return Ancestor(
        texts["role"], texts["kind"], texts["name"], step=step, recorded=texts["digest"],
        note=texts["note"], parents=tuple(_from_entry(each, file) for each in parents),
    )  # fmt: skip
