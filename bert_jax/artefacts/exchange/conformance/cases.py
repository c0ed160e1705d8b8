"""Write the directory `conformance` of an export: texts, inputs, expected outputs, check.py."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from bert_jax.artefacts.exchange import exported_files as files
from bert_jax.artefacts.exchange import proof
from bert_jax.artefacts.exchange.conformance import check
from bert_jax.artefacts.exchange.onnx.graph import output_names
from bert_jax.artefacts.formats.sentencepiece_json import is_tie
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.config.mapping import to_dict
from bert_jax.tasks.long_texts import pair_lengths
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer
from bert_jax.tokenization.tokenizer import make_row, num_special

MIXED = ("", "Yes", *(proof.PROOF_TEXTS[n] for n in (0, 3, 10, 11, 13, 15, 18, 19, 22, 24, 41)))
"""Texts: the empty text, a word, and proof texts (eight scripts, accents, emoji, mixed case)."""
PAIR = ("Who wrote it?", "Ada wrote the book.")


def write(saved: SavedModel, out: Path, format: str, proven: Mapping[str, Any]) -> None:
    """Write texts, inputs, outputs of `logits_of`, and check.py for software that loads a format.

    `proven` is the result of the proof. The tolerance of an output is the largest of 1e-4, 1e-4
    times its largest number, and twice the proof's largest difference. Orbax, adapters, the
    searches of StableHLO, and NeoBERT, whose class Transformers lacks, get no check.py. Raise a
    ProofFailedError if `tokenizer.json` gives other token ids than the model's tokenizer.
    """
    directory, arrays, outputs = out / "conformance", dict[str, np.ndarray](), dict[str, Any]()
    directory.mkdir()
    longest = max(512, 6 * saved.config.local_window)  # three windows, each to both sides
    length = min(saved.max_length, saved.config.num_positions, longest)
    gaps = proven.get("quantized", proven)["differences"].values()
    least = max(proof.TOLERANCE, 2 * max(gaps, default=0.0))
    about: dict[str, Any] = {
        "format": format, "class": files.class_name(saved), "max_length": length,
        "objective": saved.outputs and saved.outputs.objective, "outputs": outputs, "batches": {},
        "embedding": saved.embedding and to_dict(saved.embedding),
    }  # fmt: skip
    typed = saved.network is None and saved.config.num_types > 1
    names = [*check.INPUTS, *(f"decoder_{name}" for name in check.INPUTS)]
    for key, (prompt, texts) in _texts(saved, length, pairs=format == "cross-encoder").items():
        rows = rows_of(saved, out, prompt, texts, length)
        inputs = proof.inputs_of(saved, list(rows.values()), max(map(len, rows.values())))
        sides = [inputs] if isinstance(inputs, proof.Batch) else inputs
        given = dict(zip(names, [ids.tolist() for side in sides for ids in side], strict=False))
        about["inputs"] = [name for name in given if typed or "type" not in name]
        about["batches"][key] = {"name": key, "prompt": prompt, "texts": list(rows), **given}
        found = named(saved, format, proof.logits_of(saved, inputs), proven["differences"])
        for name, array in found.items():
            entry = outputs.setdefault(name, {"per_token": array.ndim > 2, "tolerance": least})
            for number, row in enumerate(array):
                tokens = int(inputs.segment_ids[number].sum()) * entry["per_token"]
                values = arrays[f"{key}/{number}/{name}"] = check.checked(row, tokens)
                scaled = proof.TOLERANCE * float(np.abs(values).max())
                entry["tolerance"] = max(entry["tolerance"], scaled)
    files.write_json(directory / "cases.json", about)
    np.savez_compressed(directory / "expected.npz", **arrays)  # type: ignore[arg-type]
    lacks_class = about["class"].startswith("NeoBERT")
    runs = not lacks_class if format == "huggingface" else saved.network is None
    if runs and format not in ("orbax", "peft"):
        (directory / "check.py").write_bytes(Path(check.__file__).read_bytes())


def _texts(saved: SavedModel, length: int, *, pairs: bool = False) -> dict[str, tuple[str, Any]]:
    """Return each batch's prompt and inputs: tuples of one or two texts (two if `pairs`)."""
    long = " ".join(f"{n}. {proof.PROOF_TEXTS[n % 2]}" for n in range(length // 8 + 1))
    mixed: Any = [*(itertools.pairwise(MIXED) if pairs else ((text,) for text in MIXED)), PAIR]
    found = {"mixed": ("", mixed), "long": ("", [("Yes", long)] if pairs else [(long,), ("Yes",)])}
    if (vectors := saved.embedding) is not None:
        mixed.remove(PAIR)
        prompts = {"query": vectors.query_prefix, "document": vectors.document_prefix}
        found |= {kind: (prompt, mixed[1:4]) for kind, prompt in prompts.items() if prompt}
    return found


def rows_of(saved: SavedModel, out: Path, prompt: str, texts: Any, length: int) -> dict[Any, Any]:
    """Return the token ids of each text, without texts that have a tie (see `is_tie`)."""
    tokenizer, tokenize, rows = saved.tokenizer, None, {}
    if (out / "tokenizer.json").is_file():  # Marian has none
        tokenize = check.tokenizer_of(out)
    for first, *second in texts:
        ids = tokenizer.encode_batch([prompt + first, *second])
        room = length - num_special(tokenizer, pair=bool(second))
        kept = pair_lengths(len(ids[0]), len(ids[1]), room) if second else [room]
        cut = (each[:number] for each, number in zip(ids, kept, strict=True))
        row = make_row(tokenizer, *cut).ids.tolist()
        found, given = row, (prompt + first, *second)
        if tokenize is not None:
            found = tokenize(*given, max_length=length, truncation=True)["input_ids"]
        if found == row:
            rows[first, *second] = row
        elif not (isinstance(tokenizer, SentencePieceTokenizer) and is_tie(tokenizer, row, found)):
            raise proof.ProofFailedError(f"tokenizer.json gives other ids for {first!r:.60}")
    return rows


def named(
    saved: SavedModel, format: str, found: Mapping[str, np.ndarray], proven: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """Return the outputs that a format's software computes, under that software's names."""
    heads = found.keys() - {"hidden", "pooled", "embedding"}
    given = {"huggingface": heads or {"hidden"}, "sentence-transformers": {"embedding"}}
    some = sorted(given.get(format, proven.keys() or found.keys()))
    if format == "cross-encoder":
        several = saved.outputs is not None and saved.outputs.objective == "multi_label"
        return {"scores": expit(found["head"]) if several else found["head"]}
    if saved.network is not None or format in ("stablehlo", "orbax"):
        return {name: found[name] for name in some}
    named = {output_names(saved)[name]: found[name] for name in some}
    if saved.outputs is not None and saved.outputs.objective == "span":
        ends = named.pop("logits")
        named |= {"start_logits": ends[..., :1], "end_logits": ends[..., 1:]}
    return named
