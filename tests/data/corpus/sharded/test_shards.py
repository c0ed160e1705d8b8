"""A corpus of several shards: the same for any number of workers and after any end."""

import bz2
import contextlib
import gzip
import itertools
import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_texts import make_text
from word_tokenizer import Failing, WordTokenizer

from bert_jax.data.corpus import passes
from bert_jax.data.corpus.build import build_corpora, build_corpus
from bert_jax.data.corpus.cleaning.clean import CleaningConfig
from bert_jax.data.corpus.documents import Head
from bert_jax.data.corpus.kinds import tables
from bert_jax.data.corpus.passes import Recipe, Written, better_thresholds
from bert_jax.data.corpus.sharded import build as shard_build
from bert_jax.data.corpus.sharded.build import estimate_corpus
from bert_jax.data.corpus.sharded.engine import Engine, open_engine, plan_tasks
from bert_jax.data.corpus.sharded.workspace import Workspace, open_workspace
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.data.store import open_store
from bert_jax.errors import UserError
from bert_jax.files.staging import StagedDirectory
from bert_jax.files.tfds import PreparedSplit

SHARD_BYTES = 10_000
CORPUS = ["CORPUS.md", "heldout", "train"]
"""Names in the directory of a corpus."""
RECIPE = Recipe(WordTokenizer(), heldout_rate=0.1)


@pytest.fixture
def texts(tmp_path) -> str:
    """A glob of three files, of which one is several shards."""
    (tmp_path / "in").mkdir()
    for number, size in enumerate((20, 200, 20)):
        (tmp_path / "in" / f"{number}.txt").write_text(make_text(size, seed=number))
    return str(tmp_path / "in" / "*.txt")


def build(texts, out, recipe=RECIPE, workers=1, **options):
    options = {"shard_bytes": SHARD_BYTES, "progress": False, **options}
    (built,) = build_corpora([texts], recipe, out, engine=Engine(workers), **options)
    return built


def documents(store) -> list[tuple]:
    found = []
    for shard in store.shards:
        sentences = [
            tuple(shard.tokens[a:b].tolist()) for a, b in itertools.pairwise(shard.sentence_offsets)
        ]
        found += [tuple(sentences[a:b]) for a, b in itertools.pairwise(shard.document_offsets)]
    return found


def left(tmp_path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "in")


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """Names of the tasks that are run in this process."""
    names = []
    make = shard_build.make_shard
    monkeypatch.setattr(
        shard_build,
        "make_shard",
        lambda job, task, *how: names.append(task.name) or make(job, task, *how),
    )
    return names


def test_shards_hold_what_a_flat_store_holds(texts, tmp_path):
    flat = build_corpus([texts], WordTokenizer(), tmp_path / "flat", heldout_rate=0.1)
    built = build(texts, tmp_path / "one")
    assert len(built.train.counts) > 5
    for part in ("train", "heldout"):
        whole, shards = getattr(flat, part), getattr(built, part)
        assert documents(shards) == documents(whole)
        assert shards.unigram_counts.tolist() == whole.unigram_counts.tolist()
        open_store(tmp_path / "one" / part, verify=True)
    assert built.train.meta["heldout_rate"] == 0.1
    assert built.written.text_bytes == pytest.approx(
        flat.written.text_bytes, rel=1e-3
    )  # without separators
    assert sum(each["documents"] for each in built.train.meta["sources"]) == 240
    assert f" tokens in {len(built.train.counts)} shards" in built.summary()
    assert left(tmp_path) == ["flat", "one"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == CORPUS


def test_any_number_of_workers(texts, tmp_path):
    one, two = (build(texts, tmp_path / f"{n}", workers=n) for n in (1, 2))
    assert one.train.fingerprint == two.train.fingerprint
    assert one.heldout.fingerprint == two.heldout.fingerprint
    assert one.train.counts == two.train.counts
    assert one.train.meta["sources"] == two.train.meta["sources"]


def test_a_build_that_ended_early_is_continued(texts, tmp_path, made):
    whole = build(texts, tmp_path / "whole")
    names = made.copy()
    made.clear()
    good = (tmp_path / "in" / "2.txt").read_bytes()
    (tmp_path / "in" / "2.txt").write_bytes(good + b"caf\xe9")
    with pytest.raises(UserError, match=r"2\.txt, line \d+: not UTF-8"):
        build(texts, tmp_path / "out")
    assert made == names
    assert left(tmp_path) == ["out.unfinished", "whole"]
    assert len(list((tmp_path / "out.unfinished" / "tasks").iterdir())) == len(names) - 1

    made.clear()
    (tmp_path / "in" / "2.txt").write_bytes(good)
    again = build(texts, tmp_path / "out")
    assert made == names[-1:]
    assert again.train.fingerprint == whole.train.fingerprint
    assert left(tmp_path) == ["out", "whole"]
    assert not (tmp_path / "out" / "tasks").exists()


def test_a_build_of_one_task_leaves_no_earlier_build_behind(texts, tmp_path):
    bad = tmp_path / "in" / "3.txt"
    bad.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"3\.txt, line 1: not UTF-8"):
        build(texts, tmp_path / "out")
    bad.unlink()
    assert left(tmp_path) == ["out.unfinished"]
    found = build(texts, tmp_path / "out", shard_bytes=1 << 30)
    assert left(tmp_path) == ["out"]
    assert (
        found.train.fingerprint
        == build(texts, tmp_path / "whole", shard_bytes=1 << 30).train.fingerprint
    )
    assert sorted(path.name for path in (tmp_path / "out" / "train" / "shards").iterdir()) == [
        path.name for path in (tmp_path / "whole" / "train" / "shards").iterdir()
    ]


@pytest.mark.parametrize("spelling", ["out/", "link", "new/../out"])
def test_an_earlier_build_is_found_by_any_spelling(tmp_path, spelling):
    (tmp_path / "link").symlink_to(tmp_path / "out")
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "shard").touch()
    with open_workspace(f"{tmp_path}/{spelling}", overwrite=False, resume=False):
        pass
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shard"]
    assert left(tmp_path) == ["link", "out"]


def test_the_bar_moves_inside_a_task(texts, tmp_path, monkeypatch):
    places: list[int] = []

    class Bar(contextlib.nullcontext):
        n = 0

        def __enter__(self):
            return self

        def update(self, more: int) -> None:
            assert more >= 0
            self.n += more
            places.append(self.n)

    monkeypatch.setattr(shard_build, "progress_bar", lambda **_: Bar())
    monkeypatch.setattr(passes, "BLOCK_BYTES", 3000)
    build(texts, tmp_path / "out", shard_bytes=1 << 30)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "in").iterdir())]
    assert sorted(set(places)) == list(itertools.accumulate(sizes))


def test_work_of_another_build_is_not_taken(texts, tmp_path, made):
    whole = build(texts, tmp_path / "whole")
    names = sorted(made)
    (tmp_path / "in" / "3.txt").write_bytes(b"caf\xe9\n" * 1000)
    with pytest.raises(UserError, match=r"3\.txt, line 1: not UTF-8"):
        build(texts, tmp_path / "out", replace(RECIPE, splitter="lines"))
    (tmp_path / "in" / "3.txt").unlink()
    shards = tmp_path / "out.unfinished" / "train" / "shards"
    (shards / "00000").rename(shards / "00099")  # of a build with more tasks
    (tmp_path / "out.unfinished" / "de" / "train").mkdir(parents=True)
    made.clear()
    again = build(texts, tmp_path / "out")
    assert sorted(made) == names
    assert again.train.fingerprint == whole.train.fingerprint
    found = sorted(path.name for path in (tmp_path / "out" / "train" / "shards").iterdir())
    assert found == names
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == CORPUS


def test_two_builds_into_one_directory(texts, tmp_path):
    with (
        StagedDirectory(tmp_path / "out", lambda path: True, resume=True),
        pytest.raises(UserError, match=r"another build is writing .*out;"),
    ):
        build(texts, tmp_path / "out")
    build(texts, tmp_path / "out")
    with pytest.raises(UserError, match="already exists and is complete"):
        build(texts, tmp_path / "out")
    other = build(texts, tmp_path / "out", replace(RECIPE, heldout_rate=0.0), overwrite=True)
    assert other.heldout is None
    assert left(tmp_path) == ["out"]


def test_a_full_disk_keeps_what_is_complete(texts, tmp_path, made):
    (tmp_path / "in" / "0.txt").write_text(("w" * 1000 + " ") * 350)  # few tokens
    (tmp_path / "in" / "1.txt").write_text(
        "\n\n".join(f"Word {n} and more." for n in range(30_000))
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*out\.unfinished/train/shards/00001: "):
            build(texts, tmp_path / "out", shard_bytes=400_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    shards = tmp_path / "out.unfinished" / "train" / "shards"
    assert [path.name for path in shards.iterdir()] == ["00000"]
    made.clear()
    build(texts, tmp_path / "out", shard_bytes=400_000)
    assert made == ["00001", "00002", "00003"]


@pytest.mark.parametrize("rate", [0.0001, 0.99])
def test_few_documents_are_divided_as_in_a_flat_store(tmp_path, rate):
    path = tmp_path / "a.txt"
    count = 300 if rate < 0.5 else 3
    path.write_text("\n\n".join(f"Document {n} of words." for n in range(count)))
    recipe = replace(RECIPE, heldout_rate=rate)
    size = path.stat().st_size
    built = build(str(path), tmp_path / "out", recipe, shard_bytes=size // 3)
    assert len(built.train.counts) > 1
    flat = build(str(path), tmp_path / "flat", recipe)
    assert documents(built.train) == documents(flat.train)
    assert (built.heldout is None) == (flat.heldout is None) == (rate > 0.5)
    if built.heldout is not None:
        assert documents(built.heldout) == documents(flat.heldout)


def test_no_text_and_errors_of_workers(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("- -\n\n" * 100)
    with pytest.raises(UserError, match="the corpus is empty"):
        build(str(path), tmp_path / "out", shard_bytes=100)
    path.write_text(make_text(50))
    with pytest.raises(ZeroDivisionError, match="in a worker"):
        build(str(path), tmp_path / "out", replace(RECIPE, tokenizer=Failing()))


@pytest.fixture
def by_language(tmp_path) -> str:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.jsonl"
    with path.open("w") as file:
        for number, text in enumerate(make_text(120).split("\n\n")):
            lang = None if number == 7 else ("de", "en", "zh-Hant")[number % 3]
            file.write(json.dumps({"lang": lang, "text": text}) + "\n")
    return str(path)


@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 1 << 30])
def test_a_corpus_for_each_value_of_a_field(by_language, tmp_path, shard_bytes):
    recipe = replace(RECIPE, by_field="lang")
    out = tmp_path / "out"
    built = build_corpora(
        [by_language], recipe, out, engine=Engine(1), shard_bytes=shard_bytes, progress=False
    )
    assert {corpus.path.name for corpus in built} == {"de", "en", "zh-Hant", "unknown"}
    counts = {
        corpus.path.name: [
            store.num_documents if store else 0 for store in (corpus.train, corpus.heldout)
        ]
        for corpus in built
    }
    assert {name: sum(each) for name, each in counts.items()} == {
        "de": 40, "en": 39, "zh-Hant": 40, "unknown": 1,
    }  # fmt: skip
    assert all(held >= 2 for name, (_, held) in counts.items() if name != "unknown")
    assert "for all values of `lang`" in (out / "de" / "CORPUS.md").read_text()
    assert open_store(out / "de" / "train", verify=True).meta["sources"][0]["documents"] > 0
    with pytest.raises(UserError, match="already exists and is complete"):
        build_corpora([by_language], recipe, out, engine=Engine(1), shard_bytes=shard_bytes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"}', r"a\.jsonl, document 121: no field 'lang', which --by-column names"),
        ('{"text": "a", "lang": "../x"}', "'lang' is '../x', which cannot name a corpus"),
        ('{"text": "a", "lang": "tasks"}', "'tasks', which .* none of tasks, quarantine"),
    ],
)
def test_bad_fields(by_language, tmp_path, line, message):
    with open(by_language, "a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=message):
        build_corpora(
            [by_language], replace(RECIPE, by_field="lang"), tmp_path / "out", engine=Engine(1)
        )
    assert left(tmp_path) == []


@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 1 << 30])
def test_duplicates_are_dropped_across_shards(texts, tmp_path, shard_bytes):
    first = (tmp_path / "in" / "0.txt").read_text()
    (tmp_path / "in" / "2.txt").write_text(first + "\n\n" + make_text(20, seed=9))
    recipe = replace(RECIPE, cleaning=CleaningConfig(duplicates=True))
    built = build(
        texts, tmp_path / "out", recipe, shard_bytes=shard_bytes, keep_dropped=tmp_path / "dropped"
    )
    assert built.written.train + built.written.heldout == 240
    assert built.train.meta["dropped"] == {"duplicate": 20}
    samples = (tmp_path / "dropped" / "duplicate.jsonl").read_text().splitlines()
    assert {Path(json.loads(line)["source"]).name for line in samples} == {"2.txt"}
    assert left(tmp_path) == ["dropped", "out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == CORPUS


@pytest.mark.parametrize("scratch", [None, "shared"])
def test_what_was_read_for_duplicates_is_not_read_again(texts, tmp_path, monkeypatch, scratch):
    recipe = replace(RECIPE, cleaning=CleaningConfig(duplicates=True))
    shared = scratch and tmp_path / scratch

    def ends_early(*_):
        raise UserError("the machine goes down")

    with monkeypatch.context() as patch:
        patch.setattr(shard_build, "make_shard", ends_early)
        with pytest.raises(UserError, match="goes down"):
            build(texts, tmp_path / "out", recipe, scratch=shared)
    build(texts, tmp_path / "other", recipe, scratch=shared)
    monkeypatch.setattr(shard_build, "scan", lambda *_, **__: pytest.fail("read again"))
    build(texts, tmp_path / "out", recipe, scratch=shared)


@pytest.mark.parametrize("filters", [(), ("words=999:",)])  # of the build before
def test_a_shard_is_made_again_where_other_documents_are_duplicates_now(
    tmp_path, monkeypatch, filters
):
    (tmp_path / "in").mkdir()
    first, second = (tmp_path / "in" / name for name in ("0.txt", "1.txt"))
    first.write_text(make_text(5, seed=0))
    second.write_text(make_text(40, seed=1))
    arguments = str(tmp_path / "in" / "*.txt"), tmp_path / "out"
    before, recipe = (
        replace(RECIPE, cleaning=CleaningConfig(duplicates=True, filters=each))
        for each in (filters, ())
    )
    options = {"shard_bytes": 2 * first.stat().st_size}
    make = shard_build.make_shard

    def ends_early(job, task, *how):
        if task.number == 2:
            raise UserError("the machine goes down")
        return make(job, task, *how)

    monkeypatch.setattr(shard_build, "make_shard", ends_early)
    with pytest.raises(UserError, match="goes down"):
        build(*arguments, before, **options)
    monkeypatch.undo()
    # The first file now begins with a document of the second shard, whose text is what it was.
    document, _ = second.read_text().split("\n\n", 1)
    first.write_text(f"{document}\n\n{first.read_text()}")
    assert build(*arguments, recipe, **options).train.meta["dropped"] == {"duplicate": 1}


def test_a_mark_is_that_of_one_task_and_its_settings(texts, tmp_path):
    job = shard_build.Job(RECIPE, Workspace(tmp_path), {})
    first, second, *_ = plan_tasks(resolve_sources([texts]), SHARD_BYTES)
    others = (
        replace(job, recipe=replace(RECIPE, heldout_rate=0.2)),
        replace(job, thresholds={"": 5}),
        replace(job, samples=3),
    )
    own = {""}
    assert len({job.key(second, own), *(each.key(first, own) for each in (job, *others))}) == 5
    # A small corpus changes only the tasks that have documents of this corpus.
    divided = replace(job, thresholds={"fr": 5})
    assert divided.key(first, own) == job.key(first, own)
    assert divided.key(first, {"fr"}) != job.key(first, {"fr"})


def test_a_document_of_two_shards_is_one_when_few_are_divided():
    written = Written(train=2, smallest=[1, 5])
    written.add(Written(train=2, smallest=[1, 7]))
    assert written == Written(train=4, smallest=[1, 5, 7])
    assert not better_thresholds(RECIPE, {}, {"": written})


def test_counts_of_passes_add_up_and_the_four_smallest_hashes_stay_in_order():
    written = Written(3, 1, 100, [9, 2**63 + 8])
    written.add(Written(20, 5, 4000, [16, 3, 2**63, 9]))
    assert written == Written(23, 6, 4100, [3, 9, 16, 2**63])


@pytest.mark.parametrize(
    ("heldout", "smallest", "expected"),
    [
        (0, [3, 5, 8, 9], 6),  # the two with the smallest hashes
        (1, [3, 5, 8, 9], 6),
        (2, [3, 5, 8, 9], None),
        (1, [3, 5, 8], 0),  # too few to hold out any
        (2, [3, 5, 8], 0),
        (0, [3, 5, 8], None),
    ],
)
def test_a_small_corpus_holds_out_two_documents_or_none(heldout, smallest, expected):
    found = {"a": Written(9, heldout, 0, smallest), "b": Written(9, 2, 0, [1, 2, 3, 4])}
    assert better_thresholds(RECIPE, {}, found) == ({} if expected is None else {"a": expected})
    assert better_thresholds(RECIPE, {"a": 4}, found) == {}  # divided anew only once
    assert better_thresholds(replace(RECIPE, heldout_rate=0.0), {}, found) == {}


def test_a_corpus_without_documents_to_train_on(by_language, tmp_path):
    with open(by_language, "a") as file:
        file.write('{"text": "short", "lang": "xx"}\n')
    cleaning = CleaningConfig(filters=("words=2:100000",))
    recipe = Recipe(WordTokenizer(), 1 - 1e-9, by_field="lang", cleaning=cleaning)
    how = {"engine": Engine(1), "progress": False}
    built = build_corpora([by_language], recipe, tmp_path / "out", **how)
    found = {each.path.name: (each.written.train, each.written.heldout) for each in built}
    assert found == {
        "de": (38, 2),
        "en": (37, 2),
        "zh-Hant": (38, 2),
        "unknown": (1, 0),
        "xx": (0, 0),
    }
    assert "xx: 0.0 MB" in built[-1].summary()
    assert "0 documents to train on, 0 held out" in built[-1].summary()
    assert not (tmp_path / "out" / "xx").exists()
    nothing = replace(recipe, cleaning=CleaningConfig(filters=("words=99999:100000",)))
    with pytest.raises(UserError, match=r"are dropped \(121 words\) or contain no tokens"):
        build_corpora([by_language], nothing, tmp_path / "none", **how)


def test_estimate(texts, tmp_path):
    sources = resolve_sources([texts])
    built = build(texts, tmp_path / "out")
    size = sum(
        path.stat().st_size
        for path in (tmp_path / "out").rglob("*.bin")
        if path.name != "unigram_counts.bin"
    )
    whole = estimate_corpus(sources, RECIPE, shard_bytes=SHARD_BYTES)
    tokens = built.train.num_tokens + built.heldout.num_tokens
    assert (whole.documents, whole.tokens) == (240, tokens)
    assert whole.shards == len(built.train.counts)
    assert whole.text_bytes == pytest.approx(built.written.text_bytes, rel=1e-3)
    assert abs(whole.store_bytes - size) < 500
    sample = estimate_corpus(sources, RECIPE, sample_bytes=20_000)
    assert sample.sampled < sample.total
    assert sample.tokens == pytest.approx(tokens, rel=0.2)
    assert sample.documents == pytest.approx(240, rel=0.2)
    assert "processor hours" in "\n".join(sample.lines(2))


def test_an_estimate_of_a_parquet_file_reads_all_its_parts(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": make_text(320).split("\n\n")})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    (source,) = resolve_sources([str(tmp_path / "a.parquet")])
    found = estimate_corpus([source], RECIPE, sample_bytes=source.size // 2)
    assert found.documents == pytest.approx(320, rel=0.2)
    _, part, _ = source.divided(source.size // 3)
    texts = [text for each in part.divided(part.size // 5) for text in each.texts()]
    assert texts == list(part.texts())


def test_an_estimate_reads_a_sample_of_a_data_set(monkeypatch):
    examples = [{"text": f"Text {number} has words."} for number in range(1000)]
    prepared = PreparedSplit({}, examples, "1.0.0")
    monkeypatch.setattr(tables, "open_tfds", lambda *_: prepared)
    monkeypatch.setattr(shard_build, "_ROWS", 50)
    found = estimate_corpus(resolve_sources(["tfds:made"]), RECIPE)
    assert (found.total, found.sampled) == (1000, 50)
    assert found.documents == 1000


@pytest.mark.parametrize("sample_bytes", [1000, 1_000_000])
def test_an_estimate_of_files_and_a_data_set(texts, monkeypatch, sample_bytes):
    prepared = PreparedSplit({}, [{"text": "A text has words."}] * 1000, "1.0.0")
    monkeypatch.setattr(tables, "open_tfds", lambda *_: prepared)
    monkeypatch.setattr(shard_build, "_ROWS", 50)

    def documents_of(*names):
        sources = resolve_sources(names)
        return estimate_corpus(sources, RECIPE, sample_bytes=sample_bytes).documents

    assert documents_of(texts, "tfds:made") == documents_of(texts) + 1000


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.bz2"])
def test_an_estimate_counts_what_it_reads_of_a_compressed_file(tmp_path, kind):
    opens, random = {"jsonl.gz": gzip.open, "jsonl.bz2": bz2.open}[kind], np.random.default_rng(0)
    path = tmp_path / f"texts.{kind}"
    with opens(path, "wt") as file:
        for _ in range(40_000):
            file.write(json.dumps({"text": random.bytes(50).hex()}) + "\n")
    (source,) = resolve_sources([str(path)])
    head = Head(source, source.size // 10)
    share = len(list(head.documents())) / 40_000
    assert head.bytes_read / source.size == pytest.approx(share, rel=0.15)


def test_engines_by_name():
    with pytest.raises(UserError, match="no engine 'spark'; the engines are local and ray"):
        open_engine("spark")
    with pytest.raises(UserError, match=r"auto.* only --engine=ray takes an address"):
        open_engine(address="auto")
