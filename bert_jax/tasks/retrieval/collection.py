"""Test collections in BEIR's layout: corpus.jsonl, queries.jsonl, qrels/NAME.tsv.

Source: Thakur et al. 2021 (BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation ...).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError, first_few
from bert_jax.files.untrusted.compressed import read_plain
from bert_jax.files.untrusted.json_file import parse_json
from bert_jax.files.untrusted.whole_file import decode_text

MAX_BYTES = 4 << 30
_LAYOUT = "corpus.jsonl, queries.jsonl and qrels/test.tsv"
_HEADER = ["query-id", "corpus-id", "score"]


@dataclass(frozen=True)
class Collection:
    """Documents, queries, and relevance judgements that link them."""

    documents: Mapping[str, str]
    """Texts by id; the document's title, if any, and a blank come before the text."""
    queries: Mapping[str, str]
    """Texts of the judged queries by id."""
    relevant: Mapping[str, Mapping[str, float]]
    """Grades of each query's judged documents; a grade above 0 means relevant."""


def read_collection(path: str | Path) -> Collection:
    """Read a collection; files may be compressed, with .gz, .xz or .zst added to their names.

    The path is a collection's directory or a file of judgements in its `qrels`. In a directory, the
    judgements are in qrels/test.tsv or, if that is missing, in the only file of `qrels`. Raise a
    UserError if a file is missing, a line is invalid, or a judgement names an unknown id.
    """
    directory, judgements = _located(Path(path))
    documents = {
        id: f"{title} {text}".strip() if (title := row.get("title") or "") else text
        for id, text, row in _texts(_file(directory, "corpus.jsonl"))
    }
    queries = {id: text for id, text, _ in _texts(_file(directory, "queries.jsonl"))}
    relevant = _judgements(judgements)
    unknown = [f"query {id!r}" for id in relevant if id not in queries] + [
        f"document {id!r}" for grades in relevant.values() for id in grades if id not in documents
    ]
    if unknown:
        raise UserError(f"{judgements} has ids that {directory} lacks: {first_few(unknown)}")
    return Collection(documents, {id: queries[id] for id in relevant}, relevant)


def _located(path: Path) -> tuple[Path, Path]:
    if path.is_file() and path.parent.name == "qrels":
        return path.parent.parent, path
    if not path.is_dir():
        raise UserError(f"{path} is not a directory in BEIR's layout ({_LAYOUT})")
    found = sorted((path / "qrels").glob("*.tsv*"))
    chosen = [each for each in found if each.name.startswith("test.tsv")] or found
    if len(chosen) == 1:
        return path, chosen[0]
    if not found:
        raise UserError(f"{path} has no judgements in qrels/test.tsv; BEIR's layout is {_LAYOUT}")
    names = ", ".join(each.name for each in found)
    raise UserError(f"{path}/qrels holds {names}; give one of these files instead of {path}")


def _file(directory: Path, name: str) -> Path:
    for suffix in ("", ".gz", ".xz", ".zst"):
        if (path := directory / f"{name}{suffix}").is_file():
            return path
    raise UserError(f"{directory} has no {name}; BEIR's layout is {_LAYOUT}")


def _texts(path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    found: list[tuple[str, str, dict[str, Any]]] = []
    seen: set[str] = set()
    for number, line in enumerate(read_plain(path, max_bytes=MAX_BYTES).split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = parse_json(line, where=where)
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise UserError(f'{where}: expected an object such as {{"_id": "1", "text": "..."}}')
        id = row.get("_id")
        if not isinstance(id, str | int) or isinstance(id, bool) or id == "":
            raise UserError(f"{where}: the field '_id' is {id!r:.60}; expected a name or number")
        if f"{id}" in seen:
            raise UserError(f"{where}: the id {id!r:.60} occurs twice; expected unique ids")
        if not isinstance(row.get("title") or "", str):
            raise UserError(f"{where}: the field 'title' holds {row['title']!r:.60}, not text")
        seen.add(f"{id}")
        found.append((f"{id}", row["text"], row))
    if not found:
        raise UserError(f"{path} holds no text")
    return found


def _judgements(path: Path) -> dict[str, dict[str, float]]:
    """Read the grades of documents, by query and document; line 1 may be a header."""
    relevant: dict[str, dict[str, float]] = {}
    text = decode_text(read_plain(path, max_bytes=MAX_BYTES), where=f"{path}")
    for number, line in enumerate(text.split("\n"), 1):
        fields = line.rstrip("\r").split("\t")
        if fields == [""] or (number == 1 and fields == _HEADER):
            continue
        try:
            query, document, given = fields
            grade = float(given)
        except ValueError:
            grade = math.nan
        if not math.isfinite(grade):
            raise UserError(
                f"{path}, line {number}: {line!r:.80} is not a judgement; expected a query's id, a "
                "document's id and a grade, with tabs between them"
            )
        relevant.setdefault(query, {})[document] = grade
    if not any(grade > 0 for grades in relevant.values() for grade in grades.values()):
        raise UserError(f"{path} judges no document as relevant (grade above 0)")
    return relevant
