"""A training batch as text: what the model saw and what it had to predict."""

import dataclasses
import textwrap
from collections.abc import Mapping

import numpy as np

from bert_jax.data.pairs import LABELS
from bert_jax.objectives.objective import Shown
from bert_jax.tokenization.tokenizer import Tokenizer

_WIDTH = 98
LEGEND = (
    "{word} is masked, {word>other} replaced by a random token, {word=} kept; all are predicted."
)


def describe_batch(
    batch: Mapping[str, np.ndarray],
    shown: Shown | None,
    tokenizer: Tokenizer,
    *,
    pairing: str = "none",
    max_rows: int | None = None,
) -> str:
    """Decode a batch row by row, with its masks marked.

    Sentences A and B of a pair, and packed segments, start a line each. Tokens are joined to words
    where the tokenizer says so.

    Args:
      batch: as `ExampleStream.batch` gives it.
      shown: model's input and predicted places; None shows the text alone.
      tokenizer: of the corpus.
      pairing: meaning of the labels, as `data.pairing`.
      max_rows: show so many rows at most.

    Returns:
      Lines of at most 98 characters, where words allow.
    """
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    num_rows, length = arrays["tokens"].shape
    count = num_rows if max_rows is None else min(max_rows, num_rows)
    real = int((arrays["segment_ids"] != 0).sum())
    header = f"{num_rows} rows of {length}: {real} tokens, {num_rows * length - real} padding"
    if shown is not None:
        header += f", {int(np.asarray(shown.predicted).sum())} to predict"
    lines = [header + "."]
    if shown is not None:
        lines.append(LEGEND)
    for row in range(count):
        lines += ["", *_describe_row(arrays, shown, row, tokenizer, pairing)]
    if count < num_rows:
        lines += ["", f"({num_rows - count} more rows)"]
    return "\n".join(lines)


def _describe_row(
    arrays: Mapping[str, np.ndarray],
    shown: Shown | None,
    row: int,
    tokenizer: Tokenizer,
    pairing: str,
) -> list[str]:
    """Return the row's title, then a paragraph for each sentence or segment."""
    tokens, types, segments = (arrays[name][row] for name in ("tokens", "type_ids", "segment_ids"))
    real = int((segments != 0).sum())
    title = [f"row {row}", f"stream {int(arrays['row_index'][row])}", f"{real} tokens"]
    label = LABELS.get(pairing, {}).get(int(arrays["pair_labels"][row]))
    num_segments = int(segments.max(initial=0))
    if label:
        title.append(label)
    if num_segments > 1:
        title.append(f"{num_segments} segments")
    inputs, predicted = tokens, np.zeros(tokens.shape, bool)
    if shown is not None:
        inputs, predicted = np.asarray(shown.tokens)[row], np.asarray(shown.predicted)[row]
        title.append(f"{int(predicted.sum())} to predict")

    is_pair = bool(types.any())
    specials = dataclasses.astuple(tokenizer.special_ids)
    after_special = True
    parts: dict[str, str] = {}
    for place in np.flatnonzero(segments):
        name = "AB"[min(int(types[place]), 1)] if is_pair else str(int(segments[place]))
        glued = bool(tokenizer.continues_word[tokens[place]]) and not after_special
        after_special = int(tokens[place]) in specials
        text = _marked(
            tokenizer, int(tokens[place]), int(inputs[place]), bool(predicted[place]), glued
        )
        parts[name] = parts.get(name, "") + ("" if glued or name not in parts else " ") + text
    lines = [", ".join(title)]
    for name, text in parts.items():
        lines += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"{name:>4}  ",
            subsequent_indent=" " * 6,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _marked(tokenizer: Tokenizer, original: int, given: int, predicted: bool, glued: bool) -> str:
    text = _plain(tokenizer, original, glued)
    if not predicted:
        return text
    if given == tokenizer.special_ids.mask:
        return f"{{{text}}}"
    if given == original:
        return f"{{{text}=}}"
    return f"{{{text}>{_plain(tokenizer, given, glued)}}}"


def _plain(tokenizer: Tokenizer, token: int, glued: bool) -> str:
    """Return a token without the mark that tells where words begin, unless it is all there is."""
    text = tokenizer.id_to_token(token)
    if tokenizer.kind != "wordpiece":
        return text.removeprefix("▁").removeprefix("Ġ") or text
    return (text.removeprefix("##") if glued else text) or text
