"""Compressed files of many members or frames: their parts are the whole, and begin at streams."""

import gzip
import json
import random
import struct
import zlib

import hostile_records
import pytest
import zstandard
from made_texts import make_text
from word_tokenizer import WordTokenizer

from bert_jax.data.corpus.build import build_corpora
from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.kinds import text as text_files
from bert_jax.data.corpus.passes import Recipe
from bert_jax.data.corpus.sharded.engine import Engine
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import BadRecord
from bert_jax.files.untrusted import compressed

DOCUMENTS = make_text(200).split("\n\n")
SKIP = ReadOptions(on_bad="skip", most_bad=1.0)
STORED = 1500
"""Bytes to which the tests lower `compressed._STORED`: their files are small."""


def record(name: str, document: str) -> bytes:
    """A document as it stands in a file of this name."""
    if ".jsonl" in name:
        return json.dumps({"text": document}).encode() + b"\n"
    if ".wet" in name:
        return hostile_records.warc_record(document.encode())
    return document.encode() + b"\n\n"


def streams(name: str, documents=DOCUMENTS) -> list[bytes]:
    compress = hostile_records.COMPRESSORS["." + name.rpartition(".")[2]]
    return [compress(record(name, each)) for each in documents]


def written(path, data: bytes, options=SKIP):
    path.write_bytes(data)
    (source,) = resolve_sources([str(path)], options)
    return source


def begins(source, size: int) -> list[int]:
    """Positions at which the parts after the first begin."""
    return [part.part[0] for part in source.divided(size)[1:]]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.wet.gz", "a.txt.gz", "a.jsonl.zst", "a.WET.ZST"])
def test_parts_begin_at_streams(tmp_path, monkeypatch, name):
    if ".wet" in name.lower():
        pytest.importorskip("warcio", reason="warcio is not installed")
    monkeypatch.setattr(compressed, "_STORED", STORED)
    made = streams(name.lower())
    source = written(tmp_path / name, b"".join(made))
    places = {sum(map(len, made[:number])) for number in range(len(made))}
    for size in (300, 1000, source.size // 2, source.size):
        parts = source.divided(size)
        assert [text for part in parts for text in part.texts()] == DOCUMENTS
        assert {*begins(source, size)} <= places
        assert sum(part.size for part in parts) == source.size
        assert len(parts) == 1 if size == source.size else len(parts) > source.size // size // 3
    head = list(source.head(source.size // 10).texts())
    assert head == DOCUMENTS[: len(head)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.wet.gz", "a.txt.gz", "a.jsonl.zst"])
def test_streams_that_are_not_records(tmp_path, monkeypatch, name):
    """Blocks of any bytes are cut only where a record ends with its block; one stream, nowhere."""
    if ".wet" in name:
        pytest.importorskip("warcio", reason="warcio is not installed")
    monkeypatch.setattr(compressed, "_STORED", STORED)
    compress = hostile_records.COMPRESSORS["." + name.rpartition(".")[2]]
    text = b"".join(record(name, each) for each in DOCUMENTS)
    blocks = [compress(text[at : at + 333]) for at in range(0, len(text), 333)]
    source = written(tmp_path / name, b"".join(blocks))
    assert [each for part in source.divided(500) for each in part.texts()] == DOCUMENTS
    source = written(tmp_path / name, compress(text))
    assert source.divided(100) == [source]
    assert list(source.texts()) == DOCUMENTS


@pytest.mark.parametrize("suffix", [".xz", ".bz2"])
def test_other_compressions_stay_whole(tmp_path, suffix):
    source = written(tmp_path / f"a.jsonl{suffix}", b"".join(streams(f"a.jsonl{suffix}")))
    assert source.divided(100) == [source]


def test_an_uncompressed_web_archive_stays_whole(tmp_path):
    data = b"".join(record("a.wet", each) for each in DOCUMENTS)
    source = written(tmp_path / "a.wet", data)
    assert source.divided(100) == [source]


def test_streams_inside_streams_make_no_cut(tmp_path):
    """A member stored as it is may hold whole members, which begin with records, too."""
    pytest.importorskip("warcio", reason="warcio is not installed")
    inner = b"".join(streams("a.wet.gz", DOCUMENTS[:100]))
    assert 10_000 < len(inner) < 65_536 - 500
    packed = hostile_records.warc_record(inner, Content_Type="application/gzip")
    outer = gzip.compress(packed, 0)
    assert inner in outer
    made = [outer, *streams("a.wet.gz")] * 12
    source = written(tmp_path / "a.wet.gz", b"".join(made))
    assert source.size > 2 * compressed._STORED
    places = {sum(map(len, made[:number])) for number in range(len(made))}
    found = begins(source, len(outer))
    assert len(found) > 10
    assert {*found} <= places
    at = len(outer) + sum(map(len, streams("a.wet.gz")))  # the second outer member begins here
    (part,) = source.divided(source.size)
    with (tmp_path / "a.wet.gz").open("rb") as file:
        assert part._cut(file, at + 1000, source.size) == at + len(outer)


def test_magic_bytes_make_no_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "_STORED", STORED)
    rng = random.Random(1)
    made = []
    for _ in range(50):
        extra = b"\x1f\x8b\x08\0" * 9 + gzip.compress(b'{"text": "false"}\n') + rng.randbytes(99)
        body = zlib.compressobj(wbits=-15)
        text = record(".jsonl", rng.choice(DOCUMENTS))
        head = b"\x1f\x8b\x08\x04" + bytes(5) + b"\xff" + struct.pack("<H", len(extra)) + extra
        data = body.compress(text) + body.flush()
        made.append(head + data + struct.pack("<II", zlib.crc32(text), len(text)))
    source = written(tmp_path / "a.jsonl.gz", b"".join(made))
    places = {sum(map(len, made[:number])) for number in range(len(made))}
    found = begins(source, 100)
    assert len(found) > 20
    assert {*found} <= places
    texts = [text for part in source.divided(100) for text in part.texts()]
    assert texts == list(source.texts())
    assert "false" not in texts


def counted(parts) -> tuple[list[str], dict[str, int], int]:
    """Texts of the parts, their bad records by reason, and the number of all records."""
    texts, bad, records = [], {}, 0
    for part in parts:
        texts += part.texts()
        records += part.bad.records
        for reason, count in part.bad.documents.items():
            bad[reason] = bad.get(reason, 0) + count
    return texts, bad, records


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.wet.gz", "a.txt.gz", "a.jsonl.zst"])
def test_damage_at_a_cut_is_counted_once(tmp_path, monkeypatch, name):
    if ".wet" in name:
        pytest.importorskip("warcio", reason="warcio is not installed")
    monkeypatch.setattr(compressed, "_STORED", STORED)
    rng = random.Random(2)
    made = streams(name)
    for number in (40, 41, 80, *rng.sample(range(100, 200), 5)):
        made[number] = hostile_records.damaged(made[number], rng)
    source = written(tmp_path / name, b"".join(made))
    whole = counted([source])
    assert whole[1]["damaged"] > 4
    many = 0
    for size in (*range(source.size // 3, source.size // 2, 997), 500, 2000):
        parts = source.divided(size)
        assert counted(parts) == whole, size
        many += len(parts) > 2
    assert many > 2


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("a.jsonl.gz", gzip.compress(random.Random(5).randbytes(30_000), 0)),
        ("a.jsonl.zst", zstandard.compress(random.Random(5).randbytes(30_000))),
    ],
)
def test_streams_behind_one_that_is_cut_are_read(tmp_path, name, first):
    """They are shorter than the missing bytes, so the first decoder takes them all."""
    made = streams(name)[:10]
    assert len(b"".join(made)) < len(first) // 2
    source = written(tmp_path / name, first[: len(first) // 2] + b"".join(made))
    texts, bad, _ = counted([source])
    assert texts == DOCUMENTS[:10]
    assert bad["damaged"] == 1


def test_a_frame_of_a_large_window(tmp_path):
    """As of `zstd --long=28`; above a window of 128 MiB the decoder refuses a frame by default."""
    options = zstandard.ZstdCompressionParameters(window_log=28)
    frame = zstandard.ZstdCompressor(compression_params=options).compressobj()
    text = record(".jsonl", DOCUMENTS[0])
    source = written(tmp_path / "a.jsonl.zst", frame.compress(text) + frame.flush())
    assert list(source.texts()) == DOCUMENTS[:1]


def test_an_error_names_a_place_that_can_be_found(tmp_path):
    texts = [*DOCUMENTS[:150], "x" * 100, *DOCUMENTS[150:]]
    made = streams("a.jsonl.gz", texts)
    made[150] = gzip.compress(b"no json\n")
    source = written(tmp_path / "a.jsonl.gz", b"".join(made), ReadOptions())
    begin = max(at for at in begins(source, 2000) if at <= sum(map(len, made[:150])))
    with pytest.raises(BadRecord, match=r"a\.jsonl\.gz, line \d+ after byte [\d,]+: not") as caught:
        counted(source.divided(2000))
    number, place = f"{caught.value}".split("line ")[1].split(":")[0].split(" after byte ")
    assert int(place.replace(",", "")) == begin
    rest = gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()[begin:])
    assert rest.split(b"\n")[int(number) - 1] == b"no json"


def test_only_bytes_near_the_cuts_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "_STORED", STORED)
    monkeypatch.setattr(text_files, "_STREAM_BLOCKS", (1 << 11, 1 << 13))
    rng, read = random.Random(4), []
    lines = [record(".jsonl", rng.randbytes(1 << 9).hex()) for _ in range(60)]
    source = written(tmp_path / "a.jsonl.gz", b"".join(map(gzip.compress, lines)))
    find = compressed.next_start
    monkeypatch.setattr(
        text_files, "next_start", lambda data, *how: read.append(len(data)) or find(data, *how)
    )
    assert len(source.divided(source.size // 3)) == 3
    assert sum(read) <= 2 * sum(text_files._STREAM_BLOCKS) < source.size
    read.clear()
    source = written(tmp_path / "b.jsonl.gz", gzip.compress(b"".join(lines)))
    assert source.divided(source.size // 10) == [source]  # the first cut is looked for, no other
    assert sum(read) == sum(text_files._STREAM_BLOCKS)


def test_one_task_and_many_make_the_same_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "_STORED", STORED)
    from test_shards import documents

    data = b"".join(streams("a.jsonl.zst"))
    frame = zstandard.ZstdCompressor().compress(record(".jsonl", DOCUMENTS[0]))  # no checksum
    (tmp_path / "a.jsonl.zst").write_bytes(data + frame)
    stores = []
    for number, shard_bytes in enumerate((1 << 30, 5000)):
        (built,) = build_corpora(
            [str(tmp_path / "a.jsonl.zst")], Recipe(WordTokenizer(), heldout_rate=0.1),
            tmp_path / f"{number}", engine=Engine(1), shard_bytes=shard_bytes, progress=False,
        )  # fmt: skip
        stores.append(built)
    one, many = stores
    assert len(one.train.counts) == 1
    assert len(many.train.counts) > 3
    for part in ("train", "heldout"):
        assert documents(getattr(one, part)) == documents(getattr(many, part))
