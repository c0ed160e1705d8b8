"""Files that unpack, nest or repeat beyond all bounds, in processes with bounded memory."""

import gzip
import json
import lzma
import zlib
from pathlib import Path

import pytest
import zstandard
from bounded_child import run_bounded

from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS

TOKENIZER = "from bert_jax.tokenization.load import load_tokenizer; import bert_jax.tokenization.load, bert_jax.tokenization.sentencepiece"  # noqa: E501
SOURCES = "from bert_jax.data.corpus.sources import resolve_sources; import zstandard"
READ = """
for source in resolve_sources([sys.argv[1]]):
    count = sum(1 for _ in source.texts())
    print("documents", count)
"""
GOOD = "\n".join(SPECIAL_TOKENS).encode() + b"\n"


def test_ten_million_lines(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes(GOOD + b"a\n" * 10_000_000)
    told = run_bounded("load_tokenizer(sys.argv[1])", path, imports=TOKENIZER, extra=256 << 20)
    assert "more than 1,000,000 lines" in told
    path.write_bytes(GOOD + b"a token\n" * 10_000_000)
    told = run_bounded("load_tokenizer(sys.argv[1])", path, imports=TOKENIZER, extra=256 << 20)
    assert "larger than 67,108,864 bytes" in told


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "a.model"])
def test_a_tokenizer_of_a_terabyte(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 40)  # sparse
    told = run_bounded(
        "load_tokenizer(sys.argv[1])", tmp_path / name, imports=TOKENIZER, extra=256 << 20
    )
    assert "larger than" in told


def test_long_token(tmp_path):
    (tmp_path / "vocab.txt").write_bytes(GOOD + b"ok\n" + b"x" * 1001 + b"\n")
    with pytest.raises(UserError, match=r"vocab\.txt, line 7: a token of 1,001 characters"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(GOOD + b"x" * 1000 + b"\n")
    assert load_tokenizer(tmp_path).vocab_size == 6
    (tmp_path / "tokenizer_config.json").write_text('{"max_input_chars_per_word": 1001}')
    with pytest.raises(UserError, match="chars_per_word is 1001; expected an integer from 1 to"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_ten_thousand_levels_and_long_numbers(tmp_path, name):
    (tmp_path / "vocab.txt").write_bytes(GOOD)
    (tmp_path / name).write_text('{"a":' * 10_000 + "1" + "}" * 10_000)
    with pytest.raises(UserError, match=f"{name}, line 1: JSON nested too deeply"):
        load_tokenizer(tmp_path)
    (tmp_path / name).write_text('{"model": ' + "1" * 5000 + "}")
    with pytest.raises(UserError, match=f"{name}: not JSON .*digits"):
        load_tokenizer(tmp_path)


def test_sixteen_million_pieces(tmp_path):
    (tmp_path / "a.model").write_bytes(b"\x0a\x00" * (1 << 24))
    told = run_bounded(
        "load_tokenizer(sys.argv[1])", tmp_path / "a.model", imports=TOKENIZER, extra=128 << 20
    )
    assert "has more than 1,000,000 pieces" in told


@pytest.mark.parametrize(
    "model",
    [b"\x0a", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\xff" * 100, b"garbage", b"\0",
     b"\x0a\x05abc", b"\x12\xff\xff\xff\xff\x7f", b"\x0b" * 1000, b"\x80" * 1000],
)  # fmt: skip
def test_garbage_models(model):
    with pytest.raises(UserError, match="SentencePiece model"):
        SentencePieceTokenizer(model)


def packed(path: Path, block: bytes, times: int) -> Path:
    """`times` blocks, compressed as the suffix says."""
    if path.suffix == ".zst":
        chunks = zstandard.ZstdCompressor(3).compressobj(size=len(block) * times)
        with open(path, "wb") as file:
            for _ in range(times):
                file.write(chunks.compress(block))
            file.write(chunks.flush())
        return path
    with gzip.open(path, "wb") if path.suffix == ".gz" else lzma.open(path, "wb", preset=0) as out:
        for _ in range(times):
            out.write(block)
    return path


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_one_endless_line(tmp_path, suffix):
    path = packed(tmp_path / f"a.txt{suffix}", b"x" * (1 << 20), 200)
    assert path.stat().st_size < 1 << 20
    told = run_bounded(READ, path, imports=SOURCES, extra=384 << 20)
    assert "line 1" in told
    assert "the limit is 16,777,216" in told


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_endless_blank_lines_stream(tmp_path, suffix):
    path = packed(tmp_path / f"a.txt{suffix}", b"\n" * (1 << 20), 20)
    assert "holds no text" in run_bounded(READ, path, imports=SOURCES, extra=256 << 20)


def test_a_line_of_a_gigabyte(tmp_path):
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(b'{"text": "')
        file.truncate(1 << 30)  # sparse
    told = run_bounded(READ, tmp_path / "a.jsonl", imports=SOURCES, extra=384 << 20)
    assert "line 1: this line has at least 17," in told


def test_an_xz_file_that_asks_for_memory(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}]
    raw = bytearray(lzma.compress(b"text\n", filters=filters))
    raw[16] = 39  # the dictionary: 3.5 GiB
    raw[20:24] = zlib.crc32(raw[12:20]).to_bytes(4, "little")
    (tmp_path / "a.txt.xz").write_bytes(raw)
    told = run_bounded(READ, tmp_path / "a.txt.xz", imports=SOURCES, extra=256 << 20)
    assert "not a sound xz file: Memory usage limit exceeded" in told


def test_deep_values_in_a_json_line(tmp_path):
    path = tmp_path / "a.jsonl"
    for depth in (10, 100, *range(850, 1001), 10_000):  # where the parser's recursion ends
        path.write_text('{"text": ' + "[" * depth + "]" * depth + "}\n")
        (source,) = resolve_sources([str(path)], ReadOptions())
        with pytest.raises(UserError, match=r"line 1: (not JSON: nested|the field 'text' holds)"):
            list(source.texts())


def test_a_line_with_a_hundred_thousand_long_names(tmp_path):
    row = {f"{i:x>150}": 0 for i in range(100_000)}
    (tmp_path / "a.jsonl").write_text(json.dumps(row)[: 16 << 20])
    (source,) = resolve_sources([str(tmp_path / "a.jsonl")], ReadOptions())
    with pytest.raises(UserError, match="no field 'text'") as caught:
        list(source.texts())
    assert len(str(caught.value)) < 2000
