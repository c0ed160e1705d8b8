"""Sources and corpora in a bucket, against an emulator of Google Cloud Storage on this machine."""

import gzip
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from gcs_emulator import make_bucket, running_emulator
from gcsfs.retry import HttpError
from made_texts import make_text
from word_tokenizer import WordTokenizer

from bert_jax.data.corpus.build import build_corpora
from bert_jax.data.corpus.cleaning.clean import CleaningConfig
from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.passes import Recipe
from bert_jax.data.corpus.sharded import shuffle, workspace
from bert_jax.data.corpus.sharded.engine import Engine
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.data.store import open_store
from bert_jax.errors import UserError
from bert_jax.files import lease
from bert_jax.files.claims import BucketClaims
from bert_jax.files.lease import Lease, Times
from bert_jax.tokenization.tokenizer import CONFIG_NAME, KIND_FILES
from bert_jax.tokenization.tokenizer_parts import MAP_NAME

RECIPE = Recipe(WordTokenizer(), heldout_rate=0.1)
TEXTS = [make_text(size, seed=size) for size in (10, 80, 30)]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket whose `raw` holds the texts, the last of them compressed."""
    with running_emulator(tmp_path_factory.mktemp("emulator") / "log"):
        make_bucket("corpora")
        for number, text in enumerate(TEXTS[:2]):
            files().pipe_file(f"corpora/raw/{number}.txt", text.encode())
        files().pipe_file("corpora/raw/2.txt.gz", gzip.compress(TEXTS[2].encode()))
        yield "gs://corpora"


def files():
    return fsspec.filesystem("gs", use_listings_cache=False)


def build(spec, out, recipe=RECIPE, **options):
    options = {"shard_bytes": 5000, **options}
    (built,) = build_corpora(
        [spec], recipe, out, engine=Engine(1), progress=False, **options
    )  # fmt: skip
    return built


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The same corpus from files to a directory."""
    directory = tmp_path_factory.mktemp("in")
    for number, text in enumerate(TEXTS[:2]):
        (directory / f"{number}.txt").write_text(text)
    (directory / "2.txt.gz").write_bytes(gzip.compress(TEXTS[2].encode()))
    return build(str(directory / "*"), directory / "out")


def fetched(url: str, directory: Path):
    """The stores of a corpus in the bucket, copied here."""
    # The emulator answers one connection at a time: of several at once, each waits for the last.
    files().get(url, str(directory), recursive=True, batch_size=1)
    return tuple(open_store(directory / part, verify=True) for part in ("train", "heldout"))


def names(url: str) -> set[str]:
    root = url.removeprefix("gs://")
    return {name.removeprefix(f"{root}/") for name in files().find(root)}


def test_sources_in_a_bucket(bucket, tmp_path):
    sources = resolve_sources([f"{bucket}/raw/*.txt*", f"{bucket}/raw/0.txt"])
    assert [source.name for source in sources] == [
        f"{bucket}/raw/{name}" for name in ("0.txt", "1.txt", "2.txt.gz")
    ]
    assert ["\n\n".join(source.texts()) for source in sources] == TEXTS
    parts = sources[1].divided(3000)
    assert len(parts) > 3
    assert "\n\n".join(text for part in parts for text in part.texts()) == TEXTS[1]
    with pytest.raises(UserError, match=r"there is no file gs://corpora/raw/3\.txt"):
        resolve_sources([f"{bucket}/raw/3.txt"])
    with pytest.raises(UserError, match="ftp:// is not supported"):
        resolve_sources(["ftp://x.org/a.txt"])
    files().pipe_file("corpora/other.txt", b"one")
    (source,) = resolve_sources([f"{bucket}/other.txt"])
    files().pipe_file("corpora/other.txt", b"two")
    with pytest.raises(UserError, match=r"other\.txt changed while the corpus was built"):
        list(source.texts())


@pytest.mark.parametrize("shard_bytes", [5000, 1 << 30])
def test_a_corpus_in_a_bucket(bucket, local, tmp_path, shard_bytes):
    out = f"{bucket}/out{shard_bytes}"
    built = build(f"{bucket}/raw/*", out, shard_bytes=shard_bytes)
    assert f"{out}: " in built.summary()
    train, heldout = fetched(out, tmp_path / "fetched")
    assert {name for name in names(out) if not name.startswith(("train/", "heldout/"))} == {
        "CORPUS.md"
    }
    if shard_bytes == 5000:
        assert train.fingerprint == local.train.fingerprint
        assert heldout.fingerprint == local.heldout.fingerprint
        assert train.counts == local.train.counts
    assert built.written.train == train.num_documents == local.train.num_documents
    with pytest.raises(UserError, match="already exists and is complete"):
        build(f"{bucket}/raw/*", out)
    recipe = replace(RECIPE, heldout_rate=0.5)
    build(f"{bucket}/raw/*", out, recipe, shard_bytes=shard_bytes, overwrite=True)
    _, heldout = fetched(out, tmp_path / "again")
    assert heldout.num_documents > local.heldout.num_documents


def test_a_build_removes_only_its_own_files(bucket):
    """A directory of a bucket may hold the input of the build, and other files of the user."""
    out = f"{bucket}/mine"
    mine = {
        "shards/0.txt", "web/shards/00000/a.txt", "train/shards/README", "train/shards/00000/a.bin",
        "tasks/00000.json.gz", "tasks/plan.json", "duplicates/a.txt",
        "duplicates/scans/00000/ends.bin", "a/b/train/corpus.json",
    }  # fmt: skip
    for name in mine:
        files().pipe_file(f"{out}/{name}", TEXTS[1].encode())
    recipe = replace(RECIPE, cleaning=CleaningConfig(duplicate_paragraphs=True))
    build(f"{out}/shards/*", out, recipe)
    first = names(out)
    build(f"{out}/shards/*", out, overwrite=True, shard_bytes=1 << 30)
    for there, several in ((first, True), (names(out), False)):
        assert mine < there
        assert {name.split("/")[0] for name in there - mine} == {"train", "heldout", "CORPUS.md"}
        assert ("train/shards/00001/tokens.bin" in there) == several


@pytest.mark.parametrize("name", sorted({CONFIG_NAME, MAP_NAME, *sum(KIND_FILES.values(), ())}))
def test_a_build_may_remove_the_files_of_its_tokenizer(name):
    """Files of two kinds of tokenizers in one directory could not be read."""
    for place in ("train", "heldout", "web-1/train"):
        assert workspace._OWN.fullmatch(f"{place}/tokenizer/{name}")
    for place in ("tokenizer", "web/tokenizer", "train/tokenizer/mine", "a/b/train/tokenizer"):
        assert not workspace._OWN.fullmatch(f"{place}/{name}")


def test_bad_records_of_a_replaced_build_do_not_stay(bucket):
    files().pipe_file("corpora/torn.jsonl", b'{"text": "A text has words."}\n{\n')
    out, how = f"{bucket}/torn", ReadOptions(on_bad="quarantine", most_bad=0.5)
    build(f"{bucket}/torn.jsonl", out, options=how)
    assert "quarantine/malformed.jsonl" in names(out)
    files().pipe_file(f"{out}/quarantine/notes.txt", b"")
    with pytest.raises(UserError, match=r"torn\.jsonl, line 2"):
        build(f"{bucket}/torn.jsonl", out, overwrite=True)
    assert "train/corpus.json" not in names(out)  # in a bucket, the old corpus is lost at once
    build(f"{bucket}/raw/*", out, overwrite=True)
    assert {name for name in names(out) if "quarantine" in name} == {"quarantine/notes.txt"}


def test_a_build_that_ended_early_is_continued(bucket, local, tmp_path):
    files().copy("corpora/raw", "corpora/bad", recursive=True, batch_size=1)
    files().pipe_file("corpora/bad/2.txt.gz", gzip.compress(TEXTS[2].encode())[:-20])
    out = f"{bucket}/continued"
    with pytest.raises(UserError, match=r"bad/2\.txt\.gz ends in the middle"):
        build(f"{bucket}/bad/*", out)
    before = {name: files().info(f"{out}/{name}")["generation"] for name in names(out)}
    assert not any(name.endswith(("train/corpus.json", "lease-1.json")) for name in before)
    assert len([name for name in before if name.startswith("tasks/")]) > 3
    files().pipe_file("corpora/bad/2.txt.gz", gzip.compress(TEXTS[2].encode()))
    build(f"{bucket}/bad/*", out)
    after = names(out)
    for name, generation in before.items():
        if "/shards/" in name:
            assert files().info(f"{out}/{name}")["generation"] == generation
    assert not any(name.startswith("tasks/") for name in after)
    train, _ = fetched(out, tmp_path / "fetched")
    assert train.fingerprint == local.train.fingerprint


def test_two_builds_into_one_place(bucket, monkeypatch):
    """The other one has this host's name, in a container whose process numbers are its own."""
    times = Times(beat=0.05, lapse=30.0, patience=0.3, poll=0.02)
    monkeypatch.setattr(workspace, "_TIMES", times)
    out = f"{bucket}/claimed"
    with monkeypatch.context() as patch:
        patch.setattr(lease, "machine", lambda: "another container")
        other = Lease(BucketClaims(files(), out), out, times, say=lambda _: None)
    assert other.take()
    with pytest.raises(UserError, match=r"in use by process .* Wait for the end of that build"):
        build(f"{bucket}/raw/0.txt", out)
    assert names(out) == {"lease-1.json"}
    other._done.set()  # as when it is killed
    monkeypatch.setattr(workspace, "_TIMES", replace(times, lapse=0.5))
    build(f"{bucket}/raw/0.txt", out)
    assert "train/corpus.json" in names(out)
    assert not any("lease" in name for name in names(out))
    # A container that was started anew: host and number of this process, which began later.
    claim = json.dumps(lease._myself() | {"process_start": "1"}).encode()
    files().pipe_file(f"{out}/lease-1.json", claim)
    with pytest.raises(UserError, match="already exists and is complete"):
        build(f"{bucket}/raw/0.txt", out)
    assert not any("lease" in name for name in names(out))


class Place:
    """The claims in a bucket, where another builder is, and a clock that moves in sleep."""

    def __init__(self, renewals: bool):
        self.now, self.renewals = 0.0, renewals
        self.claims = {1: json.dumps({"host": socket.gethostname(), "machine": "other"}).encode()}

    def numbers(self) -> list[int]:
        return sorted(self.claims)

    def create(self, number: int, content: bytes) -> bool:
        return self.claims.setdefault(number, content) is content

    def read(self, number: int) -> tuple[bytes, int]:
        return self.claims[number], int(self.now / 10) if self.renewals else 0

    def renew(self, number: int, content: bytes) -> bool:
        return self.claims.get(number) == content

    def remove(self, number: int) -> None:
        self.claims.pop(number, None)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("alive", [True, False])
def test_a_builder_elsewhere_is_respected_or_has_given_way_in_two_minutes(monkeypatch, alive):
    place = Place(renewals=alive)
    monkeypatch.setattr(workspace, "bucket_claims", lambda *_: place)
    monkeypatch.setattr(lease, "time", place)
    mine = workspace.Workspace("gs://bucket/corpus").lease()

    def take() -> None:
        while not mine.take():
            place.sleep(workspace._TIMES.poll)

    if alive:
        with pytest.raises(UserError, match="directory gs://bucket/corpus is in use by"):
            take()
        assert list(place.claims) == [1]
    else:
        take()
        assert list(place.claims) == [2]
        mine.release()
    assert place.now < 120


@pytest.mark.parametrize("place", ["beside", "bucket", "disk"])
def test_duplicates_are_sought_in_any_place(bucket, tmp_path, monkeypatch, place):
    """Signatures and decisions in the bucket of the corpus, in another directory, or on a disk."""
    recipe = replace(
        RECIPE, cleaning=CleaningConfig(near_duplicates=0.8, duplicate_paragraphs=True)
    )
    text = "\n\n".join([*TEXTS, TEXTS[0]])
    (tmp_path / "in.txt").write_text(text)
    here = build(str(tmp_path / "in.txt"), tmp_path / "out", recipe)
    files().pipe_file("corpora/repeated/in.txt", text.encode())
    monkeypatch.setattr(shuffle, "RANGE_BYTES", 30_000)  # several ranges
    scratch = {"beside": None, "bucket": f"{bucket}/scratch", "disk": tmp_path / "scratch"}[place]
    out = f"{bucket}/{place}"
    build(f"{bucket}/repeated/in.txt", out, recipe, scratch=scratch)
    assert not files().exists("corpora/scratch")
    assert not any(name.startswith(("duplicates", "tasks/")) for name in names(out))
    train, heldout = fetched(out, tmp_path / "fetched")
    assert train.meta["dropped"] == {"duplicate": 10}
    assert train.fingerprint == here.train.fingerprint
    assert heldout.fingerprint == here.heldout.fingerprint


@pytest.mark.parametrize("call", ["cat_file", "find"])
def test_a_bucket_that_fails_meanwhile_is_named_and_the_build_continued(bucket, monkeypatch, call):
    """There was a traceback; the command that is repeated goes on."""
    out, real = f"{bucket}/failing-{call}", workspace.Workspace._files

    class Away:
        def __init__(self, files):
            self._files = files

        def __getattr__(self, name):
            return getattr(self._files, name)

    def away(self, path):
        if call == "find" or path.endswith("unigram_counts.bin"):
            raise HttpError({"code": 503, "message": "away"})
        return self._files.cat_file(path)

    setattr(Away, call, away)
    with monkeypatch.context() as patch:
        patch.setattr(workspace.Workspace, "_files", lambda self: Away(real(self)))
        with pytest.raises(UserError, match=r"away.*Rerun the command"):
            build(f"{bucket}/raw/*", out)
    assert build(f"{bucket}/raw/*", out).written.train > 0


def test_the_second_scheme_of_cloud_storage_is_the_same_place(bucket, local, tmp_path):
    """The bucket was said not to exist."""
    build(f"{bucket}/raw/*", "gcs://corpora/second")
    train, _ = fetched(f"{bucket}/second", tmp_path / "fetched")
    assert train.fingerprint == local.train.fingerprint


def test_a_bucket_that_is_not_there(bucket):
    with pytest.raises(UserError, match="there is no bucket none-there"):
        build(f"{bucket}/raw/*", "gs://none-there/out")
