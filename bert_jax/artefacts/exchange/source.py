"""Comparison of a foreign model, run in its own class of Transformers, with our reading of it.

The other proofs compare the written model with our reading, so a model that we read wrongly and
write wrongly in the same way would pass them. Running the source in its own class reveals that.
"""

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.exchange.huggingface_files import specials_of
from bert_jax.artefacts.exchange.proof import (
    ONLY_OURS,
    ProofFailedError,
    check_differences,
    compare,
    proof_rows,
    row_batches,
    texts_for,
)
from bert_jax.artefacts.exchange.searches import largest_gap
from bert_jax.artefacts.exchange.theirs import source_outputs, source_tokenizer
from bert_jax.artefacts.exchange.translation.huggingface import TheirTranslator
from bert_jax.artefacts.formats.families import known_family
from bert_jax.artefacts.formats.huggingface_config import PRETRAINING_HEADS
from bert_jax.artefacts.formats.huggingface_files import model_class
from bert_jax.artefacts.formats.peft import CONFIG as ADAPTER
from bert_jax.artefacts.formats.sentencepiece_json import is_tie
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer
from bert_jax.tokenization.tokenizer import make_row

PACKAGES = ("torch", "transformers")


def prove_reading(saved: SavedModel, source: str | Path, tolerance: float) -> dict[str, Any]:
    """Return the entry of `proofs` on the source of an export; empty for our own runs."""
    if saved.origin.kind != "huggingface":
        return {}
    if (Path(source) / ADAPTER).is_file():
        found: dict[str, Any] | str = "the source is an adapter and its base"
    else:
        made_by = model_class(saved.origin.config)
        found = compare_with_source(saved, saved.tokenizer_files, made_by, tolerance)
    if isinstance(found, str):
        return {"source_class": {"ran": False, "why": f"{found}; {ONLY_OURS}"}}
    return {"source_class": {"ran": True, "class": made_by, **found}}


def compare_with_source(
    saved: SavedModel, directory: Path, made_by: str, tolerance: float
) -> dict[str, Any] | str:
    """Return the largest differences from the source in its own class, or why it did not run.

    Raises:
        ProofFailedError: The class `made_by`, loaded from `directory`, gives other outputs than our
            reading of the model, or its tokenizer gives other ids.
    """
    family = known_family(saved.origin.config)
    if family is not None and not family.native:
        return f"not compared: Transformers has no class of {family.name}; code is not run"
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        return f"not compared with the source: {', '.join(missing)} is not installed"
    translates, rows = saved.network is not None, proof_rows(saved)
    try:
        theirs: Any = None if translates else source_outputs(directory, made_by, saved)
        theirs = theirs or TheirTranslator(directory, made_by).logits
    except Exception as error:  # any type: the model may need a later version of Transformers
        return f"not compared: Transformers cannot load the source ({error})"[:300]
    if translates:
        gaps = {"logits": largest_gap(saved, rows, theirs)}
    else:
        others = ("pooled", "head", "embedding", *PRETRAINING_HEADS)
        (gaps,) = compare(saved, row_batches(rows), theirs, optional=others)
    check_differences(gaps, tolerance, f"{saved.name} does not compute the same here")
    tokens = _compare_tokens(saved, source_tokenizer(directory, saved.tokenizer))
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {"differences": gaps, "tolerance": tolerance, **tokens, "versions": versions}


def _compare_tokens(saved: SavedModel, theirs: Any) -> dict[str, Any]:
    """Compare the ids of texts that do not spell a special token, and of one pair."""
    if isinstance(theirs, str):
        return {"texts_with_equal_ids": f"not compared: {theirs}"}
    ours, texts = saved.tokenizer, plain_texts(saved)
    ids = ours.encode_batch(texts)
    other = []
    for text, found in zip(texts, map(np.ndarray.tolist, ids), strict=True):
        wanted = list(theirs(text, add_special_tokens=False)["input_ids"])
        tie = isinstance(ours, SentencePieceTokenizer) and is_tie(ours, found, wanted)
        other += [] if found == wanted or tie else [text]
    if other:
        raise ProofFailedError(
            f"{saved.name}: the tokenizer gives other ids than Transformers for "
            f"{len(other)} of {len(texts)} texts, the first {other[0]!r:.200}"
        )
    row = make_row(ours, *ids[:2]).ids.tolist()
    pair = list(theirs(*texts[:2])["input_ids"])
    return {"texts_with_equal_ids": len(texts), "pairs_have_equal_ids": pair == row}


def plain_texts(saved: SavedModel) -> list[str]:
    """Return the proof's texts that do not spell any of the five special tokens."""
    names = specials_of(saved)
    return [text for text in texts_for(saved.tokenizer) if not any(name in text for name in names)]
