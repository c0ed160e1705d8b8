"""A directory as Transformers reads it: states and logits of its own class, and its tokenizer.

Only weights that are not pickled are read, nothing is downloaded, and code of the directory is not
run.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.exchange.proof import Batch
from bert_jax.formats.huggingface_files import model_class
from bert_jax.saved.model import SavedModel
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.wordpiece import WordPieceTokenizer
from bert_jax.tokenization.wordpiece_files import says_casing

_READ = (
    "Model", "ForPreTraining", "ForMaskedLM", "ForNextSentencePrediction",
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
)  # fmt: skip
"""Ends of the names of classes whose outputs are looked at; of others the encoder alone is."""


class SourceModel:
    """A directory in its own class, and where that has no masked-LM head, in one that has."""

    def __init__(self, directory: Path, config: Mapping[str, Any], saved: SavedModel) -> None:
        """Load it.

        Args:
            directory: In Hugging Face's format.
            config: The content of its `config.json`.
            saved: The model as it was read here: says what to look for, and the padding.
        """
        import torch
        import transformers

        types = config.get("type_vocab_size", 2)
        one_type = config.get("model_type") == "distilbert" or types == 1
        self._inputs = ("tokens",) if one_type else ("tokens", "type_ids")
        self._saved = saved
        self._models: dict[str, Any] = {}
        name = model_class(config)
        if not hasattr(transformers, name) or not name.endswith(_READ):
            name = "AutoModel"
        names = [name]
        if "mlm" in saved.params and not name.endswith(("ForMaskedLM", "BertForPreTraining")):
            names.append("AutoModelForMaskedLM")
        for each in names:
            with quiet():
                self._models[each] = getattr(transformers, each).from_pretrained(
                    directory, dtype=torch.float32, use_safetensors=True, local_files_only=True,
                    trust_remote_code=False, attn_implementation="eager",
                ).eval()  # fmt: skip

    def outputs(self, batch: Batch) -> dict[str, np.ndarray]:
        """Compute the outputs under the names of `logits_of`; padding has no meaning."""
        import torch

        names = {"tokens": "input_ids", "type_ids": "token_type_ids"}
        inputs = {names[n]: torch.tensor(getattr(batch, n)).long() for n in self._inputs}
        inputs["attention_mask"] = torch.tensor(batch.segment_ids).long()
        found: dict[str, np.ndarray] = {}
        for name, model in self._models.items():
            with quiet(), torch.no_grad():
                out = model(**inputs, output_hidden_states=True)
            for key, value in _outputs(out, name, self._saved).items():
                found.setdefault(key, value.float().numpy())
        return found


def _outputs(out: Any, name: str, saved: SavedModel) -> dict[str, Any]:
    import torch

    found = {"hidden": out.hidden_states[-1]}
    pooled = out.get("pooler_output")
    if saved.has_pooler and pooled is not None:
        found["pooled"] = pooled
    if "prediction_logits" in out:
        found |= {"mlm": out["prediction_logits"], "nsp": out["seq_relationship_logits"]}
    elif name == "ElectraForPreTraining":
        found["rtd"] = out["logits"][..., None]
    elif name.endswith("ForMaskedLM"):
        found["mlm"] = out["logits"]
    elif name.endswith("ForNextSentencePrediction"):
        found["nsp"] = out["logits"]
    elif saved.outputs is not None and "start_logits" in out:
        found["head"] = torch.stack([out["start_logits"], out["end_logits"]], dim=-1)
    elif saved.outputs is not None and "logits" in out:
        found["head"] = out["logits"]
    return found


def source_tokenizer(directory: Path, ours: Tokenizer | None = None) -> Any:
    """Return Transformers' tokenizer of a directory; or, as text, why there is none.

    Args:
        directory: With its files.
        ours: Says whether text is lower-cased where no file does; theirs would lower-case it.
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
        except Exception as error:  # of any type; the comparison is left out then, and says so
            return f"AutoTokenizer cannot load it ({error})"[:300]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Transformers' reports, advice and bars."""
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
