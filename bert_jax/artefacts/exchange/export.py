"""Export of a model for other software, with proof of equal outputs: bert-jax export.

export("work/base", "huggingface", Path("out/base"))

An export is written under a temporary name and compared with its source. If an output differs by
more than the tolerance, the disk is full or a signal arrives, nothing gets the final name.
"""

import math
import platform
import re
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import bert_jax
from bert_jax.artefacts.exchange import exported_files as files
from bert_jax.artefacts.exchange.conformance import cases
from bert_jax.artefacts.exchange.model_card import model_card
from bert_jax.artefacts.exchange.onnx import runtime
from bert_jax.artefacts.exchange.proof import PROOF_TEXTS, TOLERANCE, check_differences, proof_rows
from bert_jax.artefacts.exchange.sentence_transformers import encoder_with_vectors, scorer
from bert_jax.artefacts.exchange.theirs import prove_reading
from bert_jax.artefacts.formats.families import MODERN
from bert_jax.artefacts.formats.huggingface_files import POOLED_HEADS, PRETRAINING_HEADS
from bert_jax.artefacts.formats.model_config import kind_of
from bert_jax.artefacts.formats.sentencepiece_json import tokenizer_json
from bert_jax.artefacts.saved.ancestors import RECORD
from bert_jax.artefacts.saved.lineage import ancestor_entry, reports_on_ancestors
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.artefacts.saved.runs import spent, staged
from bert_jax.errors import UserError
from bert_jax.files.checks import DIGESTS, digests_of
from bert_jax.files.remote import open_workdir
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer


class Format(NamedTuple):
    """An export format."""

    module: str
    """Name of the module in `exchange`."""
    translates: bool = False
    """Whether the module also writes translation models."""
    heads: Literal["known", "all", "none"] = "known"
    """Heads that the module writes; with `none`, it writes an encoder and the pooling of states."""


FORMATS = {
    "huggingface": Format("huggingface", translates=True),
    "sentence-transformers": Format("sentence_transformers", heads="none"),
    "cross-encoder": Format("sentence_transformers"),
    "onnx": Format("onnx.runtime"),
    "stablehlo": Format("stablehlo", translates=True),
    "orbax": Format("orbax_export", translates=True, heads="all"),
    "peft": Format("peft"),
}
"""Export formats by name.

The module of a format has these functions. `write(saved, out)` fills a directory. `prove(saved,
out, rows)` compares `out` and `saved`, usually by outputs for rows of token ids, and returns
`differences` (the largest of each output) and `versions`. The optional `check(saved)` raises
UserError if the format cannot hold a model; the names of the parameters must suffice for this. The
optional `loading(saved)` returns the loading section of the model card.
"""
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,40}")
_NAME = re.compile(r"[\w][\w .+/-]{0,95}")


def export(
    source: str | Path,
    format: str,
    out: str | Path,
    *,
    tolerance: float = TOLERANCE,
    license: str = "unknown",
    name: str = "",
    part: str = "",
    quantize: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write a model in another format and compare it with its source; on failure, write nothing.

    Return the content of `parity.json`. Raise a UserError if an argument is invalid, `out` is
    taken, or the format cannot hold the model; a ProofFailedError if the copy's outputs differ.

    Args:
        source: Directory for `read_model`.
        format: A key of `FORMATS`.
        out: Directory that does not exist yet, or is empty.
        tolerance: Largest allowed absolute difference of float32 states and logits from the source.
        license: License for the model card, as the Hugging Face Hub abbreviates it.
        name: Title of the model card; if empty, the name of the source's directory.
        part: Model to export if a run has two: "discriminator" or "generator"; if empty, the first.
        quantize: "int8" (ONNX only) replaces the proven float32 graph with a graph of 8-bit
            matrices; `quantized` in the result reports its differences. If empty, float32 is kept.
        say: Function that receives one line of text at each stage.
    """
    if format not in FORMATS:
        raise UserError(f"the format is {format!r}; it must be one of {', '.join(FORMATS)}")
    if not (tolerance >= 0 and math.isfinite(tolerance)):
        raise UserError(f"the tolerance is {tolerance}; it must be a finite number, at least 0")
    if quantize not in ("", "int8") or (quantize and format != "onnx"):
        raise UserError(
            f"quantize is {quantize!r:.40} and the format is {format}; quantize must be empty, or "
            "int8 with the format onnx"
        )
    if not _LICENSE.fullmatch(license):
        raise UserError(
            f"the license is {license[:80]!r}; it must be a license identifier of the Hub, such "
            "as apache-2.0, cc-by-4.0, other or unknown"
        )
    name = name or Path(source).absolute().name
    if not _NAME.fullmatch(name):
        raise UserError(
            f"the name is {name[:120]!r}; it must have 1 to 96 characters, each a letter, a digit, "
            "a space or one of . + / - _ (--name)"
        )
    say(f"reading {source}")
    as_read = read_model(source, part=part)
    refused = refusals(as_read)
    if format in refused:
        whole = (n for n, each in FORMATS.items() if n not in refused and each.heads != "none")
        others = f". Export with --to {' or '.join(whole)}" if len(refused) < len(FORMATS) else ""
        raise UserError(f"{as_read.name}: {refused[format]}{others}")
    saved = held(as_read, format)
    module = import_module(f"bert_jax.artefacts.exchange.{FORMATS[format].module}")
    left_out = sorted(as_trained(as_read).params.keys() - saved.params.keys())
    has_parts = saved.network is None or format == "huggingface"  # else nothing is added
    with staged(out) as directory:
        say(f"writing {format}")
        module.write(saved, directory)
        say("comparing with the source")
        rows = proof_rows(saved)
        proven = module.prove(saved, directory, rows)
        check_differences(proven["differences"], tolerance)
        if reading := prove_reading(as_read, source, tolerance):
            proven["proofs"] = proven.get("proofs", {}) | reading
        if quantize:
            say("quantizing")
            proven["quantized"] = runtime.quantize(saved, directory, rows)
        cases.write(saved, directory, format, proven)
        parity = {
            "format": format,
            "class": files.class_name(saved),
            "source": {"name": name, "kind": saved.origin.kind, "step": saved.origin.step},
            RECORD: [ancestor_entry("source", source, saved.origin.step)],
            "spent": spent(open_workdir(source).local / "goodput.json"),
            "contamination": [each.summary() for each in reports_on_ancestors(source)],
            "tolerance": tolerance,
            "texts": len(PROOF_TEXTS),
            "rows": len(rows),
            "tokens": sum(map(len, rows)),
            **proven,
            "untrained_parts": files.untrained_parts(saved) if has_parts else [],
            "left_out": left_out,
            "sha256": digests_of(directory, "sha256"),
            DIGESTS: digests_of(directory),
            "tokenizer_fingerprint": saved.tokenizer.fingerprint,
            "versions": {
                "bert_jax": bert_jax.__version__,
                "python": platform.python_version(),
                **{package: metadata.version(package) for package in ("jax", "jaxlib", "numpy")},
                **proven["versions"],
            },
        }
        files.write_json(directory / "parity.json", parity)
        loading = module.loading(saved) if hasattr(module, "loading") else ""
        card = model_card(saved, parity, license=license, name=name, loading=loading)
        (directory / "README.md").write_text(card, encoding="utf-8")
    return parity


def refusals(saved: SavedModel) -> dict[str, str]:
    """Return the formats to which a model cannot be exported, each with the reason.

    `export` refuses these formats with the same reasons. Only names are read from the parameters,
    so that a run can call this function before its first step.
    """
    found = {}
    for name, format in FORMATS.items():
        module = import_module(f"bert_jax.artefacts.exchange.{format.module}")
        try:
            if isinstance(saved.tokenizer, SentencePieceTokenizer):
                tokenizer_json(saved.tokenizer)
            if saved.network is not None and not format.translates:
                raise UserError("it is a translation model, but this format holds only encoders")
            getattr(module, "check", lambda _: None)(held(saved, name))
        except UserError as error:
            found[name] = f"{error}".removeprefix(f"{saved.name}: ")
    return found


def refusal_lines(models: Mapping[str, SavedModel]) -> list[str]:
    """Return readable lines on the `refusals` for each model of a run (part name -> model)."""
    formats: dict[str, list[str]] = {}
    for part, saved in models.items():
        for name, why in refusals(saved).items():
            formats.setdefault(why, []).append(name if len(models) == 1 else f"{name} ({part})")
    return [f"exports  not to {', '.join(names)}: {why}" for why, names in formats.items()]


def held(saved: SavedModel, format: str) -> SavedModel:
    """Return the parts of a model that a format holds; see `as_trained` and `without_pairs`."""
    if saved.network is not None:
        return saved
    heads, saved = FORMATS[format].heads, files.without_pairs(as_trained(saved))
    if heads != "all" and saved.outputs is not None:
        saved = saved.without(PRETRAINING_HEADS)  # a task's class has no place for these
    if format == "huggingface" and kind_of(saved.config) in MODERN:
        saved = saved.without({"rtd"})  # only ELECTRA has a class with this head
    if format == "cross-encoder":
        return scorer(saved)
    if heads == "none":
        return encoder_with_vectors(saved)
    if heads == "all" or saved.origin.kind != "pretrain":
        return saved
    return saved.without(saved.params.keys() - {"encoder", *PRETRAINING_HEADS})


def as_trained(saved: SavedModel) -> SavedModel:
    """Return a model without the parts that its pretraining run never trained.

    A run with `data.pairing` none has no text pairs. Its next-sentence head, and the pooler that
    only this head reads, therefore still have their initial values.
    """
    return saved.without({*POOLED_HEADS, "pooler"}) if saved.origin.pairing == "none" else saved
