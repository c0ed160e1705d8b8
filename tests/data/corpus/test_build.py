"""Raw text to two stores: the same for any number of workers, whole or not at all."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path

import numpy as np
import psutil
import pytest
from made_texts import make_text
from word_tokenizer import Dying, Failing, OutOfRange, WordTokenizer

from bert_jax.data.corpus import build as build_module
from bert_jax.data.corpus import encode, passes
from bert_jax.data.corpus.build import build_corpus, iter_texts
from bert_jax.data.corpus.encode import LONGEST_SENTENCE
from bert_jax.data.corpus.sentences import get_splitter
from bert_jax.data.store import open_store
from bert_jax.errors import UserError
from bert_jax.training.pretrain.config import PretrainConfig


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.txt"
    path.write_text(make_text(300))
    return path


def build(text, tmp_path, name="corpus", **options):
    options = {"tokenizer": WordTokenizer(), "num_workers": 1, "heldout_rate": 0.1, **options}
    return build_corpus([str(text)], out=tmp_path / name, **options)


def documents(store) -> list[tuple]:
    """Each document as a tuple of sentences, each a tuple of ids."""
    sentences = [
        tuple(store.shards[0].tokens[a:b].tolist())
        for a, b in itertools.pairwise(store.shards[0].sentence_offsets)
    ]
    offsets = store.shards[0].document_offsets
    return [tuple(sentences[a:b]) for a, b in itertools.pairwise(offsets)]


def left(tmp_path) -> list[str]:
    return sorted(p.name for p in tmp_path.iterdir() if p.name not in ("in", "corpus"))


def test_every_sentence_in_order(text, tmp_path):
    tokenizer = WordTokenizer()
    built = build(text, tmp_path)
    expected = [
        tuple(
            tuple(tokenizer.encode_batch([sentence])[0].tolist())
            for paragraph in document.split("\n")
            for sentence in get_splitter("fast")(paragraph)
        )
        for document in text.read_text().split("\n\n")
    ]
    assert built.heldout is not None
    found = {"train": documents(built.train), "heldout": documents(built.heldout)}
    assert sorted(found["train"] + found["heldout"]) == sorted(expected)
    # In the order of the text on each side.
    assert found["train"] == [d for d in expected if d in set(found["train"])]
    assert 10 <= len(found["heldout"]) <= 60
    assert built.train.meta["sources"][0]["name"] == str(text)
    assert f"{built.train.num_tokens:,} tokens, 0.00% of the tokens [UNK]" in built.summary()
    assert left(tmp_path) == []


def test_sentences_are_encoded_as_inside_a_text(monkeypatch):
    tokenizer = WordTokenizer()
    tokenizer.word_prefix = "^"  # byte-level tokenizers have a space
    monkeypatch.setattr(encode, "_worker", None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    encode.start_worker(tokenizer, "lines")
    tokens, lengths, _ = encode.encode_block(b"one two\nthree\n").arrays
    first, second = tokenizer.encode_batch(["^one two", "^three"])
    assert tokens.tolist() == [*first, *second]
    assert lengths.tolist() == [2, 1]


def test_long_sentences_are_cut_between_words(tmp_path):
    tokenizer = WordTokenizer()
    tokenizer.continues_word[::3] = True  # a third of all ids
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.txt"
    lengths = [1, LONGEST_SENTENCE, LONGEST_SENTENCE + 1, 1000]
    words = iter(f"w{n}" for n in itertools.count())
    sentences = [" ".join(itertools.islice(words, n)) for n in lengths]
    # A document without tokens, and another one: counts must stay with their documents.
    path.write_text("\n".join(sentences) + "\n\n-\n\n" + sentences[3] + "\n")
    built = build(path, tmp_path, splitter="lines", tokenizer=tokenizer, heldout_rate=0.0)
    first, second = documents(built.train)
    assert [len(s) for s in first[:2]] == lengths[:2], "as long as they may be"
    for whole, pieces in (
        (sentences[2], first[2:5]),
        (sentences[3], first[5:]),
        (sentences[3], second),
    ):
        assert sum(pieces, ()) == tuple(tokenizer.encode_batch([whole])[0].tolist())
        assert max(map(len, pieces)) <= LONGEST_SENTENCE // 2 + LONGEST_SENTENCE // 8
        starts = [piece[0] for piece in pieces[1:]]
        assert len(starts) >= 2
        assert not tokenizer.continues_word[starts].any()


def test_a_language_without_spaces_is_cut_too(tmp_path):
    tokenizer = WordTokenizer()
    tokenizer.continues_word[:] = True
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.txt"
    path.write_text("word " * 310)
    built = build(path, tmp_path, splitter="lines", tokenizer=tokenizer, heldout_rate=0.0)
    assert np.diff(built.train.shards[0].sentence_offsets).tolist() == [31] * 10


def test_what_sentence_pairs_leave_out_is_said(text, tmp_path):
    line, *more = build(text, tmp_path).summary().splitlines()[3:]
    assert "as sentence pairs: " in line
    assert "rows of 128 tokens" in line
    assert "of the tokens in no row" in line
    assert more == []
    text.write_text(make_text(1))
    (said,) = build(text, tmp_path, "one", heldout_rate=0.0).summary().splitlines()[3:]
    assert said.startswith("Warning: ")
    assert "1 document(s)" in said


def test_the_length_of_pairs_is_that_of_the_first_phase():
    assert PretrainConfig().training.phases[0].length == build_module.DEFAULT_LENGTH


def test_any_number_of_workers_and_block_size(text, tmp_path, monkeypatch):
    first = build(text, tmp_path, "one")
    monkeypatch.setattr(passes, "BLOCK_BYTES", 2000)
    for workers in (1, 3):
        again = build(text, tmp_path, f"workers{workers}", num_workers=workers)
        assert again.train.fingerprint == first.train.fingerprint
        assert again.heldout.fingerprint == first.heldout.fingerprint
        assert open_store(again.path / "train", verify=True).num_documents > 200


def test_a_file_named_twice_is_read_once(text, tmp_path):
    specs = [str(text), str(text.parent / "*.txt")]
    built = build_corpus(specs, WordTokenizer(), tmp_path / "twice", num_workers=1)
    assert built.train.num_documents + built.heldout.num_documents == 300
    assert list(iter_texts(specs)) == list(iter_texts(specs[:1]))
    with pytest.raises(UserError, match="no input given"):
        build_corpus([], WordTokenizer(), tmp_path / "none")


def test_equal_documents_are_on_one_side(tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.txt"
    path.write_text("\n\n".join([make_text(100)] * 3))
    built = build(path, tmp_path, heldout_rate=0.3)
    assert built.heldout is not None
    train, heldout = documents(built.train), documents(built.heldout)
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) == 300
    assert len(heldout) == 3 * len(set(heldout))


def test_division_is_kept_when_the_corpus_grows(tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.txt"
    path.write_text(make_text(200))
    small = build(path, tmp_path, "small")
    path.write_text(make_text(200) + "\n\n" + make_text(200, seed=1))
    large = build(path, tmp_path, "large")
    assert set(documents(small.heldout)) <= set(documents(large.heldout))


@pytest.mark.parametrize("rate", [0.0001, 0.001])
def test_two_documents_are_held_out_where_the_rate_gives_none(text, tmp_path, rate):
    built = build(text, tmp_path, heldout_rate=rate)
    assert built.heldout.num_documents == 2
    assert built.train.num_documents == 298
    assert built.train.meta["heldout_rate"] == rate
    assert left(tmp_path) == []


def test_no_heldout(text, tmp_path):
    built = build(text, tmp_path, heldout_rate=0.0)
    assert built.heldout is None
    assert not (built.path / "heldout").exists()
    text.write_text("One document.\n\nAnother one.\n\nAnother one.")
    for rate in (0.01, 0.99):
        few = build(text, tmp_path, f"few{rate}", heldout_rate=rate)
        assert few.heldout is None
        assert few.train.num_documents == 3


def test_what_gives_no_token_is_dropped(text, tmp_path):
    text.write_text("- -\n\nA b c. - \n\n-\n\nD e.\n-\nF g.")
    built = build(text, tmp_path, splitter="lines")
    assert [len(document) for document in documents(built.train)] == [1, 2]
    text.write_text("- -\n\n-")
    with pytest.raises(UserError, match="corpus is empty"):
        build(text, tmp_path, "empty")
    assert left(tmp_path) == []


def test_a_document_larger_than_a_block(tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.txt"
    path.write_text("\n".join(f"Sentence number {n}." for n in range(60_000)))
    built = build(path, tmp_path, num_workers=2)
    assert built.train.num_sentences == 60_000
    assert built.train.num_documents == 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("tokenizer", "error", "message"),
    [
        (Failing(), ZeroDivisionError, "in a worker"),
        (OutOfRange(), UserError, "the id 66536, but its vocabulary has the ids 0 to 999"),
    ],
)
def test_worker_errors(text, tmp_path, monkeypatch, tokenizer, error, message, workers):
    monkeypatch.setattr(passes, "BLOCK_BYTES", 2000)
    with pytest.raises(error, match=message):
        build(text, tmp_path, tokenizer=tokenizer, num_workers=workers)
    assert left(tmp_path) == []
    assert not (tmp_path / "corpus").exists()
    assert not alive_workers()


def alive_workers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline())
    ]


def test_killed_worker(text, tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "BLOCK_BYTES", 2000)
    with pytest.raises(UserError, match=r"a worker process died.*Use fewer workers"):
        build(text, tmp_path, tokenizer=Dying(os.getpid()), num_workers=2)
    assert left(tmp_path) == []
    assert not alive_workers()


def test_bad_source_late_in_the_corpus(text, tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "BLOCK_BYTES", 2000)
    (text.parent / "b.txt").write_bytes(b"fine\n" * 1000 + b"caf\xe9\n")
    with pytest.raises(UserError, match=r"b\.txt, line 1001: not UTF-8"):
        build(text.parent / "*.txt", tmp_path, num_workers=2)
    assert left(tmp_path) == []
    assert not alive_workers()


def start_slow_build(tmp_path) -> subprocess.Popen:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(make_text(2000))
    script = f"""
    import signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    sys.path.insert(0, {str(Path(__file__).parents[2] / "support")!r})
    from bert_jax.data.corpus import build, passes
    from word_tokenizer import WordTokenizer
    passes.BLOCK_BYTES = 2000
    append = passes.Pass._append
    def slow(self, corpus, block):
        append(self, corpus, block)
        print("appended", flush=True)
        time.sleep(0.2)
    passes.Pass._append = slow
    build.build_corpus([{str(tmp_path / "in" / "a.txt")!r}], WordTokenizer(),
                       {str(tmp_path / "corpus")!r}, num_workers=2)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "appended\n"
    return process


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


def test_killed_build_leaves_no_corpus(tmp_path):
    process = start_slow_build(tmp_path)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert not (tmp_path / "corpus").exists()
    assert left(tmp_path) == [f"corpus.tmp-{process.pid}"]
    wait_gone(workers)
    build(tmp_path / "in" / "a.txt", tmp_path)
    assert left(tmp_path) == []


def test_interrupted_build_cleans_up(tmp_path):
    process = start_slow_build(tmp_path)
    workers = psutil.Process(process.pid).children(recursive=True)
    for each in [*workers, psutil.Process(process.pid)]:
        each.send_signal(signal.SIGINT)  # as a terminal does: to the whole group
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert "SpawnProcess" not in errors  # the workers stay silent
    wait_gone(workers)
    assert left(tmp_path) == []
    assert not (tmp_path / "corpus").exists()


def test_full_disk(text, tmp_path):
    script = f"""
    import resource, signal, sys
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.path.insert(0, {str(Path(__file__).parents[2] / "support")!r})
    from bert_jax.data.corpus.build import build_corpus
    from word_tokenizer import WordTokenizer
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
    build_corpus([{str(text)!r}], WordTokenizer(), {str(tmp_path / "corpus")!r}, num_workers=1)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert "UserError: cannot write" in done.stderr.splitlines()[-1]
    assert left(tmp_path) == []
    assert not (tmp_path / "corpus").exists()


def test_existing_corpus(text, tmp_path):
    first = build(text, tmp_path)
    with pytest.raises(UserError, match="already exists and is complete"):
        build(text, tmp_path)
    text.write_text(make_text(50, seed=3))
    with pytest.raises(ZeroDivisionError):
        build(text, tmp_path, tokenizer=Failing(), overwrite=True)
    assert open_store(tmp_path / "corpus" / "train").fingerprint == first.train.fingerprint
    second = build(text, tmp_path, overwrite=True)
    assert second.train.fingerprint != first.train.fingerprint
    assert left(tmp_path) == []
    (tmp_path / "corpus" / "notes.md").write_text("mine")
    with pytest.raises(UserError, match="holds files of another kind"):
        build(text, tmp_path, overwrite=True)
    assert (tmp_path / "corpus" / "notes.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"heldout_rate": 1.0}, "heldout_rate is 1.0"),
        ({"heldout_rate": float("nan")}, "heldout_rate is nan"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"splitter": "quick"}, "no sentence splitter 'quick'"),
    ],
)
def test_bad_options(text, tmp_path, option, message):
    with pytest.raises(UserError, match=message):
        build(text, tmp_path, **option)
    assert not (tmp_path / "corpus").exists()


def test_store_of_another_tokenizer(text, tmp_path):
    built = build(text, tmp_path)
    open_store(built.path / "train", WordTokenizer())
    with pytest.raises(UserError, match="built with another tokenizer"):
        open_store(built.path / "train", WordTokenizer(500))


def test_iter_texts(text):
    everything = list(iter_texts([str(text)]))
    assert everything == [line for line in text.read_text().split("\n") if line]


def test_memory_does_not_hold_the_sample(text):
    text.write_text("Ein kurzer Satz.\n\n" * 200_000)

    def peak(max_bytes: int | None) -> int:
        tracemalloc.start()
        size = sum(len(each) + 1 for each in iter_texts([str(text)], max_bytes=max_bytes))
        assert max_bytes is None or max_bytes / 2 < size <= max_bytes
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(2_000_000) < peak(None) + 1_000_000


@pytest.mark.parametrize("max_bytes", [5_000, 20_000, 10**9])
def test_sample_is_spread_over_the_corpus(text, max_bytes):
    text.write_text(make_text(2000))
    everything = list(iter_texts([str(text)]))
    sample = list(iter_texts([str(text)], max_bytes=max_bytes))
    assert sample == list(iter_texts([str(text)], max_bytes=max_bytes))
    size, total = sum(map(len, sample)), sum(map(len, everything))
    assert min(max_bytes, total) * 0.4 <= size <= max_bytes
    positions = np.searchsorted(
        np.cumsum([len(p) for p in everything]),
        [sum(map(len, everything[: everything.index(p)])) for p in sample[:: len(sample) // 20]],
    )
    quarters = np.histogram(positions, bins=4, range=(0, len(everything)))[0]
    assert (quarters > 0).all()


def test_real_books(real_data, tmp_path):
    # 3 MB of sentence pairs and a compressed file: what the command is for.
    begin = time.perf_counter()
    built = build(real_data / "pretrain" / "wikipedia-*.xz", tmp_path, num_workers=2)
    assert built.train.num_documents > 10_000
    assert built.seconds <= time.perf_counter() - begin
