"""Export of translation models in Hugging Face's format, with proof.

`read_model` reads the files back, bit for bit. If `transformers` is installed, it reads them too:
no missing and no unexpected tensor, the same token ids, the same logits, and the same translations
from `generate` with the written `generation_config.json`.
"""

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.exchange.huggingface import check_same_tokenizer, check_tokenizer
from bert_jax.artefacts.exchange.proof import (
    NOT_INSTALLED,
    PROOF_TEXTS,
    Batch,
    ProofFailedError,
    unequal,
)
from bert_jax.artefacts.exchange.searches import (
    Sides,
    compare_searches,
    largest_gap,
    logits_of,
)
from bert_jax.artefacts.exchange.theirs import load_class, quiet
from bert_jax.artefacts.exchange.translation.files import class_name, write_huggingface
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import first_few
from bert_jax.model.seq2seq.search import SearchConfig

write = write_huggingface


class TheirTranslator:
    """Written directory, loaded in its class of Transformers."""

    def __init__(self, directory: Path, class_name: str) -> None:
        """Load the directory.

        Raises:
            ProofFailedError: Tensors are missing or unexpected.
        """
        self.model, report = load_class(directory, class_name)
        if wrong := {key: sorted(map(str, keys)) for key, keys in report.items() if keys}:
            raise ProofFailedError(f"transformers reports {wrong}")

    def logits(self, sides: Sides) -> np.ndarray:
        """Compute logits (B, T, V) in float32."""
        import torch

        names = {
            "input_ids": sides.source.tokens, "attention_mask": sides.source.segment_ids,
            "decoder_input_ids": sides.target.tokens,
            "decoder_attention_mask": sides.target.segment_ids,
        }  # fmt: skip
        inputs = {name: torch.tensor(ids).long() for name, ids in names.items()}
        with quiet(), torch.no_grad():
            found: np.ndarray = self.model(**inputs, use_cache=False).logits.numpy()
        return found

    def translate(self, source: Batch, settings: SearchConfig, steps: int) -> list[list[int]]:
        """Call `generate` with the written settings, except the number of beams and the length."""
        import torch

        given = self.model.generation_config
        with quiet(), torch.no_grad():
            found = self.model.generate(
                torch.tensor(source.tokens).long(),
                attention_mask=torch.tensor(source.segment_ids).long(),
                num_beams=settings.num_beams, max_length=steps + 1,
            )  # fmt: skip
        rows = found[:, 1:].tolist()
        ends = [row.index(given.eos_token_id) if given.eos_token_id in row else len(row)
                for row in rows]  # fmt: skip
        return [row[: end + 1] for row, end in zip(rows, ends, strict=True)]


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Read the directory back and compare logits and translations.

    Returns:
        `differences`: the largest in either proof; `proofs`: the result of each proof or why the
        proof did not run; and `versions`.

    Raises:
        ProofFailedError: Names the part that differs and must be equal.
    """
    back = read_back(saved, out)
    gaps = {"bert_jax": largest_gap(saved, rows, lambda sides: logits_of(back, sides))}
    proofs: dict[str, Any] = {
        "bert_jax": {
            "ran": True, "class": "read_model", "tensors_bit_equal": True,
            "texts_with_equal_ids": len(PROOF_TEXTS),
        },
        "transformers": {"ran": False, "why": NOT_INSTALLED},
    }  # fmt: skip
    packages = ["safetensors", "tokenizers"]
    if all(find_spec(name) for name in ("transformers", "torch")):
        packages += ["transformers", "torch"]
        theirs = TheirTranslator(out, class_name(saved))
        gaps["transformers"] = largest_gap(saved, rows, theirs.logits)
        proofs["transformers"] = {
            "ran": True, "class": class_name(saved), "missing_keys": 0, "unexpected_keys": 0,
            **check_tokenizer(saved, out),
            "translations": compare_searches(saved, rows, theirs.translate),
        }  # fmt: skip
    for name, gap in gaps.items():
        proofs[name]["differences"] = {"logits": gap}
    return {
        "differences": {"logits": max(gaps.values())},
        "proofs": proofs,
        "versions": {name: metadata.version(name) for name in packages},
    }


def read_back(saved: SavedModel, out: Path) -> SavedModel:
    """Read a directory with our own code.

    Raises:
        ProofFailedError: Tensors, ids or the tokenizer differ from `saved`.
    """
    back = read_model(out)
    if wrong := unequal(saved.params, back.params, vocab_size=saved.config.vocab_size):
        raise ProofFailedError(f"read back, this is not what was written: {first_few(wrong, 8)}")
    check_same_tokenizer(saved, back)
    return back
