"""Evaluation of masked language models on minimal pairs of a good and a bad sentence.

Scores are pseudo-log-likelihoods: sums of the log-probabilities of a sentence's tokens, each behind
a mask. `token` masks one token at a time (Salazar et al. 2020, arXiv 1910.14659). `word_l2r` also
masks the later tokens of the same word, which would give the masked token away (Kauf and Ivanova
2023, arXiv 2305.10588). A line has BLiMP's fields (Warstadt et al. 2020). A tie counts as wrong.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from typing_extensions import override

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError
from bert_jax.infer.fill_mask import MaskFiller
from bert_jax.infer.forward import label_log_probs
from bert_jax.infer.predictor import text_field
from bert_jax.infer.records import Record, read_records
from bert_jax.tasks.examples import Problems
from bert_jax.tasks.reports.intervals import LEVEL, wilson
from bert_jax.tasks.rows import Batch, Rows
from bert_jax.terminal import progress_bar, table_lines
from bert_jax.tokenization.tokenizer import make_row, num_special

SCORES = ("word_l2r", "token")
FIELDS = ("sentence_good", "sentence_bad", "UID")
_PART = 128  # pairs


def read_pairs(source: str) -> list[Record]:
    """Read pairs. Raise a UserError that names the first wrong lines, or if there are no pairs."""
    problems, pairs = Problems(source, "lines"), list[Record]()
    for record in read_records(source, fields=FIELDS, more={"UID": ""}):
        try:
            if record.problem is not None:
                raise UserError(record.problem)
            for name in FIELDS:
                text_field(record.fields, name, record.origin)
        except UserError as error:
            problems.add(error)
        pairs.append(record)
    problems.check()
    if not pairs:
        raise UserError(f"{source} has no pairs; expected lines with {', '.join(FIELDS)}")
    return pairs


def evaluate_pairs(pairs: Sequence[Record], model: SavedModel) -> dict[str, Any]:
    """Return the accuracy of each of `SCORES`, with Wilson's interval, overall and for each UID."""
    bar = progress_bar(range(0, len(pairs), _PART), of="minimal pairs", unit=f"parts of {_PART}")
    found = np.concatenate([pair_scores(model, pairs[begin : begin + _PART]) for begin in bar])
    uids = np.array([pair.fields["UID"] for pair in pairs])
    known = dict.fromkeys(filter(None, uids.tolist()))
    return {
        score: {**_accuracy(own), "UID": {uid: _accuracy(own[uids == uid]) for uid in known}}
        for score, own in zip(SCORES, (found[:, 0] - found[:, 1]).T, strict=True)
    }


def _accuracy(margins: Float[np.ndarray, " n"]) -> dict[str, Any]:
    right, ties, count = int((margins > 0).sum()), int((margins == 0).sum()), len(margins)
    share, interval = right / count, [*wilson(right, count)]
    return {"accuracy": share, "interval": interval, "pairs": count, "ties": ties}


def pair_scores(model: SavedModel, pairs: Sequence[Record]) -> Float[np.ndarray, "N 2 S"]:
    """Compute the `SCORES` of each pair's sentences with a model from `forward.on_device`.

    Equal masked copies are computed once, so sentences of the same tokens have the same scores.
    Raise a UserError if the model has no masked-LM head, or a sentence has no tokens or too many.
    """
    likelihood, tokenizer = _Likelihood(model), model.tokenizer
    most = model.max_length - num_special(tokenizer, pair=False)
    known, places = dict[tuple[bytes, int], int](), []
    texts = [pair.fields[name] for pair in pairs for name in FIELDS[:2]]
    for number, ids in enumerate(tokenizer.encode_batch(texts)):
        if not 0 < len(ids) <= most:
            where = f"{pairs[number // 2].origin}: the field {FIELDS[number % 2]!r}"
            raise UserError(f"{where} has {len(ids)} tokens; {model.name} takes 1 to {most}")
        word = np.cumsum(~tokenizer.continues_word[ids])
        hidden = np.stack([np.triu(word[:, None] == word), np.eye(len(ids), dtype=bool)])
        for rows in np.where(hidden, tokenizer.special_ids.mask, ids).astype(np.int32):
            copies = zip(map(np.ndarray.tobytes, rows), ids.tolist(), strict=True)
            places.append([known.setdefault(copy, len(known)) for copy in copies])
    rows = [make_row(tokenizer, np.frombuffer(row, np.int32)).ids for row, _ in known]
    every = Rows(rows, np.array([*map(len, rows)], np.int32), np.array([id for _, id in known]))
    found = np.array(likelihood.outputs(every), np.float64)
    return np.array([found[place].sum() for place in places]).reshape(-1, 2, len(SCORES))


class _Likelihood(MaskFiller):
    """Predictor of the log-probabilities of given tokens behind masks."""

    @override
    def forward(self, batch: Batch) -> Any:
        return label_log_probs(self.model, batch)


def pair_lines(found: dict[str, Any]) -> list[str]:
    """Format the result of `evaluate_pairs` as a table."""
    table = [["accuracy", "pairs", *(cell for name in found for cell in (name, f"{LEVEL:.0%}"))]]
    for uid in (None, *found[SCORES[0]]["UID"]):
        own = [each["UID"].get(uid, each) for each in found.values()]
        table.append([uid or "all", f"{own[0]['pairs']:,}"])
        for each in own:
            table[-1] += [f"{each['accuracy']:.3f}", "{:.3f}-{:.3f}".format(*each["interval"])]
    return [*table_lines(table), "Chance is 0.5. Equal scores (ties) count as wrong."]
