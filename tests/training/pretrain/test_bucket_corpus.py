"""A corpus in a bucket is read as the same corpus on the disk is, through an emulator."""

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
from gcs_emulator import make_bucket, running_emulator
from small_run import TOKENIZER, write_store

from bert_jax.cli.inspection.corpus import inspect_corpus
from bert_jax.cli.main import main
from bert_jax.config.mapping import build
from bert_jax.data.pairings import DataConfig
from bert_jax.data.phases import Phase
from bert_jax.data.pipeline import EvalBatches, ExampleStream, TrainBatches
from bert_jax.data.store import open_store
from bert_jax.data.store_writer import ShardWriter, write_manifest
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh
from bert_jax.errors import UserError, exit_code
from bert_jax.files import bucket as bucket_module
from bert_jax.files.bucket import BucketAwayError, BucketFiles
from bert_jax.files.checks import crc_of
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import open_corpus, phase_stores
from bert_jax.training.pretrain.evaluate import heldout_rows

SHARDS, DOCUMENTS = 6, 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_corpus(root: Path, seed: int = 0) -> Path:
    """A store of six shards and its held-out text: sentences of 20 tokens, documents of 10."""
    random = np.random.default_rng(seed)
    entries = []
    for number in range(SHARDS):
        path = root / "train" / "shards" / f"{number:05}"
        with ShardWriter(path, TOKENIZER) as writer:
            sentences = 10 * (DOCUMENTS + number)
            tokens = random.integers(5, 64, 20 * sentences)
            writer.append(tokens, np.full(sentences, 20), np.full(sentences // 10, 10))
            entries.append(writer.finish())
    write_manifest(root / "train", entries, TOKENIZER)
    write_store(root / "heldout", 5, 1)
    return root


@pytest.fixture(scope="module")
def url(corpus: Path, tmp_path_factory) -> Iterator[str]:
    with running_emulator(tmp_path_factory.mktemp("emulator") / "log"):
        make_bucket("corpora")
        files().put(str(corpus), "gs://corpora/c16", recursive=True, batch_size=1)
        yield "gs://corpora/c16"


@pytest.fixture(autouse=True)
def few_tries(monkeypatch):
    monkeypatch.setattr(bucket_module, "_FIRST_WAIT", 0.01)


def files() -> Any:
    return fsspec.filesystem("gs", use_listings_cache=False)


def settings(tmp_path: Path, **changes: Any) -> DataConfig:
    given = {"pairing": "none", "window": 2, "cache_dir": str(tmp_path / "cache")}
    given |= {"cache_gb": 4.5 * 16_000 / 1e9, "read_timeout": 20.0}
    return build(DataConfig, {**given, **changes})


class Counted:
    """Bytes read from the bucket."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        self.lock = threading.Lock()
        read = BucketFiles.read

        def counted(files, *arguments):
            data = read(files, *arguments)
            with self.lock:
                self.bytes += len(data)
            return data

        monkeypatch.setattr(BucketFiles, "read", counted)


def test_batches_are_the_disks_and_little_is_read_twice(url, corpus, tmp_path, monkeypatch):
    counted = Counted(monkeypatch)
    config = settings(tmp_path)
    there, here = open_corpus(url, config), open_corpus(str(corpus), config)
    assert there.train.fingerprint == here.train.fingerprint
    assert counted.bytes < 20_000  # the held-out store is flat, and one shard
    rows = ExampleStream(here.train, config, [Phase(202, 1, 1)]).corpora(0)[0].order.num_rows
    steps = rows * 2 // 3
    phases = [Phase(202, 3, steps)]
    remote = ExampleStream(there.train, config, phases, seed=5)
    local = ExampleStream(here.train, config, phases, seed=5)
    monkeypatch.setattr("bert_jax.data.pipeline._BLOCK_POSITIONS", (1, 1, 1))
    used, fetched = 0, []
    for step, batch in enumerate(TrainBatches(remote)):
        for name, array in local.batch(step).items():
            np.testing.assert_array_equal(array, batch[name], err_msg=name)
        used += 2 * int((batch["segment_ids"] > 0).sum()) - 2 * 2 * 3  # without [CLS] and [SEP]
        fetched.append(counted.bytes)
    first_window = rows // 3 // 3 + 1
    epoch = fetched[-1] - fetched[first_window]
    assert epoch <= 1.3 * used * (steps - first_window) / steps
    kept = [path for path in (tmp_path / "cache").rglob("tokens.bin") if "shards" in str(path)]
    assert 0 < len(kept) <= 4
    held = [EvalBatches(store.heldout, config, 64, 4) for store in (there, here)]
    for batch, expected in zip(*held, strict=True):
        np.testing.assert_array_equal(batch["tokens"], expected["tokens"])
    # What is in the cache is not read again, by other processes neither.
    again = open_corpus(url, settings(tmp_path, window=1, cache_gb=1))
    before = counted.bytes
    for path in kept:
        again.train.shards[int(path.parent.name)]
    assert counted.bytes == before


def test_one_shard_needs_no_window(url, corpus, tmp_path):
    flat = open_corpus(f"{url}/heldout", settings(tmp_path, window=0))
    assert flat.heldout is None
    expected = open_store(corpus / "heldout").shards[0].tokens
    np.testing.assert_array_equal(flat.train.shards[0].tokens, expected)
    with pytest.raises(UserError, match=r"the only shard of .* has 0"):
        open_corpus(f"{url}/heldout", settings(tmp_path, window=0, cache_gb=1e-9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, r"data.window is 0 \(the whole corpus\), .* Set data.window to 2"),
        ({"window": 3}, r"data.window is 3, but .* Set data.window to 2"),
        ({"window": 3, "cache_gb": 1}, None),
        ({"window": 1, "cache_gb": 1e-6}, r"Set data.window to 1 and data.cache_gb to 3"),
    ],
)
def test_windows_that_do_not_fit_the_cache(url, tmp_path, changes, message):
    config = settings(tmp_path, **changes)
    if message is None:
        open_corpus(url, config)
        return
    with pytest.raises(UserError, match=message):
        open_corpus(url, config)


def test_corpora_of_a_mixture_that_do_not_fit_the_cache_together(url, tmp_path):
    other = f"{url}-other"
    files().put(str(write_corpus(tmp_path / "other", 1)), other, recursive=True, batch_size=1)
    data = {"corpus": url, "pairing": "none", "window": 2, "cache_dir": str(tmp_path / "cache")}
    data |= {"cache_gb": 6 * 16_000 / 1e9, "mixture": [{"corpus": url}, {"corpus": other}]}
    training = {"num_steps": 2, "phases": [{"length": 16, "batch_size": 4}]}

    def stores(**changes):
        config = build(PretrainConfig, {"data": data | changes, "training": training})
        return phase_stores(config, open_corpus(url, config.data).train)

    expected = rf"must hold two windows \(data.window 2\) of each of {url}, {other}: "
    with pytest.raises(UserError, match=expected + r".* Set data.cache_gb to 0.00014 or more"):
        stores()
    assert stores(cache_gb=0.00014)[0].names == (url, other)
    assert stores(window=1)[0].names == (url, other)


def test_what_is_not_there(url, tmp_path):
    config = settings(tmp_path)
    with pytest.raises(UserError, match="gs://corpora/none holds no complete token store"):
        open_corpus("gs://corpora/none", config)
    with pytest.raises(UserError, match="there is no bucket nowhere"):
        open_corpus("gs://nowhere/c", config)
    with pytest.raises(UserError, match="az:// is not supported"):
        open_corpus("az://bucket/c", config)


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_shard_in_a_bucket_is_named(url, corpus, tmp_path, damage):
    shutil.copytree(corpus / "train", tmp_path / "train")
    tokens = tmp_path / "train" / "shards" / "00003" / "tokens.bin"
    data = bytearray(tokens.read_bytes())
    if damage == "missing":
        tokens.unlink()
    else:
        data[7] ^= 1
        tokens.write_bytes(data[:-2] if damage == "cut" else data)
    files().put(str(tmp_path / "train"), f"gs://corpora/{damage}", recursive=True, batch_size=1)
    store = open_corpus(f"gs://corpora/{damage}", settings(tmp_path)).train
    assert store.shards[2].num_documents == DOCUMENTS + 2
    message = {
        "missing": "is missing",
        "cut": "has 13,198 bytes, not 13,200",
        "flipped": "does not match",
    }
    with pytest.raises(UserError, match=rf"shards/00003/tokens.bin: .*{message[damage]}"):
        store.shards[3]
    assert not list((tmp_path / "cache").rglob("shards/00003/tokens.bin*"))


class Away:
    """A bucket that fails some reads."""

    def __init__(self, monkeypatch, failures: int):
        self.left = failures
        inner = files()

        class Files:
            def __getattr__(outer, name):
                method = getattr(inner, name)

                def call(*arguments, **options):
                    if self.left > 0 and name == "cat_file":
                        self.left -= 1
                        raise ConnectionResetError("gone")
                    return method(*arguments, **options)

                return call

        monkeypatch.setattr(bucket_module, "file_system", lambda url: Files())


def test_reads_that_fail_are_tried_again(url, corpus, tmp_path, monkeypatch):
    Away(monkeypatch, 5)
    store = open_corpus(url, settings(tmp_path)).train
    expected = open_store(corpus / "train").shards[4].tokens
    np.testing.assert_array_equal(store.shards[4].tokens, expected)


def test_a_bucket_that_stays_away_ends_the_run(url, tmp_path, monkeypatch):
    away = Away(monkeypatch, 0)
    monkeypatch.setattr("bert_jax.data.pipeline._BLOCK_POSITIONS", (1, 1, 1))
    config = settings(tmp_path, window=1, read_timeout=3.0, num_threads=1)
    stream = ExampleStream(open_corpus(url, config).train, config, [Phase(202, 3, 40)])
    batches = TrainBatches(stream)
    next(batches)
    away.left = 10**9
    with pytest.raises(BucketAwayError, match="The bucket was out of reach") as error:
        list(batches)
    assert exit_code(error.value) == 6
    read = batches.next_step
    batches.close()
    # The bucket is back: the next start reads the batch that the first did not.
    away.left = 0
    resumed = next(TrainBatches(stream, read))
    fresh = ExampleStream(open_corpus(url, config).train, config, [Phase(202, 3, 40)])
    np.testing.assert_array_equal(resumed["tokens"], fresh.batch(read)["tokens"])


def test_a_manifest_that_names_no_fingerprint_makes_no_directory(url, corpus, tmp_path):
    header = json.loads((corpus / "heldout" / "corpus.json").read_text())
    files().pipe_file(
        "gs://corpora/odd/corpus.json", json.dumps({**header, "fingerprint": "../x"}).encode()
    )
    with pytest.raises(UserError, match="does not describe"):
        open_corpus("gs://corpora/odd", settings(tmp_path))


@pytest.mark.parametrize("part", ["train", "heldout"])
@pytest.mark.parametrize("array", ["tokens", "sentence_offsets"])
def test_a_file_of_the_cache_that_went_bad_is_fetched_again(url, corpus, tmp_path, part, array):
    """One byte in the middle, of the right size."""
    config = settings(tmp_path)
    expected = getattr(getattr(open_corpus(str(corpus), config), part).shards[0], array)
    first = getattr(open_corpus(url, config), part).shards[0]
    (path,) = first.path.glob(f"{array}.bin")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = getattr(open_corpus(url, config), part).shards[0]
    np.testing.assert_array_equal(getattr(again, array), expected)


def test_a_small_file_of_the_cache_with_another_digest_is_fetched_again(tmp_path, monkeypatch):
    """Two tokenizers with equal ids may have other files."""
    fetched = []

    def cat_file(path, timeout):
        fetched.append(path)
        return b"new"

    there = SimpleNamespace(info=lambda path, timeout: {"size": 3}, cat_file=cat_file)
    monkeypatch.setattr(bucket_module, "file_system", lambda url: there)
    name, target = "tokenizer/vocab.txt", tmp_path / "vocab.txt"
    target.write_bytes(b"old")
    bucket = BucketFiles("gs://corpora/c", 1.0)
    bucket.fetch_small(name, target)
    bucket.fetch_small(name, target, crc_of([b"old"]))
    assert (target.read_bytes(), fetched) == (b"old", [])
    for _ in range(2):
        bucket.fetch_small(name, target, crc_of([b"new"]))
        assert (target.read_bytes(), fetched) == (b"new", [f"gs://corpora/c/{name}"])


def test_a_cache_on_a_file_system_without_locks(url, corpus, tmp_path, monkeypatch):
    def refused(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    store = open_corpus(url, settings(tmp_path)).train
    expected = open_store(corpus / "train").shards[4].tokens
    np.testing.assert_array_equal(store.shards[4].tokens, expected)


def test_a_damaged_store_of_one_shard_is_named(url, corpus, tmp_path):
    shutil.copytree(corpus / "heldout", tmp_path / "one")
    (file,) = (tmp_path / "one").rglob("tokens.bin")
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)
    files().put(str(tmp_path / "one"), "gs://corpora/one", recursive=True, batch_size=1)
    message = "gs://corpora/one is damaged: .*tokens.bin: the content does not match corpus.json"
    with pytest.raises(UserError, match=message):
        open_corpus("gs://corpora/one", settings(tmp_path, window=0))
    assert not list((tmp_path / "cache").rglob("tokens.bin"))


def test_held_out_shards_are_fetched_before_the_first_step(url, corpus, tmp_path, monkeypatch):
    both = "gs://corpora/sharded"
    for part in ("train", "heldout"):  # a sharded store, which planning alone does not open
        files().put(str(corpus / "train"), f"{both}/{part}", recursive=True, batch_size=1)
    away = Away(monkeypatch, 0)
    config = build(
        PretrainConfig,
        {
            "data": {"corpus": both, "pairing": "none", "window": 1, "read_timeout": 3.0}
            | {"cache_dir": str(tmp_path / "cache")},
            "training": {"num_steps": 2, "phases": [{"length": 16, "batch_size": 4}]},
        },
    )
    heldout = open_corpus(both, config.data).heldout
    away.left = 10**9
    with pytest.raises(BucketAwayError, match="The bucket was out of reach"):
        heldout_rows(config, heldout, make_mesh(MeshConfig()))


def test_a_look_at_a_corpus_in_a_bucket(url, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (url, f"{url}/train"):
        there, here = (inspect_corpus(each) for each in (name, str(corpus)))
        assert there.path == name
        assert there.as_json() == here.as_json() | {"path": name}
    heldout = inspect_corpus(url, part="heldout").counts
    assert heldout == inspect_corpus(str(corpus), part="heldout").counts
    with pytest.raises(UserError, match="gs://corpora/c16/train has no store heldout"):
        inspect_corpus(f"{url}/train", part="heldout")
    assert main(["inspect", "gs://corpora/none"]) == 2
    assert "the corpus gs://corpora/none holds no" in capsys.readouterr().err


def test_counts_in_the_cache_that_went_bad_are_fetched_again(url, corpus, tmp_path):
    config = settings(tmp_path)
    counts = open_corpus(url, config).train.unigram_counts
    paths = [*tmp_path.rglob("unigram_counts.bin")]
    for path in paths:
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert len(paths) == 2
    np.testing.assert_array_equal(open_corpus(url, config).train.unigram_counts, counts)
