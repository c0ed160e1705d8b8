"""Verbs on corpora and texts in buckets, in several processes: as on local ones."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from gcs_emulator import make_bucket, running_emulator
from made_texts import make_text
from moto_server import running_moto
from ray_cluster import QUIET
from s3_emulator import running_s3
from task_examples import TOKENIZER, put

from bert_jax.cli.main import main
from bert_jax.data.corpus import build
from bert_jax.data.corpus.build import build_corpora
from bert_jax.data.corpus.passes import Recipe
from bert_jax.data.corpus.sharded.engine import Engine
from bert_jax.files.urls import file_system, upload
from bert_jax.tokenization.load import load_tokenizer

TEXT = make_text(60, seed=1)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus of several shards, its text, and evaluation texts."""
    directory = tmp_path_factory.mktemp("local")
    twins = "\n\n".join(f"{text} Again." for text in TEXT.split("\n\n"))
    put(directory / "text.txt", f"{TEXT}\n\n{twins}")
    put(directory / "eval.txt", *TEXT.split("\n\n")[5:8], "Words that nobody has written so far.")
    build_corpora(
        [str(directory / "text.txt")], Recipe(TOKENIZER, heldout_rate=0.2), directory / "corpus",
        engine=Engine(1), progress=False, shard_bytes=12_000,
    )  # fmt: skip
    assert len(list((directory / "corpus" / "train" / "shards").iterdir())) > 2
    return directory


@pytest.fixture(scope="module", params=[running_emulator, running_s3, running_moto])
def url(request, tmp_path_factory: pytest.TempPathFactory, local: Path) -> Iterator[str]:
    """The same directory in a bucket."""
    scheme = "gs" if request.param is running_emulator else "s3"
    if scheme == "s3":
        pytest.importorskip("obstore", reason="obstore is not installed")
    with request.param(tmp_path_factory.mktemp(scheme) / "log"):
        if scheme == "gs":
            make_bucket("bucket")
        url = f"{scheme}://bucket/place"
        upload(local, url)
        yield url


def report(corpus: str, against: str, out: Path, *options: str) -> dict:
    command = ["contamination", corpus, "--against", against, f"--out={out}", *options]
    assert main(command) == 0
    return json.loads(out.read_text())


PLACES = [("corpus", "eval.txt"), ("corpus", "heldout"), ("text.txt", "eval.txt")]


@pytest.mark.parametrize(
    ("corpus", "against", "workers"),
    [*((*place, 1) for place in PLACES), ("corpus/train", "eval.txt", 2), ("*.txt", "eval.txt", 1)],
)
def test_the_report_is_the_local_one(
    url, local, tmp_path, monkeypatch, corpus: str, against: str, workers: int
):
    if against == "heldout":
        pytest.importorskip("rensa")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = against if against == "heldout" else str(local / against)
    there = report(f"{url}/{corpus}", spec, tmp_path / "there.json", f"--num-workers={workers}")
    here = report(str(local / corpus), spec, tmp_path / "here.json", "--num-workers=1")
    assert there == here
    found = here["twins"] if against == "heldout" else here["counts"]["eval.txt"]["seen"]
    assert found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("url", [running_s3], indirect=True)
@pytest.mark.parametrize(("corpus", "against"), PLACES)
def test_on_ray_the_report_is_the_local_one(url, local, tmp_path, corpus: str, against: str):
    """Ray runs in a process of its own, because it reads its variables when it is imported."""
    spec, out = against if against == "heldout" else str(local / against), tmp_path / "there.json"
    subprocess.run(
        [sys.executable, "-m", "bert_jax.cli", "contamination", f"{url}/{corpus}",
         f"--against={spec}", "--engine=ray", "--num-workers=2", f"--out={out}"],
        env={**os.environ, **QUIET, "XDG_CACHE_HOME": str(tmp_path / "cache")}, check=True,
    )  # fmt: skip
    here = report(str(local / corpus), spec, tmp_path / "here.json", "--num-workers=1")
    assert json.loads(out.read_text()) == here


def learned(out: Path, *options: str) -> str:
    """The fingerprint of the vocabulary that `bert-jax tokenizer` learns."""
    assert main(["tokenizer", "--vocab-size=300", f"--out={out}", *options]) == 0
    return load_tokenizer(out).fingerprint


def test_words_counted_on_an_engine_give_the_vocabulary_of_one_process(
    url, local, tmp_path, monkeypatch, caplog
):
    here = learned(tmp_path / "here", f"--input={local}/*.txt", "--max-mb=1")
    monkeypatch.setattr(build, "_COUNTED_BYTES", 12_000)
    one = [f"--input={local}/*.txt", "--engine=local", "--num-workers=1"]
    two = [f"--input={url}/*.txt", "--engine=local", "--num-workers=2"]
    assert learned(tmp_path / "one", *one) == here
    assert learned(tmp_path / "two", *two) == here
    assert "dropped" not in caplog.text
    few = learned(tmp_path / "few", *one, "--memory=0.0001")
    assert few != here
    assert "rare words were dropped" in caplog.text
    assert learned(tmp_path / "two-few", *two, "--memory=0.0001") == few


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine=local", "--kind=bpe"], "--engine counts words for --kind wordpiece; the train"),
        (["--engine=local", "--max-mb=256"], "--max-mb limits a sample; leave out one of them"),
        (["--num-workers=2"], "--num-workers works only with --engine"),
        (["--engine=dask"], "there is no engine 'dask'"),
    ],
)
def test_what_an_engine_does_not_do_for_a_tokenizer_is_refused(
    tmp_path, capsys, options: list[str], said: str
):
    put(tmp_path / "a.txt", TEXT)
    out = tmp_path / "out"
    assert main(["tokenizer", f"--input={tmp_path}/a.txt", f"--out={out}", *options]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("on", [["--engine=local", "--num-workers=1"], []])
def test_bad_records_of_all_tasks_count_together(tmp_path, monkeypatch, capsys, on: list[str]):
    """A task has few records: a share of them says nothing."""
    lines = [f'{{"text": "word{number % 7} and more"}}' for number in range(2000)]
    lines[::25] = ["{"] * 80
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(build, "_COUNTED_BYTES", 12_000)
    out = f"--out={tmp_path}/out"
    how = ["tokenizer", f"--input={tmp_path}/a.jsonl", "--vocab-size=50", out, *on]
    assert main([*how, "--on-bad=skip"]) == 2
    assert "80 of 2,000 records are bad" in capsys.readouterr().err
    assert main([*how, "--on-bad=skip:0.05"]) == 0


def looked(corpus: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    capsys.readouterr()
    assert main(["inspect", corpus, "--json", "--full", *options]) == 0
    return json.loads(capsys.readouterr().out) | {"path": ""}


def test_a_look_on_an_engine_is_that_of_one_process(url, local, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = looked(f"{local}/corpus", capsys, "--num-workers=1")
    assert here["documents_read"] == here["counts"]["documents"] > 20
    assert looked(f"{local}/corpus", capsys, "--num-workers=2") == here
    assert looked(f"{url}/corpus", capsys, "--num-workers=2") == here


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("url", [running_s3], indirect=True)
def test_on_ray_tokenizer_and_look_are_the_local_ones(url, local, tmp_path, capsys):
    on = ["--engine=ray", "--num-workers=2"]

    def run(*command: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "bert_jax.cli", *command, *on],
            env={**os.environ, **QUIET, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            check=True, stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip

    here = learned(tmp_path / "here", f"--input={local}/*.txt")
    run("tokenizer", "--vocab-size=300", f"--input={url}/*.txt", f"--out={tmp_path}/there")
    assert load_tokenizer(tmp_path / "there").fingerprint == here
    found = json.loads(run("inspect", f"{url}/corpus", "--json", "--full")) | {"path": ""}
    assert found == looked(f"{local}/corpus", capsys, "--num-workers=1")


def test_without_out_the_report_is_only_printed(url, local, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = file_system(url).find(url)
    spec = f"--against={local / 'eval.txt'}"
    assert main(["contamination", f"{url}/corpus", spec, "--num-workers=1"]) == 0
    said = capsys.readouterr().out
    assert "eval.txt in corpus: 13-grams" in said
    assert "report  " not in said
    assert file_system(url).find(url) == before


def test_the_report_does_not_replace_what_it_reports_on(local, tmp_path, capsys):
    """It did, with exit code 0."""
    text = Path(put(tmp_path / "mine.txt", TEXT))
    pattern, against = f"{tmp_path}/*.txt", str(local / "eval.txt")
    for corpus, out in ((text, local / "eval.txt"), (text, text), (pattern, text)):
        before = out.read_bytes()
        assert main(["contamination", str(corpus), "--against", against, f"--out={out}"]) == 2
        assert "is also an input" in capsys.readouterr().err
        assert out.read_bytes() == before
