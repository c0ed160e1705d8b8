"""Pairs of texts to two stores of pairs, and what people are told of them."""

import gzip
import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.cli import main as cli
from bert_jax.data.corpus import build_pairs as module
from bert_jax.data.corpus import pairs as reading
from bert_jax.data.corpus.build import iter_texts
from bert_jax.data.corpus.build_pairs import build_pairs
from bert_jax.data.corpus.pairs import open_pairs
from bert_jax.data.store import entropy, open_store
from bert_jax.errors import UserError
from bert_jax.tasks.examples import Origin
from bert_jax.tasks.tables import Row
from bert_jax.tokenization.load import load_tokenizer

WORDS = (
    "Two dogs play A man sings in the park Zwei Hunde spielen Ein Mann singt im".split()  # noqa: SIM905
)
SOURCES = ["Two dogs play", "A man sings", "A man sings in the park", "Two dogs play in the park"]
TARGETS = ["Zwei Hunde spielen", "Ein Mann singt", "Ein Mann singt im park", "Zwei Hunde im park"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return load_tokenizer(vocabulary)


def write(path, lines, end="\n"):
    path.write_bytes("".join(line + end for line in lines).encode())
    return str(path)


@pytest.fixture
def files(tmp_path):
    """The names of a source and a target file."""
    (tmp_path / "in").mkdir()
    texts = ((tmp_path / "in" / "a.en", SOURCES), (tmp_path / "in" / "a.de", TARGETS))
    return [write(path, lines) for path, lines in texts]


def build(names, tokenizer, out, **options):
    options = {"num_workers": 1, "heldout_rate": 0.0, "progress": False, **options}
    return build_pairs([open_pairs(names)], tokenizer, out, **options)


def texts_of(store, tokenizer):
    """The pairs of a store, decoded."""
    assert store.shards[0].document_offsets.tolist() == list(range(0, store.num_sentences + 1, 2))
    sides = [
        tokenizer.decode(store.shards[0].tokens[a:b])
        for a, b in itertools.pairwise(store.shards[0].sentence_offsets)
    ]
    return list(zip(sides[::2], sides[1::2], strict=True))


def test_a_pair_is_a_document_of_two_sentences(files, tokenizer, tmp_path):
    built = build(files, tokenizer, tmp_path / "out")
    assert built.heldout is None
    assert texts_of(built.train, tokenizer) == list(zip(SOURCES, TARGETS, strict=True))
    store = open_store(tmp_path / "out" / "train", tokenizer, verify=True)
    assert store.is_pairs
    assert [each["name"] for each in store.meta["sources"]] == files
    targets = [word for text in TARGETS for word in [*text.split(), "[SEP]"]]
    counts = np.array([targets.count(word) for word in dict.fromkeys(targets)])
    assert store.target_entropy == pytest.approx(entropy(counts))
    summary = built.summary()
    assert "train: 4 pairs, 0.00% of the tokens [UNK]" in summary
    assert "source: 18 tokens; a text has 6 (p50), 6 (p99), 6 at most" in summary
    assert "as rows of 128 source and 128 target tokens: 1 rows; 20.3% of source" in summary
    assert "come back exactly from their tokens: 100.0% of 4" in summary
    assert "Warning" not in summary


def test_long_sides_stay_whole(tokenizer, tmp_path):
    names = [write(tmp_path / "a.en", ["dogs " * 300]), write(tmp_path / "a.de", ["Hunde. " * 70])]
    store = build(names, tokenizer, tmp_path / "out").train
    assert np.diff(store.shards[0].sentence_offsets).tolist() == [300, 140]


def test_the_number_of_workers_changes_nothing(files, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 20)
    stores = [
        build(files, tokenizer, tmp_path / str(workers), num_workers=workers).train
        for workers in (1, 2)
    ]
    assert stores[0].fingerprint == stores[1].fingerprint
    monkeypatch.undo()
    assert build(files, tokenizer, tmp_path / "whole").train.fingerprint == stores[0].fingerprint


def test_lines_end_in_newlines_alone(tokenizer, tmp_path):
    # U+2028 and a carriage return inside a line divide nothing; a byte order mark is no text.
    source = "\ufeffTwo dogs\u2028play\r\nA\rman sings\x85in\x0cthe park \r\n".encode()
    (tmp_path / "a.en.gz").write_bytes(gzip.compress(source))
    names = [str(tmp_path / "a.en.gz"), write(tmp_path / "a.de", TARGETS[:2])]
    pairs = list(open_pairs(names).pairs())
    assert [pair.source for pair in pairs] == [
        "Two dogs\u2028play",
        "A man sings\x85in\x0cthe park",
    ]
    (tmp_path / "a.de").write_text("\n".join(TARGETS[:2]))  # no end of the last line
    assert [pair.target for pair in open_pairs(names).pairs()] == TARGETS[:2]
    assert [pair.number for pair in pairs] == [1, 2]


def test_both_sides_are_documents_of_a_tokenizer(files):
    assert list(iter_texts([open_pairs(files)])) == [
        text for pair in zip(SOURCES, TARGETS, strict=True) for text in pair
    ]


@pytest.mark.parametrize("lacks", [0, 1])
def test_unequal_numbers_of_lines(files, tokenizer, tmp_path, lacks):
    texts = (SOURCES, TARGETS)[lacks]
    write(tmp_path / "in" / ("a.en", "a.de")[lacks], texts[:-2])
    counts = ("2", "4") if lacks == 0 else ("4", "2")
    with pytest.raises(
        UserError, match=r"a.en has {} lines and .*a.de has {} lines".format(*counts)
    ):
        build(files, tokenizer, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_empty_sides_are_left_out_and_named(files, tokenizer, tmp_path):
    write(tmp_path / "in" / "a.en", ["", *SOURCES, "\x01", "A man", ""])
    write(tmp_path / "in" / "a.de", ["Ein Mann", *TARGETS, "Ein", " \u00a0", ""])
    built = build(files, tokenizer, tmp_path / "out")
    assert texts_of(built.train, tokenizer) == list(zip(SOURCES, TARGETS, strict=True))
    en, de = files
    assert f"since a side is empty: 4 ({en} and {de}, lines 1, 6, 7, ...)" in built.summary()
    write(tmp_path / "in" / "a.en", [""] * 8)
    with pytest.raises(UserError, match="no pair has text on both sides"):
        build(files, tokenizer, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("drop", [False, True])
def test_duplicates(files, tokenizer, tmp_path, monkeypatch, drop):
    monkeypatch.setattr(module, "BLOCK_BYTES", 30)
    again = [*SOURCES, SOURCES[1], SOURCES[0], SOURCES[0]]
    write(tmp_path / "in" / "a.en", again)
    write(tmp_path / "in" / "a.de", [*TARGETS, TARGETS[1], TARGETS[1], TARGETS[0]])
    built = build(files, tokenizer, tmp_path / "out", drop_duplicates=drop)
    en, de = files
    told = f"repeats of earlier pairs: 2 ({en} and {de}, lines 5, 7), "
    assert told + ("left out" if drop else "kept; --drop") in built.summary()
    assert built.train.num_documents == (5 if drop else 7)
    assert texts_of(built.train, tokenizer)[-1][1] == TARGETS[1 if drop else 0]
    told = re.sub(" +", " ", (tmp_path / "out" / "CORPUS.md").read_text())
    assert ("None: neither a filter nor a search for duplicates" in told) != drop
    assert ("| `duplicates` | yes |" in told) == ("| `duplicate` | 2 |" in told) == drop


def test_held_out_pairs_that_are_known_or_swapped(files, tokenizer, tmp_path):
    held = [
        write(tmp_path / "in" / "b.en", [SOURCES[0], "A man in the park"]),
        write(tmp_path / "in" / "b.de", ["Hunde spielen", "Ein Mann im park"]),
    ]
    built = build(files, tokenizer, tmp_path / "out", heldout=[open_pairs(held)])
    assert built.heldout.num_documents == 2
    told = (tmp_path / "out" / "CORPUS.md").read_text()
    assert [told.count(f"| `{name}`") for name in [*files, *held]] == [1] * 4
    summary = built.summary()
    assert "1 of 2 held-out sources are in the training pairs too, for example 'Two dogs" in summary
    assert "held-out targets" not in summary
    assert "swapped" not in summary
    again = build(files, tokenizer, tmp_path / "swapped", heldout=[open_pairs(held[::-1])])
    assert "are the files of --heldout-pairs swapped?" in again.summary()
    both = build(held, tokenizer, tmp_path / "same", heldout=[open_pairs([held[0], held[0]])])
    assert "Warning: 50.0% of the pairs have two equal sides" in both.summary()


def test_pairs_of_one_language_are_not_called_swapped(tokenizer, tmp_path):
    """A hash chose the held-out pairs of the same files, whose two sides look alike."""
    (tmp_path / "in").mkdir()
    lines = [f"{'dogs ' * (1 + n % 40)}{'man ' * (1 + n % 7)}play" for n in range(300)]
    names = [write(tmp_path / "in" / "a", lines), write(tmp_path / "in" / "b", lines[::-1])]
    for rate in (0.05, 0.1, 0.2, 0.3):
        built = build(names, tokenizer, tmp_path / f"{rate}", heldout_rate=rate)
        assert built.heldout.num_documents
        assert "swapped" not in built.summary()


def test_without_held_out_pairs_nothing_is_left_of_them(files, tokenizer, tmp_path):
    for overwrite in (False, True):
        built = build(files, tokenizer, tmp_path / "out", overwrite=overwrite)
        assert built.heldout is None
        assert not (tmp_path / "out" / "heldout").exists()


def test_pairs_are_held_out_by_their_source(tokenizer, tmp_path):
    sources = [f"{'dogs ' * (1 + n % 40)}man" for n in range(400)]  # ten times each
    names = [
        write(tmp_path / "a.en", sources),
        write(tmp_path / "a.de", [f"{'Hunde ' * (1 + n % 60)}Mann" for n in range(400)]),
    ]
    built = build(names, tokenizer, tmp_path / "out", heldout_rate=0.3)
    known, held = (
        {source for source, _ in texts_of(store, tokenizer)}
        for store in (built.train, built.heldout)
    )
    assert not known & held
    assert len(known | held) == 40
    assert built.train.num_documents + built.heldout.num_documents == 400
    assert 40 < built.heldout.num_documents < 240
    text_bytes = sum((tmp_path / name).stat().st_size - 400 for name in ("a.en", "a.de"))
    assert built.text_bytes == built.train.meta["text_bytes"] == text_bytes
    again = build(names, tokenizer, tmp_path / "again", heldout_rate=0.3, drop_duplicates=True)
    assert built.duplicates.count == again.duplicates.count > 0
    stores = (again.train, again.heldout)
    for store in stores:
        assert store.meta["dropped"] == {"duplicate": again.duplicates.count}
    kept = [pair for store in stores for pair in texts_of(store, tokenizer)]
    assert len(set(kept)) == len(kept) == 400 - built.duplicates.count
    assert "held-out sources" not in built.summary()
    assert "held-out targets are in the training pairs too" in built.summary()


def test_no_pair_to_train_on(files, tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"a.de: all pairs are held out; lower heldout_rate, which"):
        build(files, tokenizer, tmp_path / "out", heldout_rate=1 - 1e-9)
    (tmp_path / "in" / "a.de").write_text("\n" * len(SOURCES))
    with pytest.raises(UserError, match=r"a.de: no pair has text on both sides\."):
        build(files, tokenizer, tmp_path / "out", heldout_rate=1 - 1e-9)


def test_targets_that_do_not_come_back(files, tmp_path):
    words = [word.lower() for word in WORDS]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    summary = build(files, load_tokenizer(path), tmp_path / "out").summary()
    assert (
        "Warning: 100.0% of the targets do not come back from their tokens, for example 'Zwei "
        "Hunde spielen' comes back as 'zwei hunde spielen'"
    ) in summary


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=12))
def test_seen_is_a_set(blocks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_RECENT", 4)
        seen, known = module._Seen(), set()
        for block in blocks:
            first = seen.add(np.array(block, np.uint64))
            for value, is_first in zip(block, first.tolist(), strict=True):
                assert is_first == (value not in known)
                known.add(value)


TABLES = {
    "named.tsv": ("de\tid\ten\n" + "".join(
        f"{t}\t{n}\t{s}\n" for n, (s, t) in enumerate(zip(SOURCES, TARGETS, strict=True))
    ), ["en", "de"]),
    "plain.tsv": ("".join(
        f"{s}\t{t}\n" for s, t in zip(SOURCES, TARGETS, strict=True)
    ), ["1", "2"]),
    "lines.jsonl": ("".join(
        json.dumps({"1": s, "2": f"{t}\n"}) + "\n" for s, t in zip(SOURCES, TARGETS, strict=True)
    ), ["1", "2"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_two_columns_of_a_table(files, tokenizer, tmp_path, name):
    content, columns = TABLES[name]
    (tmp_path / name).write_text(content)
    pairs = list(open_pairs([str(tmp_path / name)], columns).pairs())
    assert [pair[1:] for pair in pairs] == list(zip(SOURCES, TARGETS, strict=True))
    assert [pair.number for pair in pairs] == list(
        range(1, 5) if name != "named.tsv" else range(2, 6)
    )
    swapped = build_pairs(
        [open_pairs([str(tmp_path / name)], columns, swap=True)], tokenizer, tmp_path / "out",
        num_workers=1, heldout_rate=0.0,
    )  # fmt: skip
    assert (
        swapped.train.fingerprint == build(files[::-1], tokenizer, tmp_path / "b").train.fingerprint
    )
    (record,) = swapped.train.meta["sources"]
    assert record["columns"] == columns
    assert record["bytes"] == len(content)


def test_a_glob_names_one_table(tmp_path):
    (tmp_path / "a.tsv").write_text("A\tB\n")
    (pair,) = (source := open_pairs([str(tmp_path / "*.tsv")], ["1", "2"])).pairs()
    assert pair == (1, "A", "B")
    assert source.records()[0]["name"] == source.name == str(tmp_path / "a.tsv")


def test_a_parquet_table(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"s": [*SOURCES, None], "t": [*TARGETS, "Ein Mann"], "n": [1, 2, 3, 4, 5]})
    pq.write_table(table, tmp_path / "a.parquet")
    pairs = list(open_pairs([str(tmp_path / "a.parquet")], ["s", "t"]).pairs())
    assert pairs[0][1:] == (SOURCES[0], TARGETS[0])
    assert pairs[4][1:] == ("", "Ein Mann")
    with pytest.raises(UserError, match=r"row 1: the column 'n' holds 1, not text"):
        list(open_pairs([str(tmp_path / "a.parquet")], ["s", "n"]).pairs())


def test_a_data_set_of_tfds(monkeypatch):
    targets = list(TARGETS)

    def rows(name, columns, table):
        assert (name, columns, table.header) == ("tfds:a/b:train", ("pt", "en"), None)
        for number, pair in enumerate(zip(SOURCES, targets, strict=True), 1):
            yield Row(Origin(name, number), pair)

    monkeypatch.setattr(reading, "read_rows", rows)
    source = open_pairs(["tfds:a/b"], ["pt", "en"])
    records = []
    for change in (None, None, "Hunde"):
        targets[3] = change or targets[3]
        assert [pair[1:] for pair in source.pairs()] == list(zip(SOURCES, targets, strict=True))
        records += source.records()
    assert (records[0]["name"], records[0]["examples"]) == ("tfds:a/b:train", 4)
    assert records[0] == records[1]
    assert records[0]["sha256"] != records[2]["sha256"]
    assert open_pairs(["tfds:a/b:validation"], ["pt", "en"]).name == "tfds:a/b:validation"


@pytest.mark.parametrize(
    ("names", "columns", "message"),
    [
        (["a.en"], None, r"two files of lines, or from one table with --columns .* got 1 file"),
        (["a.en", "a.de", "a.fr"], None, "got 3 file"),
        (["a.en", "a.de", "a.fr"], ["1", "2"], "got 3 file"),
        (["a.en", "b.de"], None, r"there is no file b.de. Did you mean a.de"),
        (["a.*", "a.de"], None, r"'a.\*' matches 3 files, such as a.de and a.en"),
        (["a.en", "t.jsonl"], None, "t.jsonl is not a text file.*--columns source=COLUMN"),
        (["a.en", "t.csv"], None, "t.csv is not a text file.*--columns source=COLUMN"),
        (["no.tsv"], ["1", "2"], "there is no file no.tsv"),
        (["t.jsonl"], ["s", "u"], r"t.jsonl, line 1: no column 'u'; there are 's', 't'"),
        (["t.jsonl"], ["s", "t"], r"t.jsonl, line 2: the column 't' holds \[1\], not text"),
    ],
)
def test_names_that_are_no_pairs(tmp_path, monkeypatch, names, columns, message):
    monkeypatch.chdir(tmp_path)
    for name in ("a.en", "a.de", "a.fr"):
        (tmp_path / name).write_text("A\n")
    (tmp_path / "t.jsonl").write_text('{"s": "A", "t": "B"}\n{"s": "A", "t": [1]}\n')
    (tmp_path / "t.csv").write_text("text\nA\n")
    with pytest.raises(UserError, match=message):
        list(open_pairs(names, columns).pairs())


def test_the_verb(files, vocabulary, tmp_path, capsys):
    out = ["--tokenizer", str(vocabulary), "--out", str(tmp_path / "out"), "--num-workers=1"]
    pairs = ["corpus", "--pairs", *files, "--heldout-pairs", *files[::-1]]
    assert cli.main([*pairs, *out]) == 0
    assert "4 pairs" in capsys.readouterr().out
    assert cli.main([*pairs, *out]) == 2
    assert "exists" in capsys.readouterr().err
    assert cli.main([*pairs, *out, "--overwrite", "--swap"]) == 0
    assert open_store(tmp_path / "out" / "train").meta["sources"][0]["name"] == files[1]
    (tmp_path / "out" / "run").mkdir()
    assert cli.main([*pairs, *out, "--overwrite"]) == 2
    assert "holds files of another kind" in capsys.readouterr().err
    for more, message in (
        ([], "give --input for text, or --pairs"),
        (["--input", files[0], "--pairs", *files], "not both"),
        (["--pairs", *files, "--splitter=fast"], "--splitter works only with --input"),
        (["--pairs", *files, "--columns=text=a"], "--columns text works only with --input"),
        (
            ["--pairs", *files, "--columns=source=1,target=2"],
            "--columns source=1,target=2 is for tables",
        ),
        (["--input", files[0], "--swap"], "--swap works only with --pairs"),
        (
            ["--input", files[0], "--heldout-pairs", *files],
            "--heldout-pairs works only with --pairs",
        ),
        ([*pairs[1:], "--heldout-rate=0.1"], "takes them from files; give only one of the two"),
        (["--pairs", *files, "--heldout-rate=1"], "heldout_rate is 1"),
    ):
        assert cli.main(["corpus", *more, *out, "--overwrite"]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["tokenizer", "--out", str(tmp_path / "t")]) == 2
    assert "give --input for text, --pairs" in capsys.readouterr().err


def test_pairs_are_not_written_to_buckets(files, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"gs://bucket/pairs is in a bucket; name a local"):
        build(files, tokenizer, "gs://bucket/pairs")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_tables_of_pairs_are_local(monkeypatch):
    monkeypatch.setattr(reading, "match_files", lambda name: [name])
    with pytest.raises(UserError, match=r"gs://bucket/a\.tsv: a table of pairs must be local"):
        open_pairs(["gs://bucket/a.tsv"], ["en", "de"])
