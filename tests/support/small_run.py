"""A corpus of a few thousand words with something to learn, and a run that takes seconds."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from one_shard import StoreWriter

from bert_jax.config.mapping import build
from bert_jax.data.store import TokenStore
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.steps.state import abstract_state

VOCAB_SIZE = 64


TOKENIZER = WordPieceTokenizer([*SPECIAL_TOKENS, *(str(i) for i in range(5, VOCAB_SIZE))])
"""Words that mean nothing."""


def write_store(path: Path, num_documents: int, seed: int) -> TokenStore:
    """Sentences in which each token follows from the one before, most of the time."""
    random = np.random.default_rng(seed)
    with StoreWriter(path, TOKENIZER) as writer:
        for _ in range(num_documents):
            lengths = random.integers(4, 12, size=random.integers(4, 9))
            tokens = random.integers(5, VOCAB_SIZE, size=lengths.sum())
            for i in range(1, len(tokens)):
                if random.random() < 0.7:
                    tokens[i] = 5 + (tokens[i - 1] * 7) % 23
            writer.append(tokens, lengths, np.array([len(lengths)]))
        return writer.store()


def write_corpus(path: Path) -> Corpus:
    return Corpus(write_store(path / "train", 150, 0), write_store(path / "heldout", 20, 1))


def small_config(**changes: Any) -> PretrainConfig:
    """12 steps over a phase change, with dropout, accumulation and evaluation.

    Args:
        **changes: by dotted name with __ for the dot, such as `training__num_steps=3`.
    """
    sections: dict[str, Any] = {
        "model": {
            "num_positions": 64,
            "hidden_dim": 32,
            "num_layers": 2,
            "num_heads": 2,
            "mlp_dim": 64,
            "scan_unroll": 1,  # half the compile time
        },
        "training": {
            "num_steps": 12,
            "phases": [
                {"length": 32, "batch_size": 16, "share": 0.6},
                {"length": 64, "batch_size": 16, "share": 0.4},
            ],
            "accumulation": 2,
            "eval_every_steps": 4,
            "eval_rows": 40,
            "log_every_steps": 3,
        },
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 3},
        "checkpoint": {"save_every_steps": 5, "keep": 2},
        "seed": 7,
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            sections.setdefault(section, {})[field] = value
        else:
            sections[section] = value
    return build(PretrainConfig, sections)


def snapshot(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def fingerprint(workdir: Path, config: PretrainConfig, corpus: Corpus) -> dict[str, str]:
    """SHA-256 of the newest state and of the metrics that no clock has a part in."""
    config = config.with_vocabulary(corpus.train.vocab_size)
    mesh = make_mesh(config.mesh)
    checkpoints = Checkpoints(workdir / "checkpoints", Retention(keep=9))
    restored = checkpoints.restore(abstract_state(step_config(config, corpus), mesh))
    checkpoints.close()
    assert restored is not None
    hashes = {"step": str(restored.step)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(restored.state):
        content = hashlib.sha256(np.asarray(leaf).tobytes())
        hashes[jax.tree_util.keystr(path)] = content.hexdigest()
    rows = [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for row in read_metrics(workdir / "metrics.jsonl")
    ]
    hashes["metrics"] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return hashes
