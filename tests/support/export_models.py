"""Tiny models of each kind with vocabularies of the proof's own texts."""

import dataclasses
from functools import lru_cache
from typing import Any

from small_saved import MODEL, small_saved

from bert_jax.artefacts.exchange.proof import PROOF_TEXTS
from bert_jax.artefacts.formats.huggingface_files import TaskOutputs
from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.tokenization.sentencepiece import train_sentencepiece
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.tokenization.wordpiece import WordPieceOptions, WordPieceTokenizer

KINDS = (
    "pretraining", "mlm", "encoder", "bare", "class", "classes", "one of classes", "score", "tags",
    "span", "relu", "gelu",
)  # fmt: skip
TOKENIZERS = ("uncased", "cased", "unigram", "bpe", "unigram without bytes", "accents", "long")


@lru_cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Learned from the proof's texts; each has pieces of several characters."""
    if kind in ("accents", "long"):
        options = {"accents": {"strip_accents": False}, "long": {"max_word_chars": 200}}[kind]
        return WordPieceTokenizer(tokenizer_of("uncased").vocab, WordPieceOptions(**options))
    if kind in ("uncased", "cased"):
        return train_wordpiece(PROOF_TEXTS, 600, lowercase=kind == "uncased", min_frequency=1)
    model: Any = kind.split()[0]
    return train_sentencepiece(
        PROOF_TEXTS, 900, model=model, byte_fallback="without" not in kind, character_coverage=0.98
    )


def model_of(kind: str = "pretraining", tokenizer: str = "uncased") -> SavedModel:
    """A model of random numbers, as `read_model` would give it.

    Args:
        kind: Of `KINDS`; `encoder` has a pooler, `bare` has none; `relu` and `gelu` are of classes
            and have a pooler with that activation.
        tokenizer: Of `TOKENIZERS`.
    """
    made = tokenizer_of(tokenizer)
    sizes: dict[str, Any] = {"vocab_size": made.vocab_size, "num_positions": 40}
    if kind in ("relu", "gelu"):
        sizes |= {"pooler_activation": kind, "num_types": 1 if kind == "relu" else 2}
        kind = "class"
    tasks = {
        "class": TaskOutputs(
            TaskHeadConfig("classification", 3), "single_label", ("yes", "ähm", "no: <b>`|x`\n# y")
        ),
        "classes": TaskOutputs(TaskHeadConfig("classification", 2), "multi_label", ("good", "bad")),
        "one of classes": TaskOutputs(
            TaskHeadConfig("classification", 1), "multi_label", ("good",)
        ),
        "score": TaskOutputs(TaskHeadConfig("classification", 1, 0.2), "regression"),
        "tags": TaskOutputs(TaskHeadConfig("tagging", 2), "tags", ("O", "I-PER")),
        "span": TaskOutputs(TaskHeadConfig("span", 2, 0.0), "span"),
    }
    source = {"class": "classification", "tags": "tagging", "span": "span"}.get(kind, "mlm")
    saved = small_saved("pretraining" if kind == "pretraining" else source, **sizes)
    params = dict(saved.params)
    outputs = tasks.get(kind)
    if kind in ("classes", "one of classes", "score"):
        assert outputs is not None
        columns = outputs.head.num_labels
        head = small_saved("classification", **sizes).params["head"]
        params = {k: v for k, v in params.items() if k == "encoder"}
        params["head"] = {name: array[..., :columns] for name, array in head.items()}
    if kind in ("encoder", "bare"):
        params = {"encoder": params["encoder"]}
    if kind in ("bare", "mlm", "tags", "span"):
        encoder = params["encoder"]
        params["encoder"] = {name: part for name, part in encoder.items() if name != "pooler"}
    return dataclasses.replace(
        saved, params=params, outputs=outputs, tokenizer=made, origin=Origin("pretrain", 7),
        config=dataclasses.replace(MODEL, **sizes),
    )  # fmt: skip
