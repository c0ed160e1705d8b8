"""Reference outputs from Transformers, for a written directory and for the source of a model.

Transformers is told to read no pickled weights, to download nothing, and to run no code from the
directory. Other proofs compare the written model with our reading of the source, so they pass if
reading and writing make the same mistake. Running the source in Transformers reveals the mistake.
"""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.exchange import proof
from bert_jax.artefacts.exchange.exported_files import specials_of, write_arrays
from bert_jax.artefacts.formats.families import known_family
from bert_jax.artefacts.formats.flax_weights import FLAX_WEIGHTS, read_flax
from bert_jax.artefacts.formats.huggingface_files import (
    LOGITS,
    MULTIPLE_CHOICE,
    PRETRAINING_HEADS,
    PRETRAINING_TASKS,
    TASKS,
    WEIGHTS,
    marks_second,
    model_class,
    weight_files,
)
from bert_jax.artefacts.formats.peft import CONFIG as ADAPTER
from bert_jax.artefacts.formats.sentencepiece_json import is_tie
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.model.heads import MASKED_LM
from bert_jax.model.seq2seq.search import SearchConfig
from bert_jax.tokenization.load import says_casing
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer
from bert_jax.tokenization.tokenizer import CONFIG_NAME, SPACE, Tokenizer, make_row
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

PACKAGES = ("torch", "transformers")
_WITHOUT_TABLE = ("DebertaV2Tokenizer",)
"""Tokenizers that Transformers 5 runs with NFC in place of the model's table of characters. Texts
whose words then differ are not compared, because the model was trained with the table."""
_READ = (*{task for _, task in PRETRAINING_TASKS}, *TASKS)
"""Suffixes of classes whose heads are compared. For other classes only encoders are compared."""
_HEADS = {task: head for heads, task in PRETRAINING_TASKS if len(heads) == 1 for head in heads}
"""Pretraining heads, by class-name suffix, for the classes with only one head."""


def missing(*packages: str) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in packages if find_spec(name) is None]


class TheirModel:
    """A model that Transformers loaded.

    `name` is the model's class. `report` lists faulty tensors by kind of fault, such as missing.
    """

    def __init__(self, directory: Path, class_name: str) -> None:
        """Load a directory in the class `class_name`, which may be an auto class."""
        import torch
        import transformers

        with quiet():
            model, self.report = getattr(transformers, class_name).from_pretrained(
                directory, dtype=torch.float32, use_safetensors=True, local_files_only=True,
                trust_remote_code=False, attn_implementation="eager", output_loading_info=True,
            )  # fmt: skip
        self.model = model.eval()
        self.name = type(model).__name__
        many = getattr(model.config, "type_vocab_size", 1) > 1
        self._typed = many and marks_second(directory, model.config.to_dict())

    def whole(self) -> "TheirModel":
        """Return this object; raise ProofFailedError if tensors are missing or unexpected."""
        if wrong := {key: sorted(map(str, keys)) for key, keys in self.report.items() if keys}:
            raise proof.ProofFailedError(f"transformers reports faulty tensors: {wrong}")
        return self

    def adapt(self, directory: Path) -> None:
        """Load an adapter with PEFT, and merge the adapter into the model."""
        from peft import PeftModel

        with quiet():
            adapted = PeftModel.from_pretrained(self.model, str(directory))
            self.model = adapted.merge_and_unload().eval()

    def outputs(self, batch: proof.Batch | proof.Sides) -> dict[str, np.ndarray]:
        """Compute the outputs in float32, under the names that `logits_of` uses."""
        import torch

        source = batch.source if isinstance(batch, proof.Sides) else batch
        names = {"input_ids": source.tokens, "attention_mask": source.segment_ids}
        if isinstance(batch, proof.Sides):
            names["decoder_input_ids"] = batch.target.tokens
            names["decoder_attention_mask"] = batch.target.segment_ids
        elif self._typed:
            names["token_type_ids"] = batch.type_ids
        inputs = {name: torch.tensor(ids).long() for name, ids in names.items()}
        if isinstance(batch, proof.Sides):
            with quiet(), torch.no_grad():
                return {"logits": self.model(**inputs, use_cache=False).logits.numpy()}
        encoder = self.model.base_model
        with quiet(), torch.no_grad():
            base = encoder(**inputs)
            if self.name.endswith(MULTIPLE_CHOICE):  # each row is the only choice of an example
                inputs = {name: ids[:, None] for name, ids in inputs.items()}
            whole = base if encoder is self.model else self.model(**inputs)
        found = {"hidden": base.last_hidden_state}
        if base.get("pooler_output") is not None:
            found["pooled"] = base.pooler_output
        found |= {head: whole[name] for name, head in LOGITS.items() if name in whole}
        if "start_logits" in whole:
            found["head"] = torch.stack([whole.start_logits, whole.end_logits], dim=-1)
        if "logits" in whole:
            head = next((_HEADS[task] for task in _HEADS if self.name.endswith(task)), "head")
            found[head] = whole.logits[..., None] if head == "rtd" else whole.logits
        return {part: array.numpy() for part, array in found.items()}

    def translate(self, source: proof.Batch, settings: SearchConfig, steps: int) -> list[list[int]]:
        """Translate with the written generation settings, but with the given beams and length."""
        import torch

        with quiet(), torch.no_grad():
            found = self.model.generate(
                torch.tensor(source.tokens).long(),
                attention_mask=torch.tensor(source.segment_ids).long(),
                num_beams=settings.num_beams, max_length=steps + 1,
            )  # fmt: skip
        end = self.model.generation_config.eos_token_id
        return [row[: row.index(end) + 1] if end in row else row for row in found[:, 1:].tolist()]


def source_outputs(
    directory: Path, made_by: str, saved: SavedModel
) -> Callable[[proof.Batch | proof.Sides], dict[str, np.ndarray]]:
    """Load a source in its Transformers class, and return a function that computes its outputs.

    If that class lacks a masked-LM head that `saved` has, a class with this head is loaded too.
    """
    import transformers

    if saved.network is not None:
        return TheirModel(directory, made_by).whole().outputs
    known = hasattr(transformers, made_by) and made_by.endswith(_READ)
    name = made_by if known else "AutoModel"
    models = [TheirModel(directory, name)]
    if MASKED_LM in saved.params and not name.endswith(("ForMaskedLM", "BertForPreTraining")):
        models.append(TheirModel(directory, "AutoModelForMaskedLM"))

    def outputs(batch: proof.Batch | proof.Sides) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for model in models:
            found = model.outputs(batch) | found
        return found

    return outputs


def source_tokenizer(directory: Path, ours: Tokenizer) -> Any:
    """Load the tokenizer of a directory in Transformers; return a message if that fails.

    If no file says whether to lower-case, `ours` decides, because Transformers would lower-case.
    """
    import transformers

    options: dict[str, Any] = {}
    if isinstance(ours, WordPieceTokenizer) and not says_casing(directory):
        options["do_lower_case"] = ours.options.lowercase
    with quiet():
        try:
            return transformers.AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False, **options
            )
        except Exception as error:  # any type; the comparison is then skipped, with this reason
            return f"AutoTokenizer cannot load it ({error})"[:300]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Transformers' reports, advice and progress bars."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def prove_reading(saved: SavedModel, source: str | Path, tolerance: float) -> dict[str, Any]:
    """Compare `saved` with its source in Transformers; return the proof, or {} for our own runs."""
    if saved.origin.kind != "huggingface":
        return {}
    if (Path(source) / ADAPTER).is_file():
        found: dict[str, Any] | str = "the source is an adapter and its base"
    else:
        made_by = model_class(saved.origin.config)
        found = compare_with_source(saved, saved.tokenizer_files, made_by, tolerance)
    if isinstance(found, str):
        return {"source_class": {"ran": False, "why": f"{found}; {proof.ONLY_OURS}"}}
    return {"source_class": {"ran": True, "class": made_by, **found}}


def compare_with_source(
    saved: SavedModel, directory: Path, made_by: str, tolerance: float
) -> dict[str, Any] | str:
    """Compare `saved`, our reading of a model, with the same model in its class of Transformers.

    Returns the largest differences with the versions, or the reason why nothing was compared. Raise
    a ProofFailedError if the class `made_by`, loaded from `directory`, computes different outputs,
    or the tokenizer there gives different token ids.
    """
    family = known_family(saved.origin.config)
    if family is not None and not family.native:
        return f"not compared: Transformers has no class of {family.name}; model code is not run"
    if lacking := missing(*PACKAGES):
        return f"not compared with the source: {', '.join(lacking)} is not installed"
    try:
        with _in_safetensors(directory) as readable:
            theirs = source_outputs(readable, made_by, saved)
    except Exception as error:  # any type: the model may need a later version of Transformers
        return f"not compared: Transformers cannot load the source ({error})"[:300]
    others = ("pooled", "head", "embedding", *PRETRAINING_HEADS)
    batches = proof.row_batches(proof.proof_rows(saved))
    (gaps,) = proof.compare(saved, batches, theirs, optional=others)
    proof.check_differences(gaps, tolerance, f"{saved.name} has other outputs in Transformers")
    tokens = _compare_tokens(saved, source_tokenizer(directory, saved.tokenizer))
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {"differences": gaps, "tolerance": tolerance, **tokens, "versions": versions}


@contextlib.contextmanager
def _in_safetensors(directory: Path) -> Iterator[Path]:
    """Yield a directory that Transformers can read: if the weights are Flax's, a temporary copy."""
    if weight_files(directory) != [directory / FLAX_WEIGHTS]:
        yield directory
        return
    with tempfile.TemporaryDirectory() as copy:
        found = read_flax(directory / FLAX_WEIGHTS)
        arrays = {name: np.ascontiguousarray(array) for name, array in found.items()}
        write_arrays(Path(copy) / WEIGHTS, arrays, format="pt")
        for name in ("config.json", CONFIG_NAME):
            (Path(copy) / name).symlink_to(directory.absolute() / name)
        yield Path(copy)


def _compare_tokens(saved: SavedModel, theirs: Any) -> dict[str, Any]:
    """Compare the token ids of texts that do not spell a special token, and of one text pair."""
    if isinstance(theirs, str):
        return {"texts_with_equal_ids": f"not compared: {theirs}"}
    ours, texts = saved.tokenizer, plain_texts(saved)
    if type(theirs).__name__ in _WITHOUT_TABLE and hasattr(ours, "normalised"):
        texts = [text for text in texts if _read_alike(ours, theirs, text)]
    ids = ours.encode_batch(texts)
    other = []
    for text, found in zip(texts, map(np.ndarray.tolist, ids), strict=True):
        wanted = list(theirs(text, add_special_tokens=False)["input_ids"])
        tie = isinstance(ours, SentencePieceTokenizer) and is_tie(ours, found, wanted)
        other += [] if found == wanted or tie else [text]
    if other:
        raise proof.ProofFailedError(
            f"{saved.name}: our tokenizer and Transformers give different token ids for "
            f"{len(other)} of {len(texts)} texts, the first of them {other[0]!r:.200}"
        )
    row = make_row(ours, *ids[:2]).ids.tolist()
    pair = list(theirs(*texts[:2])["input_ids"])
    return {"texts_with_equal_ids": len(texts), "pairs_have_equal_ids": pair == row}


def _read_alike(ours: Any, theirs: Any, text: str) -> bool:
    """Return true if both tokenizers normalise a text to the same words."""
    read = ours.normalised(text), theirs.backend_tokenizer.normalizer.normalize_str(text)
    first, second = (list(filter(None, each.replace(SPACE, " ").split(" "))) for each in read)
    return first == second


def plain_texts(saved: SavedModel) -> list[str]:
    """Return the proof's texts that do not spell any of the five special tokens."""
    names, texts = specials_of(saved), proof.texts_for(saved.tokenizer)
    return [text for text in texts if not any(name in text for name in names)]
