"""The proof of Hugging Face's format: written files are read back and compared with the source.

Once by `read_model`, which always runs: tensors bit for bit, ids of texts, outputs. Once by
`transformers` where it is installed: no missing and no unexpected tensor, the same ids, outputs
within the tolerance.
"""

import re
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from bert_jax.exchange.huggingface_files import class_of, specials_of, task_of, without_types
from bert_jax.exchange.proof import (
    PROOF_TEXTS,
    ProofFailedError,
    batch_of,
    differences,
    keep_worst,
    logits_of,
    row_batches,
    same_spans,
    texts_for,
)
from bert_jax.exchange.source_model import quiet
from bert_jax.formats.sentencepiece_json import is_tie
from bert_jax.saved.model import SavedModel, read_model
from bert_jax.tokenization.fast_tokenizer import FastTokenizer
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer
from bert_jax.tokenization.tokenizer import Tokenizer, make_row


def auto_class(name: str) -> str:
    """Return the auto class of Transformers that loads a directory of the class `name`."""
    task = re.sub("^(Bert|Electra|DistilBert)(?=For|Model)", "", name)
    return f"AutoModel{task.removeprefix('Model')}"


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Read the directory back and compare outputs.

    Args:
        saved: The source.
        out: Directory that `write_huggingface` wrote.
        rows: Rows of token ids, special tokens included.

    Returns:
        `differences`, the largest by output over both proofs; `proofs`, what each found or why it
        did not run; and `versions`.

    Raises:
        ProofFailedError: Something differs that must be equal: names it.
    """
    back = _read_back(saved, out)
    installed = all(find_spec(name) for name in ("transformers", "torch"))
    theirs = _Transformers(saved, out) if installed else None
    ours: dict[str, float] = {}
    others: dict[str, float] = {}
    length = max(map(len, rows))
    for some in tqdm(row_batches(rows), "proof", unit="batch", disable=None, leave=False):
        batch = batch_of(saved, some, length)
        source = logits_of(saved, some, length)
        found = logits_of(back, some, length)
        if missing := source.keys() - found.keys() - {"pooled"}:
            raise ProofFailedError(f"what was read back does not give {sorted(missing)}")
        keep_worst(ours, differences(source, found, batch.segment_ids))
        if theirs is not None:
            keep_worst(others, differences(source, theirs.outputs(*batch), batch.segment_ids))
    proofs: dict[str, Any] = {
        "bert_jax": {
            "ran": True, "class": "read_model", "tensors_bit_equal": True,
            "texts_with_equal_ids": len(PROOF_TEXTS), "differences": ours,
        }
    }  # fmt: skip
    versions = {name: metadata.version(name) for name in ("safetensors", "tokenizers")}
    if theirs is None:
        why = "transformers and torch are not both installed (the extra bert_jax[parity])"
        proofs["transformers"] = {"ran": False, "why": why}
    else:
        proofs["transformers"] = {
            "ran": True, "class": theirs.name, "missing_keys": 0, "unexpected_keys": 0,
            "texts_with_equal_ids": theirs.equal, "texts_with_ties": theirs.ties,
            "texts_with_equal_offsets": theirs.equal_offsets,
            "differences": others,
        }  # fmt: skip
        versions |= {name: metadata.version(name) for name in ("transformers", "torch")}
    both = {name: max(ours.get(name, 0.0), others.get(name, 0.0)) for name in ours | others}
    return {"differences": both, "proofs": proofs, "versions": versions}


def _read_back(saved: SavedModel, out: Path) -> SavedModel:
    """Read the directory with our own code; raise where tensors, ids or labels differ."""
    back = read_model(out)
    source, found = (_leaves(model) for model in (without_types(saved), back))
    left_out = {name for name in source if "pooler" in name and not back.has_pooler}
    if not saved.has_pooler:
        left_out |= {name for name in found if "pooler" in name}
    different = [
        name
        for name in sorted((source.keys() | found.keys()) - left_out)
        if name not in source or name not in found or not _same(source[name], found[name])
    ]
    if different:
        shown = ", ".join(different[:8]) + (", ..." if len(different) > 8 else "")
        raise ProofFailedError(f"tensors that were read back differ from the source: {shown}")
    if (before := _meaning(saved)) != (after := _meaning(back)):
        raise ProofFailedError(f"the outputs mean {after} where they were read back, not {before}")
    expected = saved.tokenizer.encode_batch(PROOF_TEXTS)
    for text, ids, again in zip(
        PROOF_TEXTS, expected, back.tokenizer.encode_batch(PROOF_TEXTS), strict=True
    ):
        _same_ids("the tokenizer that was read back", text, ids.tolist(), again.tolist())
    if back.tokenizer.special_ids != saved.tokenizer.special_ids:
        raise ProofFailedError("the tokenizer that was read back has other special tokens")
    return back


def _leaves(model: SavedModel) -> dict[str, np.ndarray]:
    """Parameters by name, without the rows that pad the vocabulary."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(model.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        rows = model.config.vocab_size if name in _OF_VOCABULARY else None
        found[name] = np.asarray(leaf)[:rows]
    return found


_OF_VOCABULARY = ("encoder/embeddings/token", "mlm/bias")


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    """Down to the sign of a zero."""
    first, second = np.ascontiguousarray(first), np.ascontiguousarray(second)
    same_kind = first.shape == second.shape and first.dtype == second.dtype
    return same_kind and first.tobytes() == second.tobytes()


def _meaning(model: SavedModel) -> tuple[Any, ...] | None:
    outputs = model.outputs
    if outputs is None:
        return None
    return outputs.objective, outputs.head.kind, outputs.head.num_labels, outputs.labels


def _same_ids(who: str, text: str, expected: Sequence[int], found: Sequence[int]) -> None:
    if list(expected) != list(found):
        place = next(
            (n for n, pair in enumerate(zip(expected, found, strict=False)) if len({*pair}) > 1),
            min(len(expected), len(found)),
        )
        raise ProofFailedError(
            f"{who} gives other ids for {text[:60]!r}: at place {place} "
            f"{list(found[place : place + 4])}, not {list(expected[place : place + 4])}"
        )


class _Transformers:
    """The directory as `transformers` loads it; raises where keys or ids are not right."""

    def __init__(self, saved: SavedModel, out: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        name, self._task = class_of(saved), task_of(saved)
        self._head = saved.outputs is not None
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
            self._model, info = getattr(transformers, auto_class(name)).from_pretrained(
                out, local_files_only=True, use_safetensors=True, trust_remote_code=False,
                output_loading_info=True, dtype=torch.float32, attn_implementation="eager",
            )  # fmt: skip
        self._model.eval()
        self.name = type(self._model).__name__
        if self.name != name:
            raise ProofFailedError(f"transformers loads a {self.name}, not a {name}")
        wrong = {key: sorted(map(str, keys)) for key, keys in info.items() if keys}
        if wrong:
            raise ProofFailedError(f"transformers reports {wrong}")
        with quiet():
            self.equal, self.ties = _check_ids(saved, tokenizer)
            self.equal_offsets = _check_offsets(saved, tokenizer)

    def outputs(
        self, tokens: np.ndarray, type_ids: np.ndarray, segment_ids: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the outputs under our names, float32."""
        torch = self._torch
        inputs = {
            "input_ids": torch.tensor(tokens, dtype=torch.long),
            "attention_mask": torch.tensor(segment_ids, dtype=torch.long),
        }
        if not self.name.startswith("DistilBert"):  # its models have no types
            inputs["token_type_ids"] = torch.tensor(type_ids, dtype=torch.long)
        with torch.no_grad():
            base = self._model.base_model(**inputs)
            whole = base if self._task == "Model" else self._model(**inputs)
        found = {"hidden": base.last_hidden_state}
        if base.get("pooler_output") is not None:
            found["pooled"] = base.pooler_output
        if self.name == "BertForPreTraining":
            found |= {"mlm": whole.prediction_logits, "nsp": whole.seq_relationship_logits}
        elif self.name == "ElectraForPreTraining":
            found["rtd"] = whole.logits[..., None]
        elif self._task == "ForQuestionAnswering":
            found["head"] = torch.stack([whole.start_logits, whole.end_logits], dim=-1)
        elif self._task != "Model":
            part = {"ForMaskedLM": "mlm", "ForNextSentencePrediction": "nsp"}
            found[part.get(self._task, "head")] = whole.logits
        return {part: array.numpy() for part, array in found.items()}


def _check_offsets(saved: SavedModel, theirs: Any) -> str:
    """Compare the places of tokens in their texts; return the number of equal texts, as text.

    A SentencePiece model's tokens may lie elsewhere: the library gives several characters that are
    composed or cut into bytes the span of all of them, and a word the space before it.
    """
    ours: Tokenizer = saved.tokenizer
    sentencepiece = isinstance(ours, SentencePieceTokenizer)
    exact = not sentencepiece
    if isinstance(ours, FastTokenizer):
        exact = ours.pipeline.trim_offsets
    equal = compared = 0
    for text in texts_for(ours):
        found = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, spans = ours.encode(text)
        if found["input_ids"] != ids.tolist():  # of texts that spell a special token, and of ties
            continue
        compared += 1
        same = same_spans(text, spans.tolist(), found["offset_mapping"], exact=exact)
        equal += same
        if not (same or sentencepiece):
            raise ProofFailedError(
                f"transformers' tokenizer gives tokens of {text[:60]!r} other places in the text: "
                f"{found['offset_mapping'][:8]}, not {spans.tolist()[:8]}"
            )
    return f"{equal} of {compared}"


def _check_ids(saved: SavedModel, theirs: Any) -> tuple[int, list[str]]:
    """Ids of each text alone, with special tokens around, and of pairs with their types.

    Returns how many texts have equal ids, and the texts of which two segmentations are as probable
    and theirs is the other one.

    Where a text spells one of the five special tokens, theirs takes the word for the token and ours
    for text; theirs does as ours when told to split special tokens. An added special token is kept
    whole by ours in any case, so texts that spell one are not compared split.
    """
    ours: Tokenizer = saved.tokenizer
    special, who = ours.special_ids, "transformers' tokenizer"
    names = specials_of(saved)
    added = [token.content for token in getattr(ours, "added", ()) if token.special]
    texts = texts_for(ours)
    ids = ours.encode_batch(texts)
    compared = set[str]()
    ties: list[str] = []

    def check(what: str, text: str, expected: list[int], found: list[int]) -> None:
        compared.add(text)
        if isinstance(ours, SentencePieceTokenizer) and is_tie(ours, expected, found):
            if expected != found and text not in ties:
                ties.append(text)
            return
        _same_ids(what, text, expected, found)

    for text, found in zip(texts, ids, strict=True):
        row = make_row(ours, found).ids.tolist()
        if not any(name in text for name in names):
            check(who, text, row, theirs(text)["input_ids"])
        # The file of a fast tokenizer takes names of tokens for them in any case.
        if ours.kind != "fast" and not any(name in text for name in added):
            split = theirs(text, split_special_tokens=True)["input_ids"]
            check(f"{who}, told to split special tokens,", text, row, split)
    first, second = texts[:2]
    both = theirs(first, second)
    pair = make_row(ours, *ids[:2])
    check(f"{who}, of two texts,", first, pair.ids.tolist(), both["input_ids"])
    types = (np.arange(len(pair.ids)) >= pair.second_at).astype(int).tolist()
    if saved.config.num_types > 1 and list(both["token_type_ids"]) != types:
        raise ProofFailedError(f"{who} gives other types to two texts: {both['token_type_ids']}")
    fields = ("pad_token_id", "unk_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    roles = [getattr(theirs, field) for field in fields]
    if roles != list(vars(special).values()):
        raise ProofFailedError(f"{who} has the special ids {roles}, not {vars(special)}")
    return len(compared) - len(ties), ties
