"""A thousand hostile records: each is a document or a counted loss, and its neighbours arrive."""

import io
import json
import random
import subprocess
import sys

import hostile_records
import pytest
from word_tokenizer import WordTokenizer

from bert_jax.data.corpus.build import build_corpora
from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.kinds import archives
from bert_jax.data.corpus.passes import Recipe
from bert_jax.data.corpus.sharded.engine import Engine
from bert_jax.files.untrusted.compressed import sound_blocks

pytest.importorskip("warcio", reason="warcio is not installed")
pytest.importorskip("mwparserfromhell", reason="mwparserfromhell is not installed")

MOST_BYTES, MOST_SECONDS = 1.5 * 2**30, 60
"""Bounds of a process and, in time on a processor, of a record."""


@pytest.mark.parametrize(
    ("count", "per_file", "parse_seconds"),
    [(110, 3, 1), pytest.param(400, 8, archives.PARSE_SECONDS, marks=pytest.mark.slow)],
)
def test_every_loss_is_counted(tmp_path, count, per_file, parse_seconds):
    arguments = [tmp_path, 0, count, per_file, parse_seconds]
    done = subprocess.run(
        [sys.executable, hostile_records.__file__, *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *files, end = map(json.loads, done.stdout.splitlines())
    assert sum(each["made"] for each in files) > 1.5 * count
    for each in files:
        assert each["missing"] == [], each
        assert each["documents"] + sum(each["bad"].values()) == each["records"] == each["made"], (
            each
        )
        assert each["seconds"] < MOST_SECONDS, each
    assert end["memory"] < MOST_BYTES


@pytest.mark.parametrize("suffix", hostile_records.COMPRESSORS)
def test_neighbouring_damaged_streams_are_counted(suffix):
    texts = [random.Random(number).randbytes(300).hex().encode() for number in range(5)]
    streams = [hostile_records.COMPRESSORS[suffix](text) for text in texts]
    for number in (1, 2, 3):
        middle = len(streams[number]) // 2
        streams[number] = streams[number][:middle] + bytes(9) + streams[number][middle + 9 :]
    read = io.BytesIO(b"".join(streams)).read
    first, *_, damage, last = sound_blocks(read, f"a{suffix}")  # bzip2 has unpacked garbage
    assert (first, last) == (texts[0], texts[4])
    assert damage.count == 3


def test_a_corpus_of_hostile_records(tmp_path, monkeypatch):
    """The counts of all files are those of the corpus."""
    monkeypatch.setattr(archives, "PARSE_SECONDS", 0.5)
    made = list(hostile_records.make(1, 60, 2))[::2]
    for each in made:
        (tmp_path / each.name).write_bytes(each.content)
    (built,) = build_corpora(
        [str(tmp_path / "*")], Recipe(WordTokenizer()), tmp_path / "out", engine=Engine(1),
        options=ReadOptions(on_bad="quarantine", most_bad=1.0), progress=False,
    )  # fmt: skip
    records = sum(each.records for each in made)
    assert built.bad.records == records
    assert built.written.train + built.written.heldout == records - built.bad.documents.total()
    kept = {path.stem for path in (tmp_path / "out" / "quarantine").iterdir()}
    assert kept == set(built.bad.documents)
