"""The token store: what is written comes back, and nothing else is accepted."""

import errno
import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from one_shard import StoreWriter

from bert_jax.data import shard as shard_module
from bert_jax.data import store as store_module
from bert_jax.data.shard import token_dtype
from bert_jax.data.store import is_store, open_store
from bert_jax.data.store_writer import ShardWriter, write_manifest
from bert_jax.errors import UserError
from bert_jax.tokenization.special_ids import SpecialIds


class FakeTokenizer:
    """The part of a tokenizer that a store needs."""

    def __init__(self, vocab_size: int = 100, fingerprint: str = "f" * 64):
        self.vocab_size = vocab_size
        self.special_ids = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
        self.fingerprint = fingerprint

    def save(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "tokenizer.json").write_text("{}")


ONE = Path("shards", "00000")
"""Directory of the shard in a store of one."""


def write(path: Path, tokenizer: FakeTokenizer | None = None, blocks=None, meta=None):
    if blocks is None:
        blocks = [([5, 6, 7, 8, 9], [2, 1, 2], [2, 1]), ([5, 5, 5], [3], [1])]
    with StoreWriter(path, tokenizer or FakeTokenizer()) as writer:
        for block in blocks:
            writer.append(*(np.array(part) for part in block))
        return writer.store(**(meta or {}))


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_round_trip(tmp_path):
    store = write(tmp_path / "s", meta={"splitter": "fast"})
    assert store.shards[0].tokens.tolist() == [5, 6, 7, 8, 9, 5, 5, 5]
    assert store.shards[0].sentence_offsets.tolist() == [0, 2, 3, 5, 8]
    assert store.shards[0].document_offsets.tolist() == [0, 2, 3, 4]
    assert store.shards[0].tokens.dtype == np.uint16
    assert isinstance(store.shards[0].tokens, np.memmap)
    assert store.unigram_counts.tolist()[5:10] == [4, 1, 1, 1, 1]
    assert (store.num_tokens, store.num_sentences, store.num_documents) == (8, 4, 3)
    assert store.special_ids == SpecialIds(0, 1, 2, 3, 4)
    assert store.meta["splitter"] == "fast"
    assert names(tmp_path / "s" / "shards") == ["00000"]
    assert (tmp_path / "s" / "tokenizer" / "tokenizer.json").is_file()
    again = open_store(tmp_path / "s", FakeTokenizer(), verify=True)
    assert again.fingerprint == store.fingerprint


def test_fingerprint_depends_on_content_not_on_blocks_or_notes(tmp_path):
    whole = write(tmp_path / "a")
    joined = [([5, 6, 7, 8, 9, 5, 5, 5], [2, 1, 2, 3], [2, 1, 1])]
    assert write(tmp_path / "b", blocks=joined, meta={"x": 1}).fingerprint == whole.fingerprint
    others = [
        [([5, 6, 7, 8, 9, 5, 5, 6], [2, 1, 2, 3], [2, 1, 1])],
        [([5, 6, 7, 8, 9, 5, 5, 5], [2, 2, 1, 3], [2, 1, 1])],
        [([5, 6, 7, 8, 9, 5, 5, 5], [2, 1, 2, 3], [1, 2, 1])],
    ]
    seen = {whole.fingerprint}
    for number, blocks in enumerate(others):
        seen.add(write(tmp_path / f"c{number}", blocks=blocks).fingerprint)
    seen.add(write(tmp_path / "d", FakeTokenizer(fingerprint="e" * 64)).fingerprint)
    assert len(seen) == 5


def test_dtype_follows_vocabulary(tmp_path):
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32
    big = write(tmp_path / "big", FakeTokenizer(70000), [([69999, 5], [2], [1])])
    assert big.shards[0].tokens.dtype == np.uint32
    assert big.shards[0].tokens.tolist() == [69999, 5]
    full = write(tmp_path / "full", FakeTokenizer(65536), [([65535, 5], [2], [1])])
    assert full.shards[0].tokens.tolist() == [65535, 5]


def test_unigram_entropy_leaves_special_tokens_out(tmp_path):
    # 1 is [UNK]: two regular ids with rates 1/4 and 3/4.
    store = write(tmp_path / "s", blocks=[([1, 1, 5, 6, 6, 6], [6], [1])])
    expected = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    assert store.unigram_entropy == pytest.approx(expected, abs=1e-12)
    assert store.unknown_rate == pytest.approx(2 / 6)


@pytest.mark.parametrize("bad", [100, -1, 70000])
def test_id_outside_vocabulary(tmp_path, bad):
    with pytest.raises(UserError, match=f"the id {bad}, but its vocabulary has the ids 0 to 99"):
        write(tmp_path / "s", blocks=[([5, bad], [2], [1])])
    assert names(tmp_path / "s" / "shards") == []


@pytest.mark.parametrize("special", [0, 2, 3, 4])
def test_special_id_in_text(tmp_path, special):
    with pytest.raises(UserError, match=f"special id {special}"):
        write(tmp_path / "s", blocks=[([5, special], [2], [1])])


@pytest.mark.parametrize(
    "block",
    [
        ([5, 6], [1], [1]),
        ([5, 6], [1, 1], [1]),
        ([5, 6], [2, 0], [2]),
        ([5, 6], [2], [1, 0]),
        ([5], [1], []),
    ],
)
def test_lengths_must_add_up(tmp_path, block):
    with pytest.raises(ValueError, match=r"add up|has no|no documents"):
        write(tmp_path / "s", blocks=[block])
    assert names(tmp_path / "s" / "shards") == []


def test_empty_corpus_is_refused(tmp_path):
    with pytest.raises(UserError, match="empty"):
        write(tmp_path / "s", blocks=[])
    assert names(tmp_path / "s" / "shards") == []


def test_a_shard_is_replaced_when_the_new_one_is_complete(tmp_path):
    first = write(tmp_path / "s")
    with pytest.raises(RuntimeError), StoreWriter(tmp_path / "s", FakeTokenizer()):
        raise RuntimeError("a failed rebuild")
    assert open_store(tmp_path / "s", verify=True).fingerprint == first.fingerprint
    assert write(tmp_path / "s", blocks=[([7], [1], [1])]).shards[0].tokens.tolist() == [7]
    assert names(tmp_path / "s" / "shards") == ["00000"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="holds files of another kind"):
        ShardWriter(tmp_path / "thesis", FakeTokenizer())
    assert names(tmp_path / "thesis") == ["thesis.tex"]


def test_a_manifest_that_was_cut_off_leaves_no_trace(tmp_path):
    """Its tokenizer and header lie there, and their digests are not those of the new ones."""
    write(tmp_path / "s")
    (tmp_path / "s" / "corpus.json").write_text("{}")
    (tmp_path / "s" / "tokenizer" / "left").write_text("")
    write(tmp_path / "s")
    open_store(tmp_path / "s", verify=True)
    assert names(tmp_path / "s" / "tokenizer") == ["tokenizer.json"]


def test_killed_writer_leaves_no_shard_and_is_cleaned_up(tmp_path):
    script = f"""
    import os, sys, time
    sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]!r}
    import numpy as np
    from test_store import FakeTokenizer, ShardWriter
    writer = ShardWriter({str(tmp_path / "s")!r}, FakeTokenizer())
    writer.append(np.array([5]), np.array([1]), np.array([1]))
    print("ready", flush=True)
    time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (left,) = names(tmp_path)
    assert left == f"s.tmp-{process.pid}"
    # A living writer's directory is not touched by another.
    with ShardWriter(tmp_path / "s", FakeTokenizer()):
        assert left in names(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with ShardWriter(tmp_path / "s", FakeTokenizer()):
        assert left not in names(tmp_path)
    assert names(tmp_path) == []


def test_full_disk(tmp_path, monkeypatch):
    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    with StoreWriter(tmp_path / "s", FakeTokenizer()) as writer:
        writer._files["tokens"].close()
        monkeypatch.setitem(writer._files, "tokens", Full())
        with pytest.raises(UserError, match="disk is full"):
            writer.append(np.array([5]), np.array([1]), np.array([1]))
    assert names(tmp_path / "s" / "shards") == []


def test_another_tokenizer(tmp_path):
    write(tmp_path / "s")
    with pytest.raises(UserError, match=f"{'f' * 64}.*{'0' * 64}"):
        open_store(tmp_path / "s", FakeTokenizer(fingerprint="0" * 64))


def test_not_a_store(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        open_store(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no corpus\.json"):
        open_store(tmp_path / "empty")
    (tmp_path / "empty" / "corpus.json").write_text('{"format": "other"}')
    with pytest.raises(UserError, match="does not describe"):
        open_store(tmp_path / "empty")
    write(tmp_path / "corpus" / "train")
    with pytest.raises(UserError, match="several token stores"):
        open_store(tmp_path / "corpus")


def test_unknown_version(tmp_path):
    write(tmp_path / "s")
    header = json.loads((tmp_path / "s" / "corpus.json").read_text())
    header["version"] = 99
    (tmp_path / "s" / "corpus.json").write_text(json.dumps(header))
    with pytest.raises(UserError, match="version 99; this bert_jax reads version 3"):
        open_store(tmp_path / "s")


@pytest.mark.parametrize(
    "name", ["tokens", "sentence_offsets", "document_offsets", "unigram_counts"]
)
def test_truncated_or_missing_array(tmp_path, name):
    write(tmp_path / "s")
    file = tmp_path / "s" / ("" if name == "unigram_counts" else ONE) / f"{name}.bin"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(UserError, match=rf"damaged: {name}.bin has {len(data) - 1} bytes"):
        open_store(tmp_path / "s")
    file.unlink()
    with pytest.raises(UserError, match=rf"{name}.bin is missing"):
        open_store(tmp_path / "s")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_tokens", -1),
        ("num_tokens", "8"),
        ("num_documents", 0),
        ("token_dtype", "uint32"),
        ("vocab_size", None),
        ("special_ids", {"pad": 0}),
        ("special_ids", {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 100}),
    ],
)
def test_nonsense_in_header(tmp_path, field, value):
    write(tmp_path / "s")
    header = json.loads((tmp_path / "s" / "corpus.json").read_text())
    header[field] = value
    (tmp_path / "s" / "corpus.json").write_text(json.dumps(header))
    with pytest.raises(UserError, match="damaged"):
        open_store(tmp_path / "s")


@pytest.mark.parametrize(("name", "where"), [("sentence_offsets", 0), ("document_offsets", -1)])
def test_offsets_must_span_the_array(tmp_path, name, where):
    write(tmp_path / "s")
    file = tmp_path / "s" / ONE / f"{name}.bin"
    array = np.fromfile(file, "<i8")
    array[where] += 1
    array.tofile(file)
    with pytest.raises(UserError, match=f"{name}.bin runs from"):
        open_store(tmp_path / "s")


def test_flipped_bit_is_found_by_verify(tmp_path):
    write(tmp_path / "s")
    file = tmp_path / "s" / ONE / "tokens.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 2
    file.write_bytes(data)
    open_store(tmp_path / "s")
    with pytest.raises(UserError, match=r"tokens.bin does not have the digest"):
        open_store(tmp_path / "s", verify=True)


def test_verify_compares_the_fingerprint(tmp_path):
    write(tmp_path / "s")
    header = json.loads((tmp_path / "s" / "corpus.json").read_text()) | {"fingerprint": "0" * 64}
    del header["crc32"]
    (tmp_path / "s" / "corpus.json").write_text(json.dumps(header))
    open_store(tmp_path / "s")
    with pytest.raises(UserError, match=r"does not have the fingerprint in corpus\.json"):
        open_store(tmp_path / "s", verify=True)


def test_is_store(tmp_path):
    assert not is_store(tmp_path)
    write(tmp_path / "s")
    assert is_store(tmp_path / "s")
    assert store_module.VERSION == 3


def test_a_store_with_its_arrays_beside_the_manifest_is_refused(tmp_path):
    """Version 1 had them there, where a store was one shard."""
    write(tmp_path / "s")
    for file in (tmp_path / "s" / ONE).iterdir():
        file.rename(tmp_path / "s" / file.name)
    shutil.rmtree(tmp_path / "s" / "shards")
    header = json.loads((tmp_path / "s" / "corpus.json").read_text()) | {"version": 1}
    (tmp_path / "s" / "corpus.json").write_text(json.dumps(header))
    assert is_store(tmp_path / "s")
    with pytest.raises(UserError, match=r"version 1; this bert_jax reads version 3\. Build the"):
        open_store(tmp_path / "s")


def rewrite(path: Path, name: str, dtype: str, change) -> None:
    array = np.fromfile(path / f"{name}.bin", dtype)
    change(array)
    array.tofile(path / f"{name}.bin")


@pytest.mark.parametrize("name", ["sentence", "document"])
@pytest.mark.parametrize("value", [0, 99, -5, 3])
def test_offsets_rise(tmp_path, monkeypatch, name, value):
    store = write(tmp_path / "s")
    last = len(getattr(store.shards[0], f"{name}_offsets")) - 2

    def change(array):
        array[last] = value if value != 3 else array[last - 1]

    rewrite(tmp_path / "s" / ONE, f"{name}_offsets", "<i8", change)
    with pytest.raises(UserError, match=rf"damaged: {name}_offsets.bin: .* is followed by"):
        open_store(tmp_path / "s")
    # Of a large store only the beginning is looked at, unless asked.
    monkeypatch.setattr(shard_module, "_CHECKED_OFFSETS", last)
    monkeypatch.setattr(shard_module, "_CHECK_BLOCK", 1)
    open_store(tmp_path / "s")
    with pytest.raises(UserError, match=rf"damaged: {name}_offsets.bin: .* is followed by"):
        open_store(tmp_path / "s", verify=True)


def test_counts_whose_sum_wraps_around(tmp_path):
    write(tmp_path / "s")

    def change(array):
        array[10:14] = 1 << 62

    rewrite(tmp_path / "s", "unigram_counts", "<i8", change)
    with pytest.raises(UserError, match="adds up to 18446744073709551624, not 8"):
        open_store(tmp_path / "s")


def test_verify_finds_ids_outside_the_vocabulary_whatever_the_fingerprint_says(tmp_path):
    write(tmp_path / "s")

    def change(array):
        array[3] = 100

    rewrite(tmp_path / "s" / ONE, "tokens", "<u2", change)
    with pytest.raises(UserError, match=r"tokens.bin has the id 100 at position 3, but"):
        open_store(tmp_path / "s", verify=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": 1, "format": 2}', "'format' occurs twice"),
        (b'{"a": ' * 10_000, "nested too deeply"),
        (b"{\0}", "NUL"),
        (b"", "empty"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_header_that_is_no_json(tmp_path, content, message):
    write(tmp_path / "s")
    (tmp_path / "s" / "corpus.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"damaged: .*corpus.json.*{message}"):
        open_store(tmp_path / "s")


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", 1 << 40), ("num_tokens", 1 << 62), ("num_tokens", True), ("fingerprint", 1),
     ("tokenizer_fingerprint", None), ("special_ids", [0, 1, 2, 3, 4])],
)  # fmt: skip
def test_header_out_of_bounds(tmp_path, field, value):
    write(tmp_path / "s")
    header = json.loads((tmp_path / "s" / "corpus.json").read_text())
    header[field] = value
    (tmp_path / "s" / "corpus.json").write_text(json.dumps(header))
    with pytest.raises(UserError, match=r"damaged: corpus\.json"):
        open_store(tmp_path / "s")


def test_vocabulary_beyond_the_limit(tmp_path, monkeypatch):
    write(tmp_path / "s")
    monkeypatch.setattr(store_module, "MAX_VOCAB", 99)
    with pytest.raises(UserError, match="vocab_size is 100; it must be 1 to 99"):
        open_store(tmp_path / "s")


BLOCKS = [([5, 6, 7, 8, 9], [2, 1, 2], [2, 1]), ([5, 5, 5], [3], [1]), ([6, 6], [1, 1], [1, 1])]


def write_shards(path: Path, blocks=BLOCKS, tokenizer: FakeTokenizer | None = None, **meta):
    """A store of one shard a block."""
    tokenizer = tokenizer or FakeTokenizer()
    entries = []
    for number, block in enumerate(blocks):
        with ShardWriter(path / "shards" / f"{number:05}", tokenizer) as writer:
            writer.append(*(np.array(part) for part in block))
            entries.append(writer.finish())
    write_manifest(path, entries, tokenizer, **meta)
    return open_store(path)


def test_shards_round_trip(tmp_path):
    store = write_shards(tmp_path / "s", splitter="fast")
    assert is_store(tmp_path / "s")
    assert names(tmp_path / "s") == ["corpus.json", "shards", "tokenizer", "unigram_counts.bin"]
    assert (store.num_tokens, store.num_sentences, store.num_documents) == (10, 6, 5)
    assert [shard.tokens.tolist() for shard in store.shards] == [block[0] for block in BLOCKS]
    assert store.shards[1].sentence_offsets.tolist() == [0, 3]
    assert store.unigram_counts.tolist()[5:10] == [4, 3, 1, 1, 1]
    assert store.meta["splitter"] == "fast"
    assert open_store(tmp_path / "s", verify=True).fingerprint == store.fingerprint
    # The order of the shards is part of the store; what else is in the manifest is not.
    other = write_shards(tmp_path / "o", BLOCKS[::-1])
    assert other.fingerprint != store.fingerprint
    assert write_shards(tmp_path / "n").fingerprint == store.fingerprint


def test_fingerprints_are_what_they_were(tmp_path):
    """Run records hold them: they outlive the versions of the format."""
    tokenizer = FakeTokenizer()
    for blocks, begin in ((BLOCKS[:1], "cac77ed9a3825c67"), (BLOCKS, "b277264a60a3e8d7")):
        assert write_shards(tmp_path / begin, blocks, tokenizer).fingerprint.startswith(begin)


def test_opening_looks_at_no_shard(tmp_path):
    write_shards(tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / "shards" / "00001")
    store = open_store(tmp_path / "s")
    assert store.shards[2].num_tokens == 2
    with pytest.raises(UserError, match=r"shard 00001 of the token store .*/s is damaged: .*miss"):
        store.shards[1]


@pytest.mark.parametrize("damage", ["cut", "missing", "flipped", "swapped"])
def test_a_damaged_shard_is_named(tmp_path, damage):
    write_shards(tmp_path / "s")
    shard = tmp_path / "s" / "shards" / "00001"
    data = bytearray((shard / "tokens.bin").read_bytes())
    message = {
        "cut": r"tokens.bin has 5 bytes, corpus.json asks for 6",
        "missing": r"tokens.bin is missing",
        "flipped": r"tokens.bin does not have the digest",
        "swapped": r"tokens.bin does not have the digest",
    }[damage]
    if damage == "cut":
        (shard / "tokens.bin").write_bytes(data[:-1])
    elif damage == "missing":
        (shard / "tokens.bin").unlink()
    elif damage == "flipped":
        data[0] ^= 2
        (shard / "tokens.bin").write_bytes(data)
    else:
        shutil.rmtree(shard)
        write_shards(tmp_path / "o", [([7, 7, 7], [3], [1])])
        shutil.move(tmp_path / "o" / "shards" / "00000", shard)
    match = rf"shard 00001 of the token store .*/s is damaged: .*{message}.*Copy .*/shards/00001"
    with pytest.raises(UserError, match=match):
        open_store(tmp_path / "s", verify=True)
    if damage != "flipped":
        with pytest.raises(UserError, match=match):
            open_store(tmp_path / "s").shards[1]


def test_a_manifest_of_shards_that_do_not_belong_together(tmp_path):
    with pytest.raises(UserError, match="empty"):
        write_shards(tmp_path / "s", [])
    store = write_shards(tmp_path / "s")
    there = [(tmp_path / "s" / "shards" / f"{n:05}" / "unigram_counts.bin") for n in range(3)]
    counts = [file.read_bytes() for file in there]
    for wrong in ([None, *counts[1:]], counts[::-1]):
        with pytest.raises(UserError, match=r"shard 00000 of .* is damaged: unigram_counts.bin"):
            write_manifest(tmp_path / "s", store.counts, FakeTokenizer(), wrong)
    there[1].unlink()
    with pytest.raises(UserError, match=r"shard 00001 of .* is damaged: unigram_counts.bin"):
        write_manifest(tmp_path / "s", store.counts, FakeTokenizer())


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["shards"][1].update(name="../x"),
        lambda header: header["shards"][1].update(name="00000"),
        lambda header: header["shards"][1].update(num_tokens=4),
        lambda header: header["shards"][1].pop("sha256"),
        lambda header: header["shards"][1]["crc32c"].pop("unigram_counts"),
        lambda header: header["shards"].__setitem__(1, "00001"),
        lambda header: header["shards"].clear(),
        lambda header: header.update(shards=7),
        lambda header: header.pop("shards"),
    ],
)
def test_nonsense_about_shards(tmp_path, change):
    write_shards(tmp_path / "s")
    header = json.loads((tmp_path / "s" / "corpus.json").read_text())
    change(header)
    (tmp_path / "s" / "corpus.json").write_text(json.dumps(header))
    with pytest.raises(UserError, match=r"damaged: corpus\.json"):
        open_store(tmp_path / "s")


def test_few_shards_stay_open(tmp_path):
    write_shards(tmp_path / "s")
    shards = open_store(tmp_path / "s", num_open=2).shards
    first = shards[0]
    assert shards[0] is first
    assert [shard.num_tokens for shard in shards] == [5, 3, 2]
    assert shards[2] is shards[2]
    again = shards[0]
    assert again is not first
    assert again.tokens.tolist() == first.tokens.tolist()
