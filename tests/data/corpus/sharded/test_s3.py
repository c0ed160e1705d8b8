"""Sources, corpora and leases in S3, against two emulators on this machine: ours and moto's."""

import gzip
from dataclasses import replace

import pytest
from made_texts import make_text
from moto_server import running_moto
from s3_emulator import requests, running_s3
from word_tokenizer import WordTokenizer

from bert_jax.data.corpus.build import build_corpora
from bert_jax.data.corpus.cleaning.clean import CleaningConfig
from bert_jax.data.corpus.passes import Recipe
from bert_jax.data.corpus.sharded import workspace
from bert_jax.data.corpus.sharded.engine import Engine
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.data.pairings import DataConfig
from bert_jax.errors import UserError
from bert_jax.files import lease
from bert_jax.files.bucket import BucketFiles
from bert_jax.files.claims import S3Claims
from bert_jax.files.lease import Lease, Times
from bert_jax.files.urls import file_system
from bert_jax.training.pretrain.corpus import open_corpus

pytest.importorskip("obstore", reason="obstore is not installed")

RECIPE = Recipe(
    WordTokenizer(), heldout_rate=0.1, cleaning=CleaningConfig(near_duplicates=0.8)
)  # fmt: skip
TEXTS = [make_text(size, seed=size) for size in (10, 80, 30)]
_LONGEST = max(TEXTS[0].split("\n\n"), key=len)
TEXTS[2] += f"\n\n{_LONGEST}\n\n{_LONGEST} Word1."


@pytest.fixture(scope="module", params=[running_s3, running_moto])
def address(request, tmp_path_factory):
    """The address of an emulator with texts in s3://bucket/raw, the last of them compressed."""
    with request.param(tmp_path_factory.mktemp("s3") / "log") as found:
        files = file_system("s3://bucket")
        for number, text in enumerate(TEXTS[:2]):
            files.pipe_file(f"s3://bucket/raw/{number}.txt", text.encode())
        files.pipe_file("s3://bucket/raw/2.txt.gz", gzip.compress(TEXTS[2].encode()))
        yield found


def build(spec, out, recipe=RECIPE, **options):
    (built,) = build_corpora(
        [spec], recipe, out, engine=Engine(1), progress=False, shard_bytes=5000, **options
    )
    return built


def text_file(directory):
    path = directory / "text.txt"
    path.write_text(TEXTS[0])
    return path


def test_sources(address):
    sources = resolve_sources(["s3://bucket/raw/*.txt*", "s3://bucket/raw/0.txt"])
    assert [source.name for source in sources] == [
        f"s3://bucket/raw/{name}" for name in ("0.txt", "1.txt", "2.txt.gz")
    ]
    assert ["\n\n".join(source.texts()) for source in sources] == TEXTS
    with pytest.raises(UserError, match=r"there is no file s3://bucket/raw/3\.txt"):
        resolve_sources(["s3://bucket/raw/3.txt"])
    with pytest.raises(UserError, match="there is no"):
        resolve_sources(["s3://missing/raw/3.txt"])
    files = file_system("s3://bucket")
    files.pipe_file("s3://bucket/other.txt", b"one")
    (source,) = resolve_sources(["s3://bucket/other.txt"])
    files.pipe_file("s3://bucket/other.txt", b"two")
    with pytest.raises(UserError, match=r"other\.txt changed while the corpus was built"):
        list(source.texts())


@pytest.mark.parametrize("address", [running_s3], indirect=True)  # which counts its requests
def test_folders_are_listed(address):
    files = file_system("s3://bucket")
    for number in range(40):
        files.pipe_file(f"s3://bucket/many/{number % 2}/{number}.txt", b"A text.")
    before = requests(address)
    assert len(resolve_sources(["s3://bucket/many/*/*.txt"])) == 40
    assert requests(address) - before < 10


def test_a_corpus(address, tmp_path):
    for number, text in enumerate(TEXTS[:2]):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "2.txt.gz").write_bytes(gzip.compress(TEXTS[2].encode()))
    local = build(str(tmp_path / "*.*"), tmp_path / "out")
    out = "s3://bucket/out"
    built = build("s3://bucket/raw/*", out, scratch="s3://bucket/scratch")
    files = file_system(out)
    left = {name.split("/")[2] for name in files.find("bucket/out")}
    assert left == {"train", "heldout", "CORPUS.md"}
    assert not files.exists("bucket/scratch")
    assert built.written.train == local.train.num_documents
    found = open_corpus(out, replace(DataConfig(), window=1, cache_dir=str(tmp_path / "cache")))
    assert found.train.meta["dropped"] == {"duplicate": 1, "near-duplicate": 1}
    assert found.train.fingerprint == local.train.fingerprint
    assert found.heldout.fingerprint == local.heldout.fingerprint
    first = found.train.shards[0]
    assert (first.tokens == local.train.shards[0].tokens).all()
    with pytest.raises(UserError, match="already exists and is complete"):
        build("s3://bucket/raw/*", out)
    build("s3://bucket/raw/*", out, replace(RECIPE, heldout_rate=0.5), overwrite=True)
    with pytest.raises(FileNotFoundError):
        BucketFiles(out, 5.0).read("nothing.json")


def test_two_builds_into_one_place(address, monkeypatch):
    times = Times(beat=0.05, lapse=9.0, patience=0.3, poll=0.02)
    monkeypatch.setattr(workspace, "_TIMES", times)
    out = "s3://bucket/claimed"
    with monkeypatch.context() as patch:
        patch.setattr(lease, "machine", lambda: "another container")
        other = Lease(S3Claims(out), out, times, say=lambda _: None)
    assert other.take()
    with pytest.raises(UserError, match=r"in use by process .* Wait for the end of that build"):
        build("s3://bucket/raw/0.txt", out)
    other.release()
    assert file_system(out).exists(f"{out}/lease-1.json") is False


def test_claims(address):
    first, second = (S3Claims("s3://bucket/claims") for _ in range(2))
    assert first.numbers() == []
    assert first.create(1, b"first")
    assert not second.create(1, b"second")
    assert second.read(1)[0] == b"first"
    assert first.renew(1, b"first")
    assert second.create(2, b"second")
    assert second.numbers() == [1, 2]
    second.remove(1)
    assert not first.renew(1, b"first")
    assert first.read(1) is None


@pytest.mark.parametrize(
    ("store", "fault"),
    [("ignores", "ignores"), ("refuses", r"answers 501 \(Not Implemented\) to"),
     ("disabled", "is used with AWS_CONDITIONAL_PUT=disabled, without")],
)  # fmt: skip
def test_a_store_without_conditions_is_refused(tmp_path, monkeypatch, store, fault):
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled" if store == "disabled" else "etag")
    with running_s3(tmp_path / "log", store) as address:
        claims = S3Claims("s3://bucket/out")
        match = f"s3://bucket/out: {address} {fault} the conditions If-None-Match and If-Match"
        with pytest.raises(UserError, match=match):
            claims.create(1, b"first")
        assert claims.numbers() == []
        with pytest.raises(UserError, match=match):
            build(str(text_file(tmp_path)), "s3://bucket/out")
