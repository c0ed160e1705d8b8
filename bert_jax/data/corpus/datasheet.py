"""The account of a corpus: a description of its sources, licences, languages and tokenizer.

The account is stored in `corpus.json` for programs and in `CORPUS.md` for people, and does not
change the fingerprint of a token store. The account answers the questions of Gebru et al. 2021,
"Datasheets for datasets", as far as a program can answer them.
"""

import datetime
import platform
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.corpus.intake import DropReport
from bert_jax.data.shard import MAX_HEADER_BYTES
from bert_jax.files.staging import write_synced
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.terminal import markdown_table, plain
from bert_jax.tokenization.tokenizer import Tokenizer

OTHER = "digits and signs"
"""Script name for text without letters."""
_HAN = ("CJK", "IDEOGRAPHIC", "KANGXI")
_WIDTHS = ("FULLWIDTH", "HALFWIDTH")
_NO_SCRIPT = ("COMBINING", "MATHEMATICAL", "MODIFIER", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER")
_REPLACEMENT = "\ufffd"


Counts = defaultdict[str, Counter[str]]
"""Named counts for each script, language or licence.

A script has the counts `words` (tokens that begin a word), `tokens`, `unknown` (unknown tokens) and
`fallback` (parts of characters). A language or licence has the counts `documents` and `characters`.
"""


@lru_cache(maxsize=1 << 16)
def script_of(char: str) -> str:
    """Return a letter's script, the first word of its name in Unicode; "" for another character."""
    if unicodedata.category(char)[0] not in "LM":
        return ""
    words = [each for each in unicodedata.name(char, "").split() if each not in _WIDTHS][:1]
    if not words or words[0] in _NO_SCRIPT:
        return ""
    return "Han" if words[0] in _HAN else words[0].capitalize()


def text_script(text: str) -> str:
    """Return the script of a text's first letter; `OTHER` if it has no letter."""
    return next((script for char in text if (script := script_of(char))), OTHER)


@cache
def _counts_of(tokenizer: Tokenizer) -> Callable[[int], dict[str, int]]:
    """Return a function that returns the counts of a token, given its id."""

    @cache
    def counts_of(id: int) -> dict[str, int]:
        name, is_unknown = tokenizer.id_to_token(id), id == tokenizer.special_ids.unk
        is_part = len(name) == 6 and name.startswith("<0x") and name.endswith(">")
        if not is_part and _REPLACEMENT not in name:
            is_part = _REPLACEMENT in tokenizer.decode([id])
        return {
            "words": int(not tokenizer.continues_word[id]),
            "tokens": 1,
            "unknown": int(is_unknown),
            "fallback": int(is_part and not is_unknown),
        }

    return counts_of


def measure_coverage(tokenizer: Tokenizer, texts: Iterable[str]) -> Counts:
    """Count words, tokens, [UNK] and byte fallback by the script of a token's first letter."""
    counts, counts_of = Counts(Counter), _counts_of(tokenizer)
    for each in texts:
        text = tokenizer.word_prefix + each  # as in a build, where sentences follow one another
        ids, offsets = (found.tolist() for found in tokenizer.encode(text))
        for id, (begin, end) in zip(ids, offsets, strict=True):
            counts[text_script(text[begin:end])].update(counts_of(id))
    return counts


def vocabulary_scripts(tokenizer: Tokenizer, counts: np.ndarray) -> Counts:
    """Sum `counts` of ids by script; [UNK] and parts of characters have entries of their own."""
    found, counts_of = Counts(Counter), _counts_of(tokenizer)
    for id in np.flatnonzero(counts).tolist():
        one = counts_of(id)
        script = "[UNK]" if one["unknown"] else "parts of characters" if one["fallback"] else None
        times = {name: int(counts[id]) * each for name, each in one.items()}
        found[script or text_script(tokenizer.decode([id]))].update(times)
    return found


def scripts_as_json(counts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, Any]]:
    """Return the counts and the tokens per word as JSON, the script with the most tokens first."""
    return {
        script: {
            **each,
            "tokens_per_word": each["tokens"] / each["words"] if each["words"] else None,
        }
        for script, each in sorted(counts.items(), key=lambda item: -item[1]["tokens"])
    }


DATASHEET = "CORPUS.md"
FIELDS = {"languages": ("language", "lang"), "licences": ("licence", "license")}
"""Fields of a document that name its language or its licence."""
_SAMPLE, _OF_SOURCE = 1 << 18, 1 << 16
"""Largest numbers of characters on which a task measures coverage: per corpus, and per source."""
_MOST_ROWS = 100
_PACKAGES = ("bert_jax", "numpy", "tokenizers", "sentencepiece")


class Tally:
    """Counts of documents by language and licence, and the tokenizer's coverage of a sample."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.counts = {name: Counts(Counter) for name in (*FIELDS, "scripts")}
        """Counts of documents by the values of `FIELDS`, and of the sample's tokens by script."""
        self.characters = 0  # characters in the sample, the beginnings of the sources
        self._source, self._room = "", 0

    def count(self, text: str, source: str, fields: Mapping[str, Any]) -> None:
        """Count a document by its fields, and add its text to the sample if there is room."""
        if source != self._source:
            self._source, self._room = source, min(_OF_SOURCE, _SAMPLE - self.characters)
        if self._room > 0:
            self.measure(text[: self._room])
            self._room -= len(text)
        for name, names in FIELDS.items() if fields else ():
            value = next((fields[each] for each in names if fields.get(each)), None)
            if value is not None:
                self.counts[name][f"{value}"].update(documents=1, characters=len(text))

    def measure(self, text: str) -> None:
        """Add a text to the sample."""
        self.characters += len(text)
        for script, counts in measure_coverage(self.tokenizer, text.split("\n")).items():
            self.counts["scripts"][script].update(counts)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add another tally, given as the values that its `as_json` returned."""
        for name, counts in self.counts.items():
            for key, more in values[name].items():
                counts[key].update(more)
        self.characters += values["characters"]

    def as_json(self) -> dict[str, Any]:
        """Return all counts as JSON values."""
        return {**self.counts, "characters": self.characters}


@dataclass(frozen=True)
class Provenance:
    """Licence and build command to record in a corpus."""

    licence: str = ""
    """Licence of the text; the empty string if it is not known."""
    command: str = ""
    """Command line of the build; the empty string if the build was called from Python."""


def account(
    tally: Tally, sources: Sequence[Mapping[str, Any]], provenance: Provenance
) -> dict[str, Any]:
    """Return two entries of `corpus.json`: "sources", with dates of local files, and "account"."""
    return {
        "sources": [_dated(each) for each in sources],
        "account": {
            "built": _date(time.time()),
            **asdict(provenance),
            **{name: tally.counts[name] for name in FIELDS},
            "tokenizer": tally.tokenizer.kind,
            "coverage": {
                "characters": tally.characters,
                "scripts": scripts_as_json(tally.counts["scripts"]),
            },
            "versions": {
                **{name: metadata.version(name) for name in _PACKAGES},
                "python": platform.python_version(),
            },
        },
    }


def _dated(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a source; for a local file, add the date of its last change."""
    try:
        changed = Path(f"{record['name']}").stat().st_mtime
    except (KeyError, OSError, ValueError):
        return dict(record)
    return {**record, "changed": _date(changed)}


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def write_datasheet(directory: Path) -> None:
    """Write `CORPUS.md` beside the stores of a corpus, from their `corpus.json`."""
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
    own, *other = dict.fromkeys(_sources(each.get("sources", [])) for each in headers.values())
    sections = [
        "# Datasheet of a corpus",
        f"Built on {plain(account.get('built', 'an unknown date'))} with bert_jax "
        f"{plain(account.get('versions', {}).get('bert_jax', ''))}: `{plain(command, 2000)}`.",
        _stores(headers),
        "## Sources\n\n" + own + "".join(f"\n\nOf held-out text:\n\n{each}" for each in other),
        "## Licence\n\n" + _licences(account),
        "## Languages\n\n"
        + (_amounts("language", account.get("languages", {})) or "No document names its language."),
        "## Bad records\n\n" + _bad_records(header.get("bad_records", {})),
        "## Cleaning\n\n" + _cleaning(header),
        "## Tokenizer and coverage\n\n" + _coverage(header, account),
        "## Versions\n\n"
        + ", ".join(f"{k} {plain(v)}" for k, v in account.get("versions", {}).items()),
    ]
    return "\n\n".join(sections) + "\n"


def _stores(headers: Mapping[str, Mapping[str, Any]]) -> str:
    stores, header = headers.values(), headers["train"]
    rows = [
        [said, *(_number(each.get(f"num_{said}")) for each in stores)]
        for said in ("documents", "sentences", "tokens")
    ]
    rows.append(["shards", *(_number(len(each.get("shards", ()))) for each in stores)])
    rows.append(["fingerprint", *(_code(each.get("fingerprint"), 16) for each in stores)])
    how = []
    if size := _number(header.get("text_bytes")):
        how.append(f"{size} bytes of text were tokenized.")
    if header.get("pairs"):
        how.append("Each document is a pair of two sentences, a source and its target.")
    elif "splitter" in header:
        how.append(f"The splitter {_code(header['splitter'])} made the sentences.")
    rate = header.get("heldout_rate")
    if isinstance(rate, float) and rate and "heldout" in headers:
        what, least = ("source", "") if header.get("pairs") else ("text", ", or at least two")
        share = f"about {100 * rate:g}% of the documents{least}"
        how.append(f"A hash of the {what} chose {share}, to hold out.")
    if field := header.get("by_field"):
        how.append(f"Sources, bad records and cleaning are for all values of {_code(field)}.")
    names = {"train": "training", "heldout": "held out"}
    return _table(["", *(names[part] for part in headers)], rows) + "\n\n" + " ".join(how)


def _sources(sources: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in sources:
        unit = next((unit for unit in ("bytes", "examples") if unit in each), "")
        size = f"{_number(each[unit])} {unit}" if unit else ""
        changed, digest = plain(each.get("changed", ""), 10), each.get("sha256", "not known")
        documents = _number(each.get("documents"))
        rows.append([_code(each.get("name")), size, documents, changed, _code(digest, 16)])
    return _table(["source", "size", "documents", "changed", "sha256"], rows)


def _licences(account: Mapping[str, Any]) -> str:
    whole = "Unknown: nobody has said under which licence the text may be used."
    if said := account.get("licence"):
        whole = f"{_code(said)}, as stated by the builder of the corpus."
    named = _amounts("licence by document", account.get("licences", {}))
    return "\n\n".join(filter(None, (whole, named)))


def _rules(config: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each rule that is set. A rule in a group is named `GROUP: RULE`."""
    for name, value in config.items():
        if isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values()):
            yield from _rules(value, f"{name}: ")
        elif isinstance(value, Mapping):
            given = (f"{key} {each}" for key, each in value.items() if each is not None)
            yield f"{group}{name}", ", ".join(given)
        elif value not in (None, False, "", []):
            yield f"{group}{name}", "yes" if value is True else str(value)


def _cleaning(header: Mapping[str, Any]) -> str:
    config, dropped = header.get("cleaning"), header.get("dropped")
    if not config and not dropped:
        return "None: neither a filter nor a search for duplicates was used."
    parts = []
    if isinstance(config, Mapping):
        rules = ([_code(name), plain(value, 400)] for name, value in _rules(config))
        parts.append(_table(["rule", "value"], rules))
    if isinstance(dropped, Mapping):
        rows = [[_code(reason), _number(count)] for reason, count in dropped.items()]
        parts.append(_table(["reason", "dropped"], rows) if rows else "No document was dropped.")
    return "\n\n".join(parts)


def _bad_records(found: Mapping[str, Any]) -> str:
    if found.get("on_bad", "stop") == "stop":
        return "None: the build would have stopped at the first (`--on-bad=stop`)."
    choice = _code(f"--on-bad={found['on_bad']}:{found['most']:g}")
    report = DropReport(0, Counter(found["bad"]), records=found["records"], unread=found["unread"])
    rows = [[_code(reason), _number(count)] for reason, count in found["bad"].items()]
    return f"{choice}: {report.bad_records()}.\n\n" + _table(["reason", "left out"], rows)


def _coverage(header: Mapping[str, Any], account: Mapping[str, Any]) -> str:
    kind, size = plain(account.get("tokenizer", "unknown")), _number(header.get("vocab_size"))
    said = (
        f"{kind}, {size} tokens, fingerprint {_code(header.get('tokenizer_fingerprint'), 16)}; its "
        "files are in `train/tokenizer`."
    )
    coverage = account.get("coverage", {})
    rows = []
    for script, one in coverage.get("scripts", {}).items():
        tokens, ratio = max(1, one["tokens"]), one["tokens_per_word"]
        shares = (f"{one[name] / tokens:.2%}" for name in ("unknown", "fallback"))
        figures = (_number(one["words"]), _number(one["tokens"]), f"{ratio:.2f}" if ratio else "")
        rows.append([plain(script), *figures, *shares])
    if not rows:
        return said
    columns = [
        "script", "words", "tokens", "tokens per word", "[UNK]", "bytes and parts of characters"
    ]  # fmt: skip
    sample = _number(coverage.get("characters"))
    what = "targets" if header.get("pairs") else "text"
    return f"{said} On a sample of {sample} characters of the {what}:\n\n{_table(columns, rows)}"


def _amounts(what: str, amounts: Mapping[str, Any]) -> str:
    """Return a table of documents and characters by value, most documents first; "" if empty."""
    order = sorted(amounts.items(), key=lambda item: -item[1]["documents"])
    rows = [[_code(name), *map(_number, each.values())] for name, each in order]
    return _table([what, "documents", "characters"], rows) if rows else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the first rows as a Markdown table, followed by the number of further rows."""
    rows = list(rows)
    more = len(rows) - _MOST_ROWS
    rest = f"\n\nand {more:,} more, in `corpus.json`." if more > 0 else ""
    return markdown_table([columns, *rows[:_MOST_ROWS]]) + rest


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _code(value: Any, most: int = 200) -> str:
    return f"`{plain(value, most)}`"
