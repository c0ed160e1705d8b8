"""Reference outputs from Transformers: states and logits of a directory's class, and its tokenizer.

Transformers reads only weights that are not pickled, downloads nothing, and runs no code from the
directory.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.exchange.proof import Batch
from bert_jax.artefacts.formats.huggingface_config import (
    LOGITS,
    MULTIPLE_CHOICE,
    PRETRAINING_TASKS,
    TASKS,
)
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.model.heads import has_vocabulary_head
from bert_jax.tokenization.load import says_casing
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

_READ = (*{task for _, task in PRETRAINING_TASKS}, *TASKS)
"""Suffixes of the classes whose outputs are compared; for others only the encoder is."""
_HEADS = {task: head for heads, task in PRETRAINING_TASKS if len(heads) == 1 for head in heads}
"""Heads of the classes that have one head, by class-name suffix."""


def load_class(directory: Path, class_name: str) -> tuple[Any, dict[str, Any]]:
    """Load a directory in a class; return the model, and names of faulty tensors by fault."""
    import torch
    import transformers

    with quiet():
        model, report = getattr(transformers, class_name).from_pretrained(
            directory, dtype=torch.float32, use_safetensors=True, local_files_only=True,
            trust_remote_code=False, attn_implementation="eager", output_loading_info=True,
        )  # fmt: skip
    return model.eval(), report


class TheirModel:
    """A directory in a class of Transformers.

    Attributes:
        name: Name of the class.
        report: Names of faulty tensors by fault, such as missing or unexpected.
    """

    def __init__(self, directory: Path, class_name: str) -> None:
        """Load the directory in a class, or in the class that an auto class chooses."""
        self._model, self.report = load_class(directory, class_name)
        self.name = type(self._model).__name__

    def adapt(self, directory: Path) -> None:
        """Load an adapter with PEFT, and merge the adapter into the model."""
        from peft import PeftModel

        with quiet():
            adapted = PeftModel.from_pretrained(self._model, str(directory))
            self._model = adapted.merge_and_unload().eval()

    def outputs(self, batch: Batch) -> dict[str, np.ndarray]:
        """Compute the outputs under the names of `logits_of`, float32."""
        import torch

        names = {"input_ids": batch.tokens, "attention_mask": batch.segment_ids}
        if getattr(self._model.config, "type_vocab_size", 1) > 1:
            names["token_type_ids"] = batch.type_ids
        inputs = {name: torch.tensor(ids).long() for name, ids in names.items()}
        encoder = self._model.base_model
        with quiet(), torch.no_grad():
            base = encoder(**inputs)
            if self.name.endswith(MULTIPLE_CHOICE):  # each row is the only choice of an example
                inputs = {name: ids[:, None] for name, ids in inputs.items()}
            whole = base if encoder is self._model else self._model(**inputs)
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


def source_outputs(
    directory: Path, made_by: str, saved: SavedModel
) -> Callable[[Batch], dict[str, np.ndarray]]:
    """Load a source in its own class, and also in a masked-LM class if its own omits that head."""
    import transformers

    known = hasattr(transformers, made_by) and made_by.endswith(_READ)
    name = made_by if known else "AutoModel"
    models = [TheirModel(directory, name)]
    has_head = has_vocabulary_head(saved.params)
    if has_head and not name.endswith(("ForMaskedLM", "BertForPreTraining")):
        models.append(TheirModel(directory, "AutoModelForMaskedLM"))

    def outputs(batch: Batch) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for model in models:
            found = model.outputs(batch) | found
        return found

    return outputs


def source_tokenizer(directory: Path, ours: Tokenizer) -> Any:
    """Load the tokenizer of a directory in Transformers; return a message if that fails.

    If no file says whether to lower-case text, `ours` decides; Transformers would lower-case.
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
