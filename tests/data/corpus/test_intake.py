"""What a build does with records that cannot be read."""

import json
import os
import shutil
from pathlib import Path

import pytest
from word_tokenizer import WordTokenizer

from bert_jax.data.corpus.build import build_corpora
from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.intake import BAD_SAMPLES
from bert_jax.data.corpus.passes import Recipe
from bert_jax.data.corpus.sharded.engine import Engine
from bert_jax.data.corpus.sharded.workspace import Workspace
from bert_jax.data.store import open_store
from bert_jax.errors import UserError

RECORDS, BAD = 400, range(0, 400, 50)


@pytest.fixture
def source(tmp_path) -> Path:
    """A file in which 8 of 400 lines, 2%, are no JSON."""
    texts = (f"Document {number} has a few words." for number in range(RECORDS))
    lines = [json.dumps({"text": text}) for text in texts]
    for number in BAD:
        lines[number] = "no json"
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    return path


def build(source: Path, out: Path, workers: int = 1, **options):
    (built,) = build_corpora(
        [str(source)], Recipe(WordTokenizer(), heldout_rate=0.0), out, engine=Engine(workers),
        shard_bytes=source.stat().st_size // 3, options=ReadOptions(**options), progress=False,
    )  # fmt: skip
    return built


@pytest.mark.parametrize("workers", [1, 2])
def test_a_build_stops_at_the_first_bad_record(source, tmp_path, workers):
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: not JSON"):
        build(source, tmp_path / "out", workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_more_bad_records_than_allowed_stop_a_build_that_skips(source, tmp_path, workers):
    told = r"8 of 400 records are bad \(8 malformed\)\. The allowed share is 0\.01: .*skip:0\.05"
    with pytest.raises(UserError, match=told):
        build(source, tmp_path / "out", workers, on_bad="skip")


@pytest.mark.parametrize("choice", ["skip", "quarantine"])
def test_the_datasheet_says_what_was_left_out(source, tmp_path, choice):
    out = tmp_path / "out"
    built = build(source, out, on_bad=choice, most_bad=0.02)
    assert built.written.train == RECORDS - len(BAD)
    assert "left out: 8 of 400 records are bad (8 malformed)" in built.summary()
    page = (out / "CORPUS.md").read_text()
    assert f"`--on-bad={choice}:0.02`: 8 of 400 records are bad (8 malformed)." in page
    kept = [*(out / "quarantine").glob("*")] if choice == "quarantine" else []
    assert [path.name for path in kept] == ["malformed.jsonl"] * (choice == "quarantine")
    for path in kept:
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        assert {each["text"] for each in samples} == {"no json"}
        assert len(samples) == len(BAD)


def test_an_empty_file_has_no_documents(source, tmp_path):
    (tmp_path / "empty.txt").touch()
    paths, recipe = [f"{tmp_path}/empty.txt", str(source)], Recipe(WordTokenizer())
    options = ReadOptions(on_bad="skip", most_bad=0.5)
    build_corpora(paths, recipe, tmp_path / "out", options=options, progress=False)
    found = open_store(tmp_path / "out" / "train").meta["sources"]
    assert [each["documents"] for each in found] == [0, RECORDS - len(BAD)]


def test_names_that_are_not_utf8(source, tmp_path):
    path, out = source.with_name(os.fsdecode(b"caf\xe9.jsonl")), tmp_path / "out"
    source.rename(path)
    build(path, out, on_bad="quarantine", most_bad=0.02)
    sources = open_store(out / "train").meta["sources"]
    assert {Path(each["name"]).name for each in sources} == {"caf?.jsonl"}
    assert "caf?.jsonl" in (out / "CORPUS.md").read_text()
    (kept,) = (out / "quarantine").iterdir()
    assert "caf?.jsonl, line" in kept.read_text()
    space = Workspace(tmp_path)
    space.write_mark("00000", {"sources": [str(path)]})
    assert space.marks()["00000"]["sources"] == [f"{tmp_path}/caf?.jsonl"]


def test_records_are_kept_up_to_a_bound(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(["no json"] * (BAD_SAMPLES + 50) + ['{"text": "A text."}']))
    build(path, tmp_path / "out", on_bad="quarantine", most_bad=1.0)
    kept = (tmp_path / "out" / "quarantine" / "malformed.jsonl").read_text().splitlines()
    assert len(kept) == BAD_SAMPLES


def test_a_build_goes_on_only_with_tasks_of_the_same_reaction(source, tmp_path):
    out = tmp_path / "out"

    def stopped():
        with pytest.raises(UserError, match=r"8 of 400 records are bad"):
            build(source, out, on_bad="skip")
        assert len([*tmp_path.glob("out.unfinished/tasks/*.json")]) > 1

    stopped()
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: not JSON"):
        build(source, out)
    shutil.rmtree(f"{out}.unfinished")
    stopped()
    build(source, out, on_bad="quarantine", most_bad=0.05)
    assert len((out / "quarantine" / "malformed.jsonl").read_text().splitlines()) == len(BAD)
