"""Builds on Ray clusters of this machine: the same as local ones, whatever is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from gcs_emulator import make_bucket, running_emulator
from made_texts import make_text
from ray_cluster import QUIET, Cluster, running_cluster
from s3_emulator import running_s3
from word_tokenizer import Failing, WordTokenizer

from bert_jax.data.corpus import build as build_module
from bert_jax.data.corpus.build import build_corpora, counted_texts
from bert_jax.data.corpus.cleaning.clean import CleaningConfig
from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.passes import Recipe
from bert_jax.data.corpus.sharded import duplicates
from bert_jax.data.corpus.sharded.engine import Engine, open_engine
from bert_jax.data.corpus.sharded.shuffle import Inputs, Rows
from bert_jax.data.pairings import DataConfig
from bert_jax.errors import UserError
from bert_jax.files.urls import file_system
from bert_jax.tokenization.training import CountedWords
from bert_jax.tokenization.wordpiece import WordPieceOptions
from bert_jax.training.pretrain.corpus import open_corpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    # Ray reads its variables when it is imported.
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

RECIPE = Recipe(
    WordTokenizer(), heldout_rate=0.1,
    cleaning=CleaningConfig(near_duplicates=0.8, duplicate_paragraphs=True),
)  # fmt: skip


class Waiting(WordTokenizer):
    """Takes a second for each task, and names its process in a file."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def encode_batch(self, texts):
        (self.directory / f"{os.getpid()}").touch()
        time.sleep(1)
        return super().encode_batch(texts)


def waiting_candidates(directory: Path, inputs: Inputs) -> Rows:
    """Takes a second for each range of keys, and names its process in a file."""
    (directory / f"{os.getpid()}").touch()
    time.sleep(1)
    yield from duplicates._candidates(inputs)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(Path(__file__).parents[3] / "support"), str(Path(__file__).parent)]
        before = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join([before, *paths]))  # of the workers
        for name, value in QUIET.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("in")
    for number, size in enumerate((50, 200)):
        (directory / f"{number}.txt").write_text(make_text(size, seed=number))
    first, second, *_ = make_text(50, seed=0).split("\n\n")
    (directory / "2.txt").write_text(f"{first}\n\n{second} Word1.\n\n{make_text(20, seed=3)}")
    return str(directory / "*.txt")


@pytest.fixture(scope="module")
def local(texts, tmp_path_factory) -> tuple[str, str]:
    """Fingerprints of the corpus that one local process makes, and two."""
    out = tmp_path_factory.mktemp("local")
    one = build(texts, out / "1", Engine(1))
    assert build(texts, out / "2", Engine(2)) == one
    return one


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path: Ray makes sockets below it."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


def build(texts, out, engine: Engine, recipe=RECIPE, scratch=None):
    (built,) = build_corpora(
        [texts], recipe, out, engine=engine, shard_bytes=10_000, progress=False, scratch=scratch
    )
    return built.train and (built.train.fingerprint, built.heldout.fingerprint)


def addresses(processes: list[psutil.Process]) -> set[str]:
    """Addresses that processes listen on, or are connected to."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                found |= {end.ip for end in (connection.laddr, connection.raddr) if end}
    return found


def test_a_ray_of_its_own(texts, local, tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "_COUNTED_BYTES", 10_000)

    def counted(engine: Engine) -> list[CountedWords]:
        return [*counted_texts([texts], ReadOptions(), WordPieceOptions(), engine, 1.0)]

    here = counted(Engine(1))
    assert len(here) > 2
    engine = open_engine("ray", num_workers=2)
    try:
        children = psutil.Process().children(recursive=True)
        assert addresses(children) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"}
        assert build(texts, tmp_path / "ray", engine) == local
        assert counted(engine) == here
        with pytest.raises(ZeroDivisionError, match="in a worker"):
            build(texts, tmp_path / "failing", engine, replace(RECIPE, tokenizer=Failing()))
    finally:
        engine.close()


def start(
    texts, out: Path | str, cluster: Cluster, marks: Path, *, search: bool, nodes: int = 2,
    scratch: str | None = None,
) -> subprocess.Popen:  # fmt: skip
    """A build on the cluster, in a process of its own.

    Its tasks take some seconds or, with `search`, each range of the search for duplicates does.
    """
    script = f"""
from functools import partial
from pathlib import Path
from dataclasses import replace
from test_ray import RECIPE, Waiting, build, waiting_candidates
from bert_jax.data.corpus.sharded import duplicates, shuffle
from bert_jax.data.corpus.sharded.engine import open_engine
shuffle.RANGE_BYTES, recipe = 20_000, RECIPE
if {search}:
    duplicates._candidates = partial(waiting_candidates, Path({str(marks)!r}))
else:
    recipe = replace(RECIPE, tokenizer=Waiting(Path({str(marks)!r})))
engine = open_engine("ray", address={cluster.address!r})
print(*build({texts!r}, {str(out)!r}, engine, recipe, {scratch!r}) or [])
"""
    marks.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # Ray may end the whole group of a command whose head is gone
    )  # fmt: skip
    while len(list(marks.iterdir())) < nodes:  # all nodes are at work
        assert process.poll() is None, process.communicate()[1][-5000:]
        time.sleep(0.1)
    return process


def fingerprints(process: subprocess.Popen) -> tuple[str, ...]:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    return tuple(output.split()[-2:])


def test_two_nodes_and_what_is_killed(texts, local, tmp_path, directory):
    with running_cluster(directory, 2) as cluster:
        # A worker, in the search for duplicates.
        process = start(texts, tmp_path / "worker", cluster, tmp_path / "marks1", search=True)
        victim = int(next(iter((tmp_path / "marks1").iterdir())).name)
        os.kill(victim, signal.SIGKILL)
        assert fingerprints(process) == local

        # The command.
        process = start(texts, tmp_path / "command", cluster, tmp_path / "marks2", search=False)
        tasks = tmp_path / "command.unfinished" / "tasks"
        while not tasks.is_dir() or not list(tasks.glob("*.json")):
            time.sleep(0.1)
        process.kill()
        process.communicate()
        complete = {path.name: path.stat().st_mtime_ns for path in tasks.glob("*.json")}
        process = start(texts, tmp_path / "command", cluster, tmp_path / "marks3", search=False)
        kept = {path.name: path.stat().st_mtime_ns for path in tasks.glob("*.json")}
        assert complete.items() <= kept.items()
        assert fingerprints(process) == local

        # A node, in the search.
        process = start(texts, tmp_path / "node", cluster, tmp_path / "marks4", search=True)
        cluster.kill(1)
        assert fingerprints(process) == local
    assert sorted(path.name for path in tmp_path.iterdir() if "marks" not in path.name) == [
        "command", "node", "worker",
    ]  # fmt: skip


def test_two_nodes_build_into_buckets_though_a_worker_is_killed(texts, local, tmp_path, directory):
    """Sources, corpus and signatures are in the bucket."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    with (
        running_emulator(tmp_path / "gs"), running_s3(tmp_path / "s3"),
        running_cluster(directory, 2) as cluster,
    ):  # fmt: skip
        make_bucket("corpora")
        for scheme, bucket in (("gs", "corpora"), ("s3", "bucket")):
            url, marks = f"{scheme}://{bucket}", tmp_path / bucket
            files = file_system(url)
            for path in Path(texts).parent.iterdir():
                files.pipe_file(f"{bucket}/raw/{path.name}", path.read_bytes())
            process = start(
                f"{url}/raw/*.txt", f"{url}/out", cluster, marks, search=True,
                scratch=f"{url}/scratch",
            )  # fmt: skip
            assert files.glob(f"{bucket}/scratch/duplicates-*/scans/*")
            os.kill(int(next(iter(marks.iterdir())).name), signal.SIGKILL)
            fingerprints(process)
            cache = str(tmp_path / f"{bucket}-cache")
            data = DataConfig(window=1, cache_dir=cache)
            found = open_corpus(f"{url}/out", data)
            assert (found.train.fingerprint, found.heldout.fingerprint) == local
            assert found.train.meta["dropped"].keys() == {"duplicate", "near-duplicate"}
            left = {name.split("/")[2] for name in files.find(f"{bucket}/out")}
            assert left == {"train", "heldout", "CORPUS.md"}
            assert not files.exists(f"{bucket}/scratch")


def test_a_killed_head_ends_the_command_and_what_was_read_is_kept(
    texts, local, tmp_path, directory
):
    with running_cluster(directory, 1) as cluster:
        process = start(texts, tmp_path / "out", cluster, tmp_path / "marks1", search=True, nodes=1)
        cluster.kill(0)
        _, errors = process.communicate(timeout=300)
        assert process.returncode != 0
        assert f"the head of the Ray cluster at {cluster.address} is gone" in errors
        assert "rerun the command; complete tasks are kept" in errors
    (tasks,) = (tmp_path / "out.unfinished").glob("duplicates-*/tasks")
    complete = {path.name: path.stat().st_mtime_ns for path in tasks.glob("*.json")}
    assert complete
    (directory / "again").mkdir()
    with running_cluster(directory / "again", 1) as cluster:
        process = start(texts, tmp_path / "out", cluster, tmp_path / "marks2", search=True, nodes=1)
        assert {path.name: path.stat().st_mtime_ns for path in tasks.glob("*.json")} == complete
        assert fingerprints(process) == local


def test_no_cluster():
    with pytest.raises(UserError, match=r"no Ray cluster at 127\.0\.0\.1:1: .*ray start --head"):
        open_engine("ray", address="127.0.0.1:1")


@pytest.mark.parametrize(
    ("wrong", "mode"),
    [({"RAY_AUTH_TOKEN": "b" * 64}, "token"), ({"RAY_AUTH_MODE": "disabled"}, "disabled")],
)
def test_a_refused_token_is_named(directory, monkeypatch, wrong: dict[str, str], mode: str):
    monkeypatch.setitem(QUIET, "RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    with running_cluster(directory, 1) as cluster:
        script = (
            "from bert_jax.data.corpus.sharded.engine import open_engine\n"
            f"open_engine('ray', address={cluster.address!r})"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True,
            env={**os.environ, **QUIET, **wrong},
        )  # fmt: skip
    said = f"the Ray cluster at {cluster.address} refused the token: it is missing or incorrect "
    assert f"{said}here (RAY_AUTH_MODE is {mode}). Set RAY_AUTH_MODE=token, and" in done.stderr
