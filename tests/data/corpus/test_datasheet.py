"""The account of a corpus, and its datasheet."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bert_jax.data.corpus import datasheet as module
from bert_jax.data.corpus.datasheet import Provenance, Tally, account, datasheet
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

TOKENIZER = WordPieceTokenizer([*SPECIAL_TOKENS, "ein", "hund", "a", "dog"])


DOCUMENTS: list[tuple[str, str, dict[str, Any]]] = [
    ("ein hund", "a.jsonl", {"lang": "de", "licence": "cc0-1.0"}),
    ("a dog", "a.jsonl", {"lang": "en"}),
    ("собака", "b.txt", {}),
]


def tally_of(documents: list[tuple[str, str, dict[str, Any]]]) -> Tally:
    tally = Tally(TOKENIZER)
    for document in documents:
        tally.count(*document)
    return tally


def test_documents_are_counted_by_language_and_licence() -> None:
    tally = tally_of(DOCUMENTS)
    german, english = ({"documents": 1, "characters": length} for length in (8, 5))
    assert tally.counts["languages"] == {"de": german, "en": english}
    assert tally.counts["licences"] == {"cc0-1.0": german}
    scripts = tally.counts["scripts"]
    assert (scripts["Cyrillic"]["unknown"], scripts["Latin"]["unknown"]) == (1, 0)


def test_parts_add_up_to_the_whole() -> None:
    whole, parts = tally_of(DOCUMENTS), tally_of(DOCUMENTS[:1])
    parts.add(json.loads(json.dumps(tally_of(DOCUMENTS[1:]).as_json())))
    assert parts.as_json() == whole.as_json()


def test_coverage_is_measured_on_the_beginnings_of_the_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_OF_SOURCE", 10)
    monkeypatch.setattr(module, "_SAMPLE", 25)
    tally = tally_of([("a dog " * 3, name, {}) for name in "aabcd"])
    assert tally.characters == 10 + 10 + 5


def header(tmp_path: Path, **more: Any) -> dict[str, Any]:
    (tmp_path / "b.txt").write_text("собака")
    name = str(tmp_path / "b.txt")
    tally = tally_of(DOCUMENTS)
    sources = [
        {"name": "a.jsonl", "bytes": 99, "documents": 2, "sha256": "ab" * 32},
        {"name": name, "bytes": 12, "sha256": "cd" * 32},
    ]
    said = Provenance("cc-by-4.0", "bert-jax corpus --input 'a|b'")
    made = account(tally, sources, said)
    counts = {"num_documents": 3, "num_sentences": 4, "num_tokens": 1234, "vocab_size": 9}
    return {**counts, "fingerprint": "ef" * 32, "tokenizer_fingerprint": "01" * 32, **made, **more}


def squeezed(text: str) -> str:
    """Undo the alignment of tables."""
    return re.sub(" +", " ", text)


def test_the_datasheet_says_what_the_account_says(tmp_path: Path) -> None:
    told = header(tmp_path, dropped={"duplicate": 7}, cleaning={"language": "de", "filters": []})
    text = squeezed(datasheet({"train": told, "heldout": {**told, "num_documents": 1}}))
    for said in (
        "`bert-jax corpus --input 'a b'`", "| documents | 3 | 1 |", "| tokens | 1,234 | 1,234 |",
        "| `a.jsonl` | 99 bytes | 2 | | `abababababababab` |",
        "`cc-by-4.0`, as stated by the builder", "| `cc0-1.0` | 1 | 8 |", "| `en` | 1 | 5 |",
        "| `duplicate` | 7 |", "| `language` | de |", "wordpiece, 9 tokens",
        "| Cyrillic | 1 | 1 | 1.00 | 100.00% | 0.00% |", "numpy ",
    ):  # fmt: skip
        assert said in text
    assert told["sources"][1]["changed"][:10] in text
    assert "changed" not in told["sources"][0]


def test_a_corpus_of_an_older_version_has_a_datasheet_too() -> None:
    old = {"num_documents": 3, "sources": [{"name": "x.txt", "bytes": 3, "sha256": "ab"}]}
    text = squeezed(datasheet({"train": old}))
    assert "| `x.txt` | 3 bytes |" in text
    assert "Unknown: nobody has said under which licence" in text
    assert "None: neither a filter" in text


def test_the_datasheet_names_the_splitter_of_text_and_none_of_pairs() -> None:
    header = {"splitter": "rules"}
    said = "The splitter `rules` made the sentences."
    assert said in datasheet({"train": header})
    assert said not in datasheet({"train": {**header, "pairs": True}})


def test_what_is_of_the_whole_build_or_held_out_is_said() -> None:
    header = {"by_field": "lang", "heldout_rate": 0.01}
    text = datasheet({"train": header, "heldout": header})
    assert "Sources, bad records and cleaning are for all values of `lang`." in text
    assert "A hash of the text chose about 1% of the documents, or at least two, to hold" in text
    pairs = {"pairs": True, "heldout_rate": 0.01}
    text = datasheet({"train": pairs, "heldout": pairs})
    assert "A hash of the source chose about 1% of the documents, to hold out." in text
    text = datasheet({"train": {"heldout_rate": 0.01}})
    assert "all values" not in text
    assert "to hold out" not in text


@pytest.mark.parametrize("name", ["a|b", "a\nb", "`a`"])
def test_names_cannot_break_the_tables(tmp_path: Path, name: str) -> None:
    source = {"name": name, "bytes": 1, "sha256": "ab"}
    text = squeezed(datasheet({"train": {"num_documents": 1, "sources": [source]}}))
    (line,) = [line for line in text.splitlines() if "| 1 bytes |" in line]
    assert line.count("|") == 6
    assert line.count("`") == 4
