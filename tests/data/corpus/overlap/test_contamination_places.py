"""Contamination of corpora and texts in buckets, in several processes: as of local ones."""

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
from bert_jax.data.corpus.build import build_corpora
from bert_jax.data.corpus.passes import Recipe
from bert_jax.data.corpus.sharded.engine import Engine
from bert_jax.files.urls import file_system, upload

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


def test_without_out_the_report_is_only_printed(url, local, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = file_system(url).find(url)
    spec = f"--against={local / 'eval.txt'}"
    assert main(["contamination", f"{url}/corpus", spec, "--num-workers=1"]) == 0
    said = capsys.readouterr().out
    assert "eval.txt in corpus: 13-grams" in said
    assert "report  " not in said
    assert file_system(url).find(url) == before
