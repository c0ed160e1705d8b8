"""The account of a corpus: what its sources, licences, languages and tokenizer are.

The account is a part of `corpus.json`, which the fingerprint of a store does not cover, and
`CORPUS.md` says the same for people. The questions come from Gebru et al. 2021, "Datasheets for
datasets", as far as a program can answer them.
"""

import datetime
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.data.corpus.coverage import ScriptCounts, measure_coverage, scripts_as_json
from bert_jax.data.shard import MAX_HEADER_BYTES
from bert_jax.files.staging import write_synced
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.terminal import markdown_table
from bert_jax.tokenization.tokenizer import Tokenizer

DATASHEET = "CORPUS.md"
LANGUAGE_FIELDS, LICENCE_FIELDS = ("language", "lang"), ("licence", "license")
"""Fields of a document that name its language and its licence."""
_SAMPLE, _OF_SOURCE = 1 << 18, 1 << 16
"""Characters on which coverage is measured, in all and of one source."""
_MOST_ROWS = 100
_PACKAGES = ("bert_jax", "numpy", "tokenizers", "sentencepiece")


class Amount(NamedTuple):
    """Number of documents and of their characters."""

    documents: int = 0
    characters: int = 0

    def plus(self, documents: int, characters: int) -> "Amount":
        """Return the sum."""
        return Amount(self.documents + documents, self.characters + characters)


class Tally:
    """Documents by language and licence, and the tokenizer's coverage of a sample of the text.

    The sample is the beginnings of the sources.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with nothing."""
        self.tokenizer = tokenizer
        self.languages: dict[str, Amount] = defaultdict(Amount)
        self.licences: dict[str, Amount] = defaultdict(Amount)
        self.scripts: dict[str, ScriptCounts] = defaultdict(ScriptCounts)
        self.characters = 0
        """Characters of the sample."""
        self._source, self._room = "", 0

    def count(self, text: str, source: str, fields: Mapping[str, Any]) -> None:
        """Count a document, by the fields that it has."""
        if source != self._source:
            self._source, self._room = source, min(_OF_SOURCE, _SAMPLE - self.characters)
        if self._room > 0:
            self.measure(text[: self._room])
            self._room -= len(text)
        for counts, names in (
            (self.languages, LANGUAGE_FIELDS), (self.licences, LICENCE_FIELDS)
        ) if fields else ():  # fmt: skip
            value = next((fields[name] for name in names if fields.get(name)), None)
            if value is not None:
                counts[f"{value}"] = counts[f"{value}"].plus(1, len(text))

    def measure(self, text: str) -> None:
        """Add a text to the sample."""
        self.characters += len(text)
        for script, counts in measure_coverage(self.tokenizer, text.split("\n")).items():
            self.scripts[script].add(counts)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add another tally, from its `as_json`."""
        for counts, name in ((self.languages, "languages"), (self.licences, "licences")):
            for key, amount in values[name].items():
                counts[key] = counts[key].plus(*amount)
        for script, found in values["scripts"].items():
            self.scripts[script].add(found)
        self.characters += values["characters"]

    def as_json(self) -> dict[str, Any]:
        """Return all counts as JSON values."""
        return {
            "languages": {key: list(amount) for key, amount in self.languages.items()},
            "licences": {key: list(amount) for key, amount in self.licences.items()},
            "scripts": scripts_as_json(self.scripts),
            "characters": self.characters,
        }


@dataclass(frozen=True)
class Provenance:
    """Statements of whoever builds a corpus."""

    licence: str = ""
    """Licence of the text; empty where nobody has named one."""
    command: str = ""
    """Command line of the build; empty from Python."""


def account(
    tally: Tally, sources: Sequence[Mapping[str, Any]], provenance: Provenance
) -> dict[str, Any]:
    """Return the entries of `corpus.json` that account for a build.

    Args:
        tally: Counts of what went in.
        sources: Records of the sources, as `Source.record` returns them.
        provenance: Statements of whoever builds the corpus.

    Returns:
        `sources` with the dates of their files, and `account`.
    """
    now = datetime.datetime.now(datetime.UTC)
    return {
        "sources": [_dated(each) for each in sources],
        "account": {
            "built": now.isoformat(timespec="seconds"),
            **asdict(provenance),
            "languages": {key: amount._asdict() for key, amount in tally.languages.items()},
            "licences": {key: amount._asdict() for key, amount in tally.licences.items()},
            "tokenizer": tally.tokenizer.kind,
            "coverage": {
                "characters": tally.characters,
                "scripts": scripts_as_json(tally.scripts),
            },
            "versions": {
                **{name: metadata.version(name) for name in _PACKAGES},
                "python": platform.python_version(),
            },
        },
    }


def _dated(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a source with the date of its last change, where it is a file here."""
    try:
        changed = Path(f"{record['name']}").stat().st_mtime
    except (KeyError, OSError, ValueError):
        return dict(record)
    date = datetime.datetime.fromtimestamp(changed, datetime.UTC)
    return {**record, "changed": date.isoformat(timespec="seconds")}


def write_datasheet(directory: Path) -> None:
    """Write `CORPUS.md` beside the stores of a corpus, from what their `corpus.json` say.

    Raises:
        OSError: The file cannot be written.
    """
    headers = {
        part: read_json_object(directory / part / "corpus.json", max_bytes=MAX_HEADER_BYTES)
        for part in ("train", "heldout")
        if (directory / part / "corpus.json").is_file()
    }
    write_synced(directory / DATASHEET, datasheet(headers).encode())


def datasheet(headers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the datasheet as Markdown, from the content of each store's `corpus.json`."""
    header = headers["train"]
    account = header.get("account", {})
    command = account.get("command") or "from Python"
    sections = [
        "# Datasheet of a corpus",
        f"Built on {_plain(account.get('built', 'an unknown date'))} with bert_jax "
        f"{_plain(account.get('versions', {}).get('bert_jax', ''))}: `{_plain(command, 2000)}`.",
        _stores(headers),
        "## Sources\n\n" + _sources(header.get("sources", [])),
        "## Licence\n\n" + _licences(account),
        "## Languages\n\n"
        + _amounts("language", account.get("languages", {}), "No source names any."),
        "## Cleaning\n\n" + _cleaning(headers),
        "## Tokenizer and coverage\n\n" + _coverage(header, account),
        "## Versions\n\n"
        + ", ".join(f"{k} {_plain(v)}" for k, v in account.get("versions", {}).items()),
    ]
    return "\n\n".join(sections) + "\n"


def _stores(headers: Mapping[str, Mapping[str, Any]]) -> str:
    names = {"train": "training", "heldout": "held out"}
    rows = [["", *(names[part] for part in headers)]]
    for key, said in (
        ("num_documents", "documents"), ("num_sentences", "sentences"), ("num_tokens", "tokens")
    ):  # fmt: skip
        rows.append([said, *(_number(each.get(key)) for each in headers.values())])
    rows.append(["shards", *(_number(len(each.get("shards", ()))) for each in headers.values())])
    rows.append(
        ["fingerprint", *(f"`{_plain(e.get('fingerprint'))[:16]}`" for e in headers.values())]
    )
    header = headers["train"]
    how = []
    if size := _number(header.get("text_bytes")):
        how.append(f"{size} bytes of text were tokenized.")
    if header.get("pairs"):
        how.append("Each document is a pair of two sentences, a source and its target.")
    elif "splitter" in header:
        how.append(f"Sentences are those of the splitter `{_plain(header['splitter'])}`.")
    rate = header.get("heldout_rate")
    if isinstance(rate, float) and rate and "heldout" in headers:
        how.append(f"Held out by a hash of the text: {100 * rate:g}%.")
    return markdown_table(rows) + "\n\n" + " ".join(how)


def _sources(sources: Sequence[Mapping[str, Any]]) -> str:
    rows = [["source", "size", "documents", "changed", "sha256"]]
    for each in sources[:_MOST_ROWS]:
        unit = next((unit for unit in ("bytes", "examples", "documents") if unit in each), "")
        size = f"{_number(each[unit])} {unit}" if unit and unit != "documents" else ""
        rows.append(
            [
                f"`{_plain(each.get('name'))}`",
                size,
                _number(each.get("documents")),
                _plain(each.get("changed", ""))[:10],
                f"`{_plain(each.get('sha256', 'not known'))[:16]}`",
            ]
        )
    more = len(sources) - _MOST_ROWS
    return markdown_table(rows) + (f"\n\nand {more:,} more, in `corpus.json`." if more > 0 else "")


def _licences(account: Mapping[str, Any]) -> str:
    said = account.get("licence")
    whole = (
        f"`{_plain(said)}`, as said by who built the corpus."
        if said
        else "Unknown: nobody has said under which licence the text may be used."
    )
    named = account.get("licences", {})
    return whole + ("\n\n" + _amounts("licence by document", named, "") if named else "")


def _rules(config: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str]]:
    """Return the names and values of the rules that are set, one of a group each."""
    for name, value in config.items():
        if isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values()):
            yield from _rules(value, f"{name}: ")
        elif isinstance(value, Mapping):
            given = (f"{key} {each}" for key, each in value.items() if each is not None)
            yield f"{group}{name}", ", ".join(given)
        elif value not in (None, False, "", []):
            yield f"{group}{name}", "yes" if value is True else str(value)


def _cleaning(headers: Mapping[str, Mapping[str, Any]]) -> str:
    header = headers["train"]
    config, dropped = header.get("cleaning"), header.get("dropped")
    if not config and not dropped:
        return "None: no filter and no search for duplicates was asked for."
    parts = []
    if isinstance(config, Mapping):
        rows = [["rule", "value"]]
        rows += [[f"`{_plain(name)}`", _plain(value, 400)] for name, value in _rules(config)]
        parts.append(markdown_table(rows))
    if isinstance(dropped, Mapping):
        rows = [["reason", "dropped"]]
        rows += [[f"`{_plain(reason)}`", _number(count)] for reason, count in dropped.items()]
        parts.append(markdown_table(rows) if dropped else "No document was dropped.")
    return "\n\n".join(parts)


def _coverage(header: Mapping[str, Any], account: Mapping[str, Any]) -> str:
    kind, size = _plain(account.get("tokenizer", "unknown")), _number(header.get("vocab_size"))
    said = (
        f"{kind}, {size} tokens, fingerprint "
        f"`{_plain(header.get('tokenizer_fingerprint'))[:16]}`; its files are in `train/tokenizer`."
    )
    coverage = account.get("coverage", {})
    scripts = coverage.get("scripts", {})
    if not scripts:
        return said
    rows = [
        ["script", "words", "tokens", "tokens per word", "[UNK]", "bytes and parts of characters"]
    ]
    for script, one in list(scripts.items())[:_MOST_ROWS]:
        tokens, ratio = max(1, one["tokens"]), one["tokens_per_word"]
        rows.append(
            [
                _plain(script),
                _number(one["words"]),
                _number(one["tokens"]),
                "" if ratio is None else f"{ratio:.2f}",
                f"{one['unknown'] / tokens:.2%}",
                f"{one['fallback'] / tokens:.2%}",
            ]
        )
    sample = _number(coverage.get("characters"))
    return f"{said} On a sample of {sample} characters of the text:\n\n{markdown_table(rows)}"


def _amounts(what: str, amounts: Mapping[str, Any], none: str) -> str:
    if not amounts:
        return none
    rows = [[what, "documents", "characters"]]
    order = sorted(amounts.items(), key=lambda item: -item[1]["documents"])
    rows += [
        [f"`{_plain(name)}`", _number(each["documents"]), _number(each["characters"])]
        for name, each in order[:_MOST_ROWS]
    ]
    more = len(order) - _MOST_ROWS
    return markdown_table(rows) + (f"\n\nand {more:,} more, in `corpus.json`." if more > 0 else "")


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _plain(value: Any, most: int = 200) -> str:
    """Return text on one line, without what ends a code span or a cell."""
    return "".join(c if c.isprintable() and c not in "`|<>" else " " for c in f"{value}")[:most]
