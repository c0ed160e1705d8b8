"""A flipped bit in what is read again changes no tensor, id or answer without an error."""

import dataclasses
import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from adapted_models import adapted
from asked_models import random_model
from export_models import model_of
from small_run import small_config
from word_tokenizer import WordTokenizer

from bert_jax.artefacts.exchange import orbax_export, peft, stablehlo
from bert_jax.artefacts.exchange.exported_files import write_huggingface, write_json
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.config.mapping import to_dict
from bert_jax.data.store import open_store
from bert_jax.data.store_writer import ShardWriter, write_manifest
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.reading import DamagedCheckpointError
from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.errors import UserError
from bert_jax.files.checks import DIGESTS, check_recorded, digests_of
from bert_jax.infer.forward import on_device
from bert_jax.infer.search.index import Index, write_index
from bert_jax.model.embedding import EmbeddingConfig
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.training import train_bytelevel
from bert_jax.training.pretrain.settings import objective_of
from bert_jax.training.workdir import begin_workdir


def store(path: Path, words: WordTokenizer, shards: int) -> None:
    numbers = np.random.default_rng(0)
    entries = []
    for n in range(shards):
        with ShardWriter(path / "shards" / f"{n}", words) as writer:
            writer.append(
                numbers.integers(5, words.vocab_size, 400), np.full(40, 10), np.full(8, 5)
            )
            entries.append(writer.finish())
    write_manifest(path, entries, words)


def run(path: Path, files: Path) -> None:
    """A run that has saved once, with a tokenizer of one file, which nothing else repeats."""
    config = small_config().with_vocabulary(load_tokenizer(files).vocab_size)
    begin_workdir(path, config, files)
    params = objective_of(config).init(jax.random.key(0))
    checkpoints = Checkpoints(path / "checkpoints", Retention(keep=9))
    checkpoints.save_last(3, Updated(params), read_back=True, config=to_dict(config), extra={})
    checkpoints.close()


class Updated(NamedTuple):
    """Parameters alone, of the state of a run."""

    params: Any


def model(saved: Any) -> tuple[Any, ...]:
    leaves = jax.tree_util.tree_leaves_with_path(saved.params)
    return (
        saved.config, saved.embedding, saved.max_length, saved.tokenizer.fingerprint,
        None if saved.outputs is None else saved.outputs,
        [(f"{path}", np.asarray(leaf).tobytes()) for path, leaf in leaves],
    )  # fmt: skip


@functools.cache
def small() -> Any:
    return on_device(random_model("pretrained"))


def content(path: Path) -> Any:
    """All that a reader of an artefact takes from its files."""
    if path.name == "index":
        index = Index(path)
        index.check_model(small())  # as the verb does
        vectors = np.eye(index.dimensions, dtype=np.float32)[:4]
        return index.search(40, words=["the", "cat", "sat 5", "1 2"], vectors=vectors)
    if (path / "corpus.json").is_file():
        found = open_store(path)
        arrays = [
            [np.array(each).tolist() for each in (s.tokens, s.sentence_offsets, s.document_offsets)]
            for s in found.shards
        ]
        files = [file.read_bytes() for file in sorted((path / "tokenizer").iterdir())]
        same = (found.special_ids, found.vocab_size, found.fingerprint, found.is_pairs)
        return same, found.unigram_counts.tolist(), arrays, files
    if path.name in ("run", "adapter"):
        return model(read_model(path))
    check_recorded(path, "sha256", DIGESTS)  # as `lineage` does: no reader of ours has the rest
    return None if (path / "params").is_dir() else model(read_model(path))


KINDS = (
    "huggingface", "sentence-transformers", "stablehlo", "orbax", "adapter", "run", "shard",
    "shards", "index",
)  # fmt: skip


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("artefacts")
    saved = model_of("class")
    low_rank = adapted(saved, "query", "value")
    vectors = dataclasses.replace(
        model_of("pretraining"), embedding=EmbeddingConfig(query_prefix="q: ")
    )
    written = {
        "huggingface": (write_huggingface, saved), "stablehlo": (stablehlo.write, saved),
        "sentence-transformers": (write_huggingface, vectors), "orbax": (orbax_export.write, saved),
        "adapter": (peft.write, low_rank),
    }  # fmt: skip
    for kind, (write, one) in written.items():
        (root / kind).mkdir()
        write(one, root / kind)
        digests = {"sha256": digests_of(root / kind, "sha256")}
        write_json(root / kind / "parity.json", digests | {DIGESTS: digests_of(root / kind)})
    (root / "base").mkdir()
    write_huggingface(peft.without_adapter(low_rank), root / "base")
    (root / "adapter" / "base").symlink_to(root / "base")
    store(root / "shard", WordTokenizer(60), 1)
    store(root / "shards", WordTokenizer(60), 3)
    train_bytelevel(["the cat sat on the mat", "a dog ran"] * 9, 280).save(root / "bytes")
    run(root / "run", root / "bytes")
    passages = [
        {"id": f"{n}", "passage": 1, "source": "file", "text": f"the cat sat {n}"}
        for n in range(60)
    ]
    write_index(root / "index", small(), root / "huggingface", passages)
    return root


def files_of(artefact: Path) -> list[Path]:
    # Nothing is read of a README, nor of the counts of a shard once the manifest is there.
    return [path for path in sorted(artefact.rglob("*")) if path.is_file() and path.stat().st_size]


def flip(artefacts: Path, tmp_path: Path, kind: str, chance: random.Random) -> str:
    """Flip a bit of a copy; return what changed the content without an error."""
    copy = tmp_path / kind
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(artefacts / kind, copy, symlinks=True)
    before = content(copy)
    file = chance.choice(files_of(copy))
    data = bytearray(file.read_bytes())
    place, bit = chance.randrange(len(data)), chance.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    try:
        after = content(copy)
    except (UserError, DamagedCheckpointError):
        return ""
    return "" if after == before else f"{file.relative_to(tmp_path)}, bit {bit} of byte {place}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_found(artefacts, tmp_path, kind):
    chance = random.Random(kind)
    assert not [found for _ in range(3) if (found := flip(artefacts, tmp_path, kind, chance))]


@pytest.mark.slow  # 200 flips, each followed by a reading of the whole artefact
def test_of_200_flipped_bits_none_changes_anything(artefacts, tmp_path):
    chance = random.Random(27)
    kinds = [KINDS[n % len(KINDS)] for n in range(200)]
    assert not [found for kind in kinds if (found := flip(artefacts, tmp_path, kind, chance))]


def test_a_changed_file_is_named_with_what_to_do(artefacts, tmp_path):
    copy = tmp_path / "edited"
    shutil.copytree(artefacts / "huggingface", copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({**config, "id2label": {"0": "x", "1": "y", "2": "z"}})
    )
    with pytest.raises(
        UserError, match=r"config\.json is not the file .* delete the lines of conf"
    ):
        read_model(copy)
    record = json.loads((copy / "parity.json").read_text())
    (copy / "parity.json").write_text(json.dumps({"sha256": record["sha256"]}))  # as of before
    with pytest.raises(UserError, match=r"config\.json is not the file that parity\.json"):
        read_model(copy)
    del record["sha256"]["config.json"]
    (copy / "parity.json").write_text(json.dumps({"sha256": record["sha256"]}))
    assert read_model(copy).outputs.labels == ("x", "y", "z")


def test_a_run_begins_with_the_tokenizer_of_its_corpus(artefacts, tmp_path):
    files = artefacts / "bytes"
    with pytest.raises(UserError, match="is not the tokenizer of its corpus"):
        begin_workdir(tmp_path / "other", small_config(), files, tokenizer="another")
    assert not (tmp_path / "other" / "tokenizer").exists()


def test_a_run_whose_tokenizer_was_changed(artefacts, tmp_path):
    """A sound one that gives other ids, as a flipped bit can make it."""
    copy = tmp_path / "run"
    shutil.copytree(artefacts / "run", copy)
    file = copy / "tokenizer" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"][4]["lstrip"] ^= True
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="run/tokenizer differs from its fingerprint in config"):
        read_model(copy)
