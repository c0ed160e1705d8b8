"""Every format, and what each says about bad input."""

import gzip
import hashlib
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import zstandard

from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError
from bert_jax.files.untrusted import compressed

TEXT = "First paragraph.\nSecond paragraph.\n\n\n  Another document.  \n"
DOCUMENTS = ["First paragraph.\nSecond paragraph.", "Another document."]


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zst}


def read(*specs, **options) -> list[str]:
    sources = resolve_sources([str(spec) for spec in specs], ReadOptions(**options))
    return [document for source in sources for document in source.texts()]


def put(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def as_json(*texts: str, field: str = "text") -> str:
    return "".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts)


# Formats


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.replace("\n", "\r\n"),
        TEXT.replace("\n", "\r"),
        "\ufeff" + TEXT,
        TEXT.rstrip(),
        "\n\n" + TEXT + "\n \t \n",
    ],
    ids=["lf", "crlf", "cr", "bom", "no-final-newline", "blank-around"],
)
def test_text(tmp_path, text):
    assert read(put(tmp_path / "a.txt", text)) == DOCUMENTS


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_block_borders(tmp_path, monkeypatch, block, end):
    # Line ends and characters of several bytes fall on the borders of blocks.
    monkeypatch.setattr(compressed, "BLOCK", block)
    text = "Äpfel 汉字 😀.\nzwei\n\ndrei".replace("\n", end)
    assert read(put(tmp_path / "a.txt", text)) == ["Äpfel 汉字 😀.\nzwei", "drei"]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_compressed(tmp_path, suffix, kind):
    text = TEXT if kind == "txt" else as_json(*DOCUMENTS)
    assert read(put(tmp_path / f"a.{kind}{suffix}", COMPRESS[suffix](text.encode()))) == DOCUMENTS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_several_streams_and_padding(tmp_path, suffix):
    half = len(TEXT) // 2
    data = b"".join(COMPRESS[suffix](part.encode()) for part in (TEXT[:half], TEXT[half:]))
    padding = b"" if suffix == ".zst" else b"\0" * 8
    assert read(put(tmp_path / f"a.txt{suffix}", data + padding)) == DOCUMENTS


def test_large_compressed_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "BLOCK", 1000)
    text = "\n\n".join(f"document {n} x{'x' * (n % 50)}" for n in range(3000))
    expected = text.split("\n\n")
    for suffix, compress in COMPRESS.items():
        assert read(put(tmp_path / f"a.txt{suffix}", compress(text.encode()))) == expected


def test_zstd_expands_in_bounded_steps(tmp_path):
    # 1 GiB of zeros in 32 KB: refused as one long line before much of it exists.
    path = put(tmp_path / "bomb.txt.zst", zst(b"\0" * (64 << 20)) * 16)
    with pytest.raises(UserError, match=r"bomb\.txt\.zst, line 1: this line has at least "):
        read(path)


def test_jsonl(tmp_path):
    data = (
        as_json("First paragraph.\n\n Second paragraph.\r\n") + "\n" + as_json("Another document.")
    )
    assert read(put(tmp_path / "a.jsonl", data)) == DOCUMENTS
    assert read(put(tmp_path / "b.ndjson", as_json("x", field="body")), field="body") == ["x"]


def test_jsonl_lone_surrogates_and_nul(tmp_path):
    path = put(tmp_path / "a.jsonl", '{"text": "a\\ud800b \\ud83d\\ude00 c\\u0000d"}\n')
    assert read(path) == ["a\ufffdb 😀 c d"]


def test_line_documents(tmp_path):
    path = put(tmp_path / "a.txt", "One.\n\nTwo.\nThree.\n")
    assert read(path, line_documents=True) == ["One.", "Two.", "Three."]


def test_stray_nul_becomes_space(tmp_path):
    assert read(put(tmp_path / "a.txt", "a\0b" + "c" * 200)) == ["a b" + "c" * 200]


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"text": [DOCUMENTS[0], None, DOCUMENTS[1]], "id": [1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == DOCUMENTS
    with pytest.raises(UserError, match=r"no field 'txet'.*present are text, id.*mean 'text'"):
        read(tmp_path / "a.parquet", field="txet")
    with pytest.raises(UserError, match="holds 1, not text"):
        read(tmp_path / "a.parquet", field="id")
    put(tmp_path / "b.parquet", (tmp_path / "a.parquet").read_bytes()[:-5])
    with pytest.raises(UserError, match="not a sound parquet file"):
        read(tmp_path / "b.parquet")


def test_parquet_with_text_that_is_not_utf8(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    offsets = np.array([0, 2], np.int32)
    column = pa.StringArray.from_buffers(1, pa.py_buffer(offsets), pa.py_buffer(b"a\xff"))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="row 1: the field 'text' is not UTF-8: byte 0xff"):
        read(tmp_path / "a.parquet")


def test_optional_package_missing(tmp_path, monkeypatch):
    import sys

    for name in ("pyarrow", "pyarrow.parquet", "tensorflow_datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"pip install 'bert_jax\[data\]'"):
        read(put(tmp_path / "a.parquet", b"PAR1"))
    with pytest.raises(UserError, match=r"pip install 'bert_jax\[data\]'"):
        read("tfds:glue/cola")


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A data set `bert_jax_text` as tensorflow-datasets lays it down."""
    pytest.importorskip("array_record")
    tfds = pytest.importorskip("tensorflow_datasets")

    class BertJaxText(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.2.3")

        def _info(self):
            features = {"text": tfds.features.Text(), "id": np.int32}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, download):
            return {"train": enumerate({"text": text, "id": 1} for text in [TEXT, "b"])}

        def _generate_examples(self):
            raise NotImplementedError

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    return lambda: BertJaxText(file_format="array_record").download_and_prepare(
        file_format="array_record"
    )


@pytest.mark.filterwarnings("ignore")  # of tensorflow-datasets
def test_tfds(prepared):
    import sys

    with pytest.raises(UserError, match=r"not prepared: .*bert-jax tfds bert_jax_text"):
        read("tfds:bert_jax_text")
    prepared()
    (source,) = resolve_sources(["tfds:bert_jax_text:train"])
    found = list(source.texts())
    assert sorted(found) == sorted(["\n".join(DOCUMENTS), "b"])
    record = source.record()
    assert record["version"] == "1.2.3"
    # A corpus build reads its sources again where the division asks for it.
    assert list(source.texts()) == found
    assert source.record() == record
    assert source.bytes_read == source.size == 2
    with pytest.raises(UserError, match=r"no field 'txt'; .*Did you mean 'text'"):
        read("tfds:bert_jax_text", field="txt")
    with pytest.raises(UserError, match=r"tfds:bert_jax_text:tset: .*Unknown split"):
        read("tfds:bert_jax_text:tset")
    with pytest.raises(UserError, match=r"tfds:nonesuch: .*not found"):
        read("tfds:nonesuch")
    assert "tensorflow" not in sys.modules


def test_tfds_name():
    with pytest.raises(UserError, match="names no data set"):
        read("tfds:")


# Which files


def test_globs_are_sorted_and_files_are_read_once(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        put(tmp_path / name, name)
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert read(tmp_path / "**" / "*.txt") == ["a.txt", "b.txt", "sub/c.txt"]
    assert read(tmp_path / "b.txt", tmp_path / "*.txt") == ["b.txt", "a.txt"]
    monkeypatch.chdir(tmp_path)
    assert read("b.txt", "./b.txt", "*.txt", tmp_path / "a.txt") == ["b.txt", "a.txt"]


def test_nothing_matches(tmp_path):
    put(tmp_path / "books.txt", "x")
    with pytest.raises(UserError, match=r"no file matches .*\*\.text.* which holds books\.txt"):
        read(tmp_path / "*.text")
    with pytest.raises(UserError, match=r"no file bookz\.txt\. Did you mean books\.txt"):
        resolve_from(tmp_path, "bookz.txt")
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "missing" / "*.txt")
    with pytest.raises(UserError, match="no input given"):
        read()


def resolve_from(directory: Path, spec: str):
    import contextlib

    with contextlib.chdir(directory):
        return resolve_sources([spec])


def test_directory(tmp_path):
    put(tmp_path / "a.txt.gz", "x")
    with pytest.raises(UserError, match=r"is a directory; name the files.*\*\*/\*\.txt\.gz"):
        read(tmp_path)


def test_unknown_kind(tmp_path):
    with pytest.raises(UserError, match=r"\.pdf files are not supported. Sources are .txt"):
        read(put(tmp_path / "a.pdf", "x"))
    with pytest.raises(UserError, match=r": \.parquet\.gz files are not supported"):
        read(put(tmp_path / "a.parquet.gz", "x"))


def test_unreadable(tmp_path, monkeypatch):
    path = put(tmp_path / "a.txt", "x")
    (source,) = resolve_sources([str(path)])
    path.unlink()
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: No such file"):
        list(source.texts())


# Bad content


@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff"])
def test_empty(tmp_path, content):
    with pytest.raises(UserError, match=r"a\.txt (is empty|holds no text)"):
        read(put(tmp_path / "a.txt", content))
    with pytest.raises(UserError, match="holds no text"):
        read(put(tmp_path / "a.txt.gz", gzip.compress(content.encode())))
    with pytest.raises(UserError, match="is empty"):
        read(put(tmp_path / "b.txt.gz", b""))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_not_utf8(tmp_path, monkeypatch, end):
    monkeypatch.setattr(compressed, "BLOCK", 16)
    start = ("Grüße.\n" * 30 + "ab").replace("\n", end).encode()
    path = put(tmp_path / "a.txt", start + b"\xe9t\xe9\nmore\n")
    with pytest.raises(UserError, match="line 31: not UTF-8: found 0xe9 at byte 3 of the line"):
        read(path)


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (gzip.compress(b"x", mtime=0), "looks gzip-compressed"),
        (lzma.compress(b"x"), "looks xz-compressed"),
        (zst(b"x" * 100), "looks zstd-compressed"),
        ("Text".encode("utf-16"), "looks like UTF-16"),
        (b"%PDF-1.4\n\xe2\xe3", "looks like a PDF"),
        (b"caf\xe9", "iconv -f WINDOWS-1252"),
    ],
)
def test_not_text(tmp_path, data, hint):
    with pytest.raises(UserError, match=f"line [12]: not UTF-8.*{hint}"):
        read(put(tmp_path / "a.txt", data))


def test_utf16_without_mark(tmp_path):
    with pytest.raises(UserError, match=r"line 1: NUL bytes.*UTF-16"):
        read(put(tmp_path / "a.txt", "Some text\n".encode("utf-16-le")))


@pytest.mark.parametrize("length", [1000, 1001, 5000])
@pytest.mark.parametrize("block", [100, 1 << 20])
@pytest.mark.parametrize("tail", ["", "\n", "\nmore\n"])
def test_long_line(tmp_path, monkeypatch, length, block, tail):
    monkeypatch.setattr(compressed, "BLOCK", block)
    path = put(tmp_path / "a.txt", "short\n" + "x" * length + tail)
    if length == 1000:
        assert len(read(path, max_line_bytes=1000)) == 1
        return
    with pytest.raises(UserError, match=r"a\.txt, line 2: .* has at least .* bytes, but the limit"):
        read(path, max_line_bytes=1000)


@pytest.mark.parametrize("block", [3, 58, 59])  # 3 and 58 divide the places inside and after \r\n
def test_what_follows_a_long_line_is_still_its_document(tmp_path, monkeypatch, block):
    """A line end is cut in two at the end of a block, or not."""
    monkeypatch.setattr(compressed, "BLOCK", block)
    text = "x" * 1100 + "\r\nmore\r\n\r\nnext\r\n"
    options = {"max_line_bytes": 1000, "on_bad": "skip", "most_bad": 1.0}
    assert read(put(tmp_path / "a.txt", text), **options) == ["next"]


def test_hundred_megabyte_line(tmp_path):
    with open(tmp_path / "a.txt", "wb") as file:
        file.truncate(100 << 20)  # sparse: NULs without a line end
    with pytest.raises(UserError, match=r"a\.txt, line 1: this line has at least "):
        read(tmp_path / "a.txt")


def test_long_document(tmp_path):
    """Line ends do not count, nor do the documents before."""
    path = put(tmp_path / "a.txt", "first\n\n" + "a line\n" * 10 + "\n" + " b line \n" * 10)
    assert len(read(path, max_document_chars=60)) == 3
    with pytest.raises(UserError, match=r"a\.txt, line 3: the document that begins here"):
        read(path, max_document_chars=59)
    path = put(tmp_path / "b.txt", "first\n\n\n" + "a line\n" * 9 + "\nb\n" + "b line\n" * 10)
    with pytest.raises(UserError, match=r"b\.txt, line 14: the document that begins here"):
        read(path, max_document_chars=60)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_truncated(tmp_path, suffix):
    data = COMPRESS[suffix](hashlib.sha512(b"1").hexdigest().encode() * 1000)
    for cut in (len(data) - 1, len(data) // 2, 3):
        with pytest.raises(UserError, match=r"a\.txt.* (ends in the middle|is not a sound)"):
            read(put(tmp_path / f"a.txt{suffix}", data[:cut]))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_corrupt(tmp_path, suffix):
    text = "".join(hashlib.sha512(bytes([n])).hexdigest() + "\n" for n in range(256))
    data = bytearray(
        zstandard.ZstdCompressor(write_checksum=True).compress(text.encode())
        if suffix == ".zst"
        else COMPRESS[suffix](text.encode())
    )
    data[len(data) // 2] ^= 0x55
    with pytest.raises(UserError, match="is not a sound"):
        read(put(tmp_path / f"a.txt{suffix}", bytes(data)))
    with pytest.raises(UserError, match="is not a sound"):
        read(put(tmp_path / f"b.txt{suffix}", "plain text"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "line 2: not JSON: .*starts with '{\"text"),
        ("[1, 2]", "line 2: found a JSON array, not an object with a field 'text'"),
        ('"text"', "line 2: found a JSON string"),
        ("null", "line 2: found a JSON null"),
        ('{"txt": "a", "id": 3}', "line 2: no field 'text'; .*are txt, id. Did you mean 'txt'"),
        ("{}", "line 2: no field 'text'; the fields present are none"),
        ('{"text": ["a"]}', r"line 2: the field 'text' holds \['a'\], not text"),
        ('{"text": null}', "line 2: the field 'text' holds None"),
        ("[" * 100_000, "line 2: not JSON"),
    ],
)
def test_bad_json(tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        read(put(tmp_path / "a.jsonl", as_json("fine") + line + "\n"))


# Fingerprints


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_record(tmp_path, suffix):
    data = COMPRESS.get(suffix, bytes)(TEXT.encode())
    path = put(tmp_path / f"a.txt{suffix}", data)
    (source,) = resolve_sources([str(path)])
    list(source.texts())
    digest = hashlib.sha256(data).hexdigest()
    assert source.record() == {"name": str(path), "bytes": len(data), "sha256": digest}
    assert source.bytes_read == source.size == len(data)
