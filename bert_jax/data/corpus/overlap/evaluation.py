"""Reading of evaluation texts, such as test examples, which are then looked for in a corpus."""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.data.corpus.overlap.ngrams import MIN_WORDS, hash_text, normalised_words
from bert_jax.errors import UserError
from bert_jax.files.checks import digest_of
from bert_jax.files.untrusted.compressed import plain_suffix, read_plain
from bert_jax.files.untrusted.json_file import parse_json
from bert_jax.files.untrusted.tables import csv_records
from bert_jax.files.untrusted.whole_file import decode_text
from bert_jax.tasks.glue import TASKS
from bert_jax.tasks.squad.sources import read_squad
from bert_jax.tasks.text.sources import read_glue

MAX_BYTES = 1 << 30  # largest evaluation file, after decompression
_FORMS = (
    "squad:FILE, glue:DIR (the directory of GLUE, or of one task), or a file: .txt with one "
    "example per line, .tsv or .csv with one example per row, or .jsonl with one example per "
    "object (each also with .gz, .xz or .zst)"
)


class Example(NamedTuple):
    """Texts of one evaluation example, such as a question and its context."""

    split: str
    """Name of the split, or of the file if it is not divided into splits."""
    texts: tuple[str, ...]


@dataclass(frozen=True)
class EvaluationSet:
    """Examples of an evaluation, in file order."""

    name: str
    """Name of the file, or `glue:` and the name of the directory."""
    files: tuple[tuple[str, str], ...]
    """Name and sha256 of each file."""
    examples: tuple[Example, ...]

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """Distinct texts of the examples; texts with equal normalised words count as one."""
        found: dict[str, str] = {}
        for each in self.examples:
            for text in each.texts:
                found.setdefault(text_key(text), text)
        return tuple(found.values())

    @property
    def digest(self) -> str:
        """sha256 in hex of the file or, if there are several files, of their joined digests."""
        if len(self.files) == 1:
            return self.files[0][1]
        return hashlib.sha256("".join(digest for _, digest in self.files).encode()).hexdigest()


def text_key(text: str) -> str:
    """Return the key of a text: a hash of its normalised words, in 16 hex digits."""
    return f"{hash_text(' '.join(normalised_words(text))):016x}"


def read_evaluation(spec: str) -> EvaluationSet:
    """Read the evaluation texts that `spec` names; `_FORMS` lists the forms of `spec`.

    From GLUE tasks, the texts of existing dev and test splits are read, without labels; from SQuAD
    files, questions and contexts; from tables, all columns; from JSON lines, all strings. Results
    are cached. Raise a UserError if a file is missing, damaged, unsupported or without text.
    """
    kind, colon, place = spec.partition(":")
    is_kind = colon and kind in ("squad", "glue")
    path = Path(place if is_kind else spec)
    files = sorted(path.rglob("*.t*")) if path.is_dir() else [path]
    states = (each.stat() for each in files if each.is_file())
    sizes_and_times = tuple((state.st_size, state.st_mtime_ns) for state in states)
    return _read(kind if is_kind else "", path, spec, sizes_and_times)


@functools.lru_cache(64)  # each block of a build asks for all sets
def _read(kind: str, path: Path, spec: str, states: tuple[tuple[int, int], ...]) -> EvaluationSet:
    """Read evaluation texts; `states` (the files' sizes and times) is only used as a cache key."""
    del states
    if kind == "glue":
        return _glue(path, spec)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(f"{spec!r}: {path} {what}. Name evaluation texts as {_FORMS}.")
    if kind != "squad":
        return _set(path.name, [path], _examples(path))
    questions = read_squad(path, misplaced="keep").examples
    found = [Example(path.name, (each.question, each.context)) for each in questions]
    return _set(path.name, [path], found)


def _set(name: str, paths: Sequence[Path], examples: Iterable[Example]) -> EvaluationSet:
    kept = tuple(each for each in examples if any(map(str.strip, each.texts)))
    if not kept:
        raise UserError(f"{name} has no text to search for. Name evaluation texts as {_FORMS}.")
    return EvaluationSet(name, tuple((path.name, digest_of(path)) for path in paths), kept)


def _glue(directory: Path, spec: str) -> EvaluationSet:
    if not directory.is_dir():
        raise UserError(f"{spec!r}: {directory} is not a directory. Name evaluation texts "
                        f"as {_FORMS}.")  # fmt: skip
    paths: list[Path] = []
    examples: list[Example] = []
    for name, task in TASKS.items():
        home = directory / task.directory
        if not home.is_dir():
            if directory.resolve().name != task.directory:
                continue
            home = directory
        for split, file in task.files.items():
            path = home / file
            if name == "mrpc" and not path.is_file():
                path = home / f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt"
            if split == "train" or not path.is_file():
                continue
            paths.append(path)
            examples += (
                Example(f"{name}/{split}", tuple(filter(None, (each.text, each.text_pair))))
                for each in read_glue(home, name, split).examples
            )
    if not paths:
        known = ", ".join(task.directory for task in TASKS.values())
        raise UserError(f"{spec!r}: {directory} has no dev or test file of a GLUE task ({known}).")
    return _set(f"glue:{directory.resolve().name}", paths, examples)


def _examples(path: Path) -> Iterator[Example]:
    """Read the examples of a file in the format that its suffix stands for."""
    kind = plain_suffix(path.name)
    raw = read_plain(path, max_bytes=MAX_BYTES)
    if kind in (".jsonl", ".ndjson"):
        for number, line in enumerate(raw.splitlines(), 1):
            if line.strip():
                value = parse_json(line, where=f"{path}, line {number}")
                yield Example(path.name, tuple(_strings(value)))
        return
    if kind not in (".txt", ".text", ".tsv", ".csv", ""):
        hint = f" Is it squad:{path}?" if kind == ".json" else ""
        raise UserError(f"{path}: {kind} files are not supported.{hint} Name evaluation texts "
                        f"as {_FORMS}.")  # fmt: skip
    lines = decode_text(raw, where=f"{path}").split("\n")
    if kind == ".csv":
        rows = [fields for _, fields in csv_records(f"{path}", lines, MAX_BYTES)]
    else:
        rows = [line.split("\t") if kind == ".tsv" else [line] for line in lines]
    first, *others = rows

    def is_long(fields: Sequence[str]) -> bool:
        return any(len(normalised_words(field)) >= MIN_WORDS for field in fields)

    # The first row is a header if all its texts are short and some row below has a longer one.
    has_names = kind in (".csv", ".tsv") and not is_long(first) and any(map(is_long, others))
    yield from (Example(path.name, tuple(row)) for row in (others if has_names else rows))


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value; join a list of strings unless most contain blanks."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        are_texts = sum(" " in each for each in value) > len(value) / 2
        yield from value if are_texts else [" ".join(value)]
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
