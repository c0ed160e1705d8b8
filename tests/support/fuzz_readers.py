"""Every reader of files, with sound files to damage; run by test_fuzz.py, one process for each.

    echo '["NAME", "DIRECTORY", EXAMPLES]' | python tests/support/fuzz_readers.py

The processes are forks of this one, which imports once what most of them need. Each input lies in
DIRECTORY while it is read: after a crash of native code it is still there.
"""

import contextlib
import copy
import gzip
import io
import json
import lzma
import os
import resource
import signal
import sys
import tarfile
import traceback
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_search_readers as search
import fuzz_task_readers as tasks
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_jax.errors import UserError

MEMORY = 1 << 30
"""Bytes of address space that a reader may need beyond its imports and its sound files."""
SECONDS = 60
"""For one input; a reader that takes longer hangs."""

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "Pack my box with five dozen liquor jugs; the jugs are heavy.\n\nÄpfel und 漢字.",
]
NASTY = [
    b"\0", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80", b"[", b"{", b'"', b"\\", b"\n", b"\r", b",",
    b"[" * 10_000, b'{"a":' * 10_000, b"9" * 5000, b"NaN", b"1e999", b"-", b'"\\ud800"', b"../",
    b"\xef\xbb\xbf", b"\xed\xa0\x80", b" " * 5000, b"\x1f\x8b", b"(\xb5/\xfd", b"\xfd7zXZ\0",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308, float("nan"), float("inf"),
    "", "\0", "\ud800", "x" * 2000, "../../x", [], {}, [[]], [1, 2], {"a": 1}, [None] * 100,
]  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """A reader and files that it accepts.

    Attributes:
        file: the name that an input gets.
        seeds: makes sound files' bytes; puts what else is needed into the directory.
        read: reads the file at a path.
        is_json: the seeds are JSON, of which values are replaced, too.
    """

    file: str
    seeds: Callable[[Path], list[bytes]]
    read: Callable[[Path], object]
    is_json: bool = False


@st.composite
def damaged(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A seed with up to four edits."""
    raw = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        near = st.integers(0, min(len(raw), 400))
        at = draw(st.one_of(st.integers(0, len(raw)), near, near.map(lambda n: len(raw) - n)))
        size = draw(st.sampled_from([1, 2, 4, 8, 30, 512]))
        match draw(st.sampled_from(["flip", "set", "cut", "delete", "insert", "repeat"])):
            case "flip" if at < len(raw):
                raw[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                raw[at : at + size] = draw(st.binary(max_size=size))
            case "cut":
                del raw[at:]
            case "delete":
                del raw[at : at + size]
            case "insert":
                raw[at:at] = draw(st.one_of(st.binary(max_size=9), st.sampled_from(NASTY)))
            case "repeat":
                raw[at:at] = raw[at : at + size] * draw(st.sampled_from([1, 2, 100]))
    return bytes(raw)


@st.composite
def altered(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A JSON seed with a value replaced, removed or put beside it."""
    whole = json.loads(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 3))):
        part = whole
        while True:
            keys = list(part) if isinstance(part, dict) else list(range(len(part)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(part[key], dict | list) and part[key] and draw(st.booleans()):
                part = part[key]
                continue
            match draw(st.sampled_from(["replace", "remove", "add"])):
                case "replace":
                    part[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
                case "remove":
                    del part[key]
                case "add" if isinstance(part, dict):
                    name = draw(st.sampled_from(["", "a", "x" * 600, "../x", "\0"]))
                    part[name] = copy.deepcopy(part[key])
                case _:
                    part.append(copy.deepcopy(part[key]))
            break
    return json.dumps(whole).encode()


def _tokenizer() -> Any:
    from bert_jax.tokenization.training import train_wordpiece

    return train_wordpiece(TEXTS * 5, 120)


def _tokenizer_file(name: str) -> Callable[[Path], list[bytes]]:
    def seeds(root: Path) -> list[bytes]:
        _tokenizer().save(root / "saved")
        if name == "tokenizer_config.json":
            (root / "vocab.txt").write_bytes((root / "saved" / "vocab.txt").read_bytes())
        return [(root / "saved" / name).read_bytes()]

    return seeds


def _use_tokenizer(path: Path) -> None:
    from bert_jax.tokenization.load import load_tokenizer

    config = path.name == "tokenizer_config.json"
    tokenizer = load_tokenizer(path.with_name("vocab.txt") if config else path)
    for ids in tokenizer.encode_batch(TEXTS):
        tokenizer.decode(ids)
    tokenizer.encode(TEXTS[1])


def _fast_tokenizers(_: Path) -> list[bytes]:
    from fast_files import definition

    return [json.dumps(definition(kind)).encode() for kind in ("bpe", "unigram", "pieces")]


def _models(_: Path) -> list[bytes]:
    from bert_jax.tokenization.sentencepiece import train_sentencepiece

    return [
        train_sentencepiece(TEXTS * 5, 330, model=kind, character_coverage=1.0)._model
        for kind in ("unigram", "bpe")
    ]


def _store_file(name: str) -> Callable[[Path], list[bytes]]:
    def seeds(root: Path) -> list[bytes]:
        from bert_jax.data.corpus.build import build_corpus

        (root / "in.txt").write_text(
            "\n\n".join(f"{text} {i}." for i in range(40) for text in TEXTS)
        )
        build_corpus(
            [str(root / "in.txt")], _tokenizer(), root / "built", num_workers=1, progress=False
        )
        (root / "built" / "train").rename(root / "store")
        return [(root / "store" / name).read_bytes()]

    return seeds


def _use_store(path: Path) -> None:
    from bert_jax.data.pairings import DataConfig
    from bert_jax.data.phases import Phase
    from bert_jax.data.pipeline import ExampleStream
    from bert_jax.data.store import open_store

    for verify in (False, True):
        store = open_store(next(p for p in path.parents if p.name == "store"), verify=verify)
    for pairing in ("none", "nsp"):
        stream = ExampleStream(store, DataConfig(pairing=pairing), [Phase(32, 4, 2)])
        stream.batch(1)


def _safetensors(_: Path) -> list[bytes]:
    seeds = []
    for space in (b"", b"   "):
        header = {
            "__metadata__": {"format": "pt"},
            "bert.a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
            "c": {"dtype": "BOOL", "shape": [2, 1], "data_offsets": [26, 28]},
            "d": {"dtype": "I64", "shape": [0, 4], "data_offsets": [28, 28]},
        }
        raw = json.dumps(header).encode() + space
        seeds.append(len(raw).to_bytes(8, "little") + raw + bytes([1] * 28))
    return seeds


def _use_safetensors(path: Path) -> None:
    from bert_jax.files.untrusted.safetensors_file import read_safetensors

    for array in read_safetensors(path).values():
        array.tobytes()


def _flax_weights(_: Path) -> list[bytes]:
    from flax.serialization import msgpack_serialize

    layer = {"kernel": np.ones((2, 3), np.float32), "bias": np.zeros(3, np.float16)}
    tree = {"bert": {"layer": {"0": layer}, "norm": {"scale": np.ones(3, np.float32)}}}
    flat = {"__msgpack_chunked_array__": True, "shape": {"0": 4}, "chunks": {"0": np.ones(4)}}
    return [msgpack_serialize(each) for each in (tree, {"params": tree}, {"a": {"scale": flat}})]


def _use_flax_weights(path: Path) -> None:
    from bert_jax.artefacts.formats.flax_weights import read_flax

    for array in read_flax(path).values():
        array.tobytes()


BUNDLED = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a/b": np.arange(40),
    "a/bc": np.zeros((0, 4), np.float16),
    "z": np.float64(1).reshape(()),
}


def _bundle(name: str) -> Callable[[Path], list[bytes]]:
    def seeds(root: Path) -> list[bytes]:
        from tensor_bundle_writer import write_bundle

        found = []
        for per_block in (2, 100):
            write_bundle(root / "x", BUNDLED, per_block=per_block)
            found.append((root / name).read_bytes())
        return found

    return seeds


def _use_bundle(path: Path) -> None:
    from bert_jax.files.untrusted.tensor_bundle import open_tensor_bundle

    for tensor in open_tensor_bundle(path.with_name("x.index")).values():
        tensor.array.tobytes()


def _use_bundle_unchecked(path: Path) -> None:
    """With any checksum taken for right: else damage goes no further than that."""
    from unittest.mock import ANY, patch

    with (
        patch("bert_jax.files.untrusted.tensor_bundle.masked_crc32c", lambda _: ANY),
        patch("bert_jax.files.untrusted.tensor_bundle.masked_crc32c", lambda _: ANY),
    ):
        _use_bundle(path)


FILES = {"a/b.tsv": b"x\ty\n" * 300, "c" * 120 + "/d": b"", "é": b"\0\xff"}


def _zips(_: Path) -> list[bytes]:
    seeds = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as archive:
            for name, data in FILES.items():
                archive.writestr(name, data)
            archive.writestr("empty/", b"")
        seeds.append(out.getvalue())
    return seeds


def _tars(_: Path) -> list[bytes]:
    seeds = []
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
            for name, data in FILES.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        seeds += [out.getvalue(), gzip.compress(out.getvalue())]
    return seeds


def _extracts(kind: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        import shutil

        from bert_jax.files.untrusted.archives import extract_tar, extract_zip

        target = path.with_name("target")
        try:
            (extract_zip if kind == "zip" else extract_tar)(path, target, max_bytes=1 << 20)
        except UserError:
            assert not target.exists()
            raise
        finally:
            shutil.rmtree(target, ignore_errors=True)
            left = [p.name for p in path.parent.iterdir()]
            assert left == [path.name], left

    return read


def _texts(compress: Callable[[bytes], bytes], *, lines: bool) -> Callable[[Path], list[bytes]]:
    def seeds(_: Path) -> list[bytes]:
        rows = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS)
        plain = (rows if lines else "\n\n".join(TEXTS)).encode() * 3
        return [compress(plain), compress(plain) + compress(plain)]

    return seeds


def _zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def _parquets(_: Path) -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    seeds = []
    for column in (
        pa.array(TEXTS * 3),
        pa.array([b"abc", None]),
        pa.array(TEXTS).dictionary_encode(),
    ):
        for compression in ("none", "snappy", "zstd"):
            out = io.BytesIO()
            pq.write_table(pa.table({"text": column}), out, compression=compression)
            seeds.append(out.getvalue())
    return seeds


def _use_source(path: Path) -> None:
    from bert_jax.data.corpus.sources import resolve_sources

    for source in resolve_sources([str(path)]):
        for document in source.texts():
            document.encode()


def _run_configs(_: Path) -> list[bytes]:
    import dataclasses

    from bert_jax.training.pretrain.config import PretrainConfig

    return [json.dumps({"config": dataclasses.asdict(PretrainConfig())}).encode()]


def _use_run_config(path: Path) -> None:
    from bert_jax.training.pretrain.saves import read_config

    read_config(path.parent)


def _sentence_reader(name: str) -> Reader:
    def seeds(root: Path) -> list[bytes]:
        from safetensors.numpy import save_file

        from bert_jax.artefacts.formats.sentence_transformers import EmbeddingConfig, sentence_files

        map = {"kernel": np.ones((16, 8), np.float32), "bias": np.ones(8, np.float32)}
        vectors = EmbeddingConfig("mean", True, "q: ", "d: ", (8,))
        files = sentence_files(vectors, 16, 32, {"0_tanh": map})
        for path, content in files.items():
            (root / path).parent.mkdir(exist_ok=True)
            if path.endswith(".json"):
                (root / path).write_text(json.dumps(content))
            else:
                save_file(content, root / path)
        return [json.dumps(files[name]).encode()]

    return Reader(name, seeds, _use_sentence_files, True)


def _use_sentence_files(path: Path) -> None:
    from bert_jax.artefacts.formats.sentence_transformers import (
        is_sentence_model,
        read_sentence_files,
        scoring_fields,
    )

    root = path.parent.parent if path.parent.name[:2] in ("1_", "2_") else path.parent
    if is_sentence_model(root):
        read_sentence_files(root)
    scoring_fields(root)


def _rows(*rows: dict[str, Any]) -> Callable[[Path], list[bytes]]:
    return lambda _: [b"".join(json.dumps(row).encode() + b"\n" for row in rows)]


def _use_metrics(path: Path) -> None:
    from bert_jax.training.run.telemetry import read_metrics

    for row in read_metrics(path):
        assert isinstance(row["step"], int)


def _use_events(path: Path) -> None:
    from bert_jax.training.run.events import read_events

    for event in read_events(path):
        assert isinstance(event["kind"], str)


def _records(_: Path) -> list[bytes]:
    from bert_jax.distributed.checkpoint.record import Record

    record = Record(5, {"seed": 0}, {"a": [1.5]}, {}, {"params/w": [[2, 3], "float32", "00c0ffee"]})
    return [json.dumps(record.to_json()).encode()]


def _use_record(path: Path) -> None:
    from bert_jax.distributed.checkpoint.record import RecordFaultError, read_record

    with contextlib.suppress(RecordFaultError):
        read_record(path.parents[1])


def _marks(root: Path) -> list[bytes]:
    files = {"a": [1, zlib.crc32(b"a")]}
    (root / "5").mkdir(exist_ok=True)
    (root / "5" / "a").write_bytes(b"a")
    crc = zlib.crc32(json.dumps(files).encode())
    return [json.dumps({"files": files, "crc32": crc}).encode()]


def _use_mark(path: Path) -> None:
    from bert_jax.distributed.checkpoint.verify import file_fault

    assert isinstance(file_fault(path.parent), str)


def _starts(_: Path) -> list[bytes]:
    from bert_jax.artefacts.saved.runs import Start

    return [json.dumps({"starts": [vars(Start(1.0, 2.0, 0, 3, 3, {"productive": 1.0}))]}).encode()]


def _use_starts(path: Path) -> None:
    from bert_jax.artefacts.saved.runs import read_starts, total_seconds

    total_seconds(read_starts(path))


def _use_asked(path: Path) -> None:
    from bert_jax.infer.records import read_records

    for record in read_records(str(path)):
        assert record.origin.line >= 1
        if record.problem is None:
            json.dumps(record.fields, ensure_ascii=False).encode()
        else:
            assert str(path) in record.problem


READERS = {
    "asked": Reader(
        "asked.jsonl", _rows({"text": "é 漢", "id": 1}, {"tokens": ["a", "b"]}), _use_asked
    ),
    "vocab": Reader("vocab.txt", _tokenizer_file("vocab.txt"), _use_tokenizer),
    "tokenizer": Reader("tokenizer.json", _tokenizer_file("tokenizer.json"), _use_tokenizer, True),
    "tokenizer_config": Reader(
        "tokenizer_config.json", _tokenizer_file("tokenizer_config.json"), _use_tokenizer, True
    ),
    "fast_tokenizer": Reader("tokenizer.json", _fast_tokenizers, _use_tokenizer, True),
    "sentencepiece": Reader("a.model", _models, _use_tokenizer),
    "corpus": Reader("store/corpus.json", _store_file("corpus.json"), _use_store, True),
    "tokens": Reader(
        "store/shards/00000/tokens.bin", _store_file("shards/00000/tokens.bin"), _use_store
    ),
    "sentences": Reader(
        "store/shards/00000/sentence_offsets.bin",
        _store_file("shards/00000/sentence_offsets.bin"),
        _use_store,
    ),
    "documents": Reader(
        "store/shards/00000/document_offsets.bin",
        _store_file("shards/00000/document_offsets.bin"),
        _use_store,
    ),
    "counts": Reader("store/unigram_counts.bin", _store_file("unigram_counts.bin"), _use_store),
    "sentence_modules": _sentence_reader("modules.json"),
    "sentence_settings": _sentence_reader("config_sentence_transformers.json"),
    "sentence_encoder": _sentence_reader("sentence_bert_config.json"),
    "sentence_pooling": _sentence_reader("1_Pooling/config.json"),
    "sentence_dense": _sentence_reader("2_Dense/config.json"),
    "safetensors": Reader("a.safetensors", _safetensors, _use_safetensors),
    "flax weights": Reader("a.msgpack", _flax_weights, _use_flax_weights),
    "bundle_index": Reader("x.index", _bundle("x.index"), _use_bundle_unchecked),
    "bundle_data": Reader("x.data-00000-of-00001", _bundle("x.data-00000-of-00001"), _use_bundle),
    "zip": Reader("a.zip", _zips, _extracts("zip")),
    "tar": Reader("a.tar", _tars, _extracts("tar")),
    "text": Reader("a.txt", _texts(bytes, lines=False), _use_source),
    "jsonl": Reader("a.jsonl", _texts(bytes, lines=True), _use_source),
    "gz": Reader("a.txt.gz", _texts(gzip.compress, lines=False), _use_source),
    "xz": Reader("a.jsonl.xz", _texts(lzma.compress, lines=True), _use_source),
    "zst": Reader("a.txt.zst", _texts(_zstd, lines=False), _use_source),
    "parquet": Reader("a.parquet", _parquets, _use_source),
    "config": Reader("config.json", _run_configs, _use_run_config, True),
    "metrics": Reader(
        "metrics.jsonl",
        _rows({"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": float("nan")}),
        _use_metrics,
    ),
    "events": Reader(
        "events.jsonl",
        _rows({"time": "2026-01-01T00:00:00Z", "kind": "start", "message": "a", "process": 0}),
        _use_events,
    ),
    "record": Reader("5/record/data.json", _records, _use_record, True),
    "verified": Reader("5/verified.json", _marks, _use_mark, True),
    "goodput": Reader("goodput.json", _starts, _use_starts, True),
    "csv": Reader("a.csv", tasks.tables(","), tasks.use_table),
    "tsv": Reader("a.tsv", tasks.tables("\t"), tasks.use_table),
    "columns": Reader("a.conll", tasks.columns, tasks.use_columns),
    "conllu": Reader("a.conllu", tasks.conllu, tasks.use_conllu),
    "trees": Reader("a.conllu", tasks.trees, tasks.use_trees),
    "choices": Reader("a.csv", tasks.choices, tasks.use_choices),
    "token_lists": Reader("tags.jsonl", tasks.token_lists, tasks.use_token_lists),
    "judgements": Reader("qrels/test.tsv", search.judgements, search.use_collection),
    "test_corpus": Reader("corpus.jsonl", search.corpora, search.use_collection),
    "index": Reader("index.json", search.index_records, search.use_index_record, True),
    "squad": Reader("squad.json", tasks.squads, tasks.use_squad, True),
    "huggingface_config": Reader(
        "config.json", tasks.huggingface_configs, tasks.use_huggingface_config, True
    ),
}


def fuzz(name: str, root: Path, examples: int) -> None:
    """Reads `examples` damaged files; anything but a UserError is raised."""
    reader = READERS[name]
    seeds = reader.seeds(root)
    path = root / reader.file
    for seed in seeds:  # sound files are read; also, what reading imports is imported
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(seed)
        reader.read(path)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    inputs = damaged(seeds)
    if reader.is_json:
        inputs = st.one_of(inputs, altered(seeds))

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=examples < 1000,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(raw=inputs)
    def read(raw: bytes) -> None:
        path.write_bytes(raw)
        signal.alarm(SECONDS)  # ends this process
        with contextlib.suppress(UserError):
            reader.read(path)
        signal.alarm(0)

    read()


def serve() -> None:
    """Answers each line of standard input by an exit status; the output is DIRECTORY.output."""
    for line in sys.stdin:
        name, directory, examples = json.loads(line)
        if not (child := os.fork()):
            with open(f"{directory}.output", "w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            code = 1
            try:
                fuzz(name, Path(directory), examples)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
