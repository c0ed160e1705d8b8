"""A training batch as text: what the model saw and what it had to predict."""

import dataclasses
import textwrap
from collections.abc import Mapping

import numpy as np

from bert_jax.objectives.masking import Masked
from bert_jax.tokenization.tokenizer import Tokenizer

_WIDTH = 98
_LABELS = {
    "nsp": {0: "B is next", 1: "B is random"},
    "sop": {0: "A and B in order", 1: "A and B swapped"},
}
LEGEND = (
    "{word} is masked, {word>other} replaced by a random token, {word=} kept; all are predicted."
)


def describe_batch(
    batch: Mapping[str, np.ndarray],
    masked: Masked | None,
    tokenizer: Tokenizer,
    *,
    objective: str = "nsp",
    max_rows: int | None = None,
) -> str:
    """Decode a batch row by row, with its masks marked.

    Sentences A and B of a pair, and packed segments, start a line each. Tokens are joined to words
    where the tokenizer says so.

    Args:
      batch: as `ExampleStream.batch` gives it.
      masked: what `mask_tokens` made of it; None shows the text alone.
      tokenizer: of the corpus.
      objective: what the labels mean, `nsp` or `sop`.
      max_rows: show so many rows at most.

    Returns:
      Lines of at most 98 characters, where words allow.
    """
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    num_rows, length = arrays["tokens"].shape
    shown = num_rows if max_rows is None else min(max_rows, num_rows)
    real = int((arrays["segment_ids"] != 0).sum())
    header = f"{num_rows} rows of {length}: {real} tokens, {num_rows * length - real} padding"
    if masked is not None:
        header += f", {int(np.asarray(masked.weights).sum())} to predict"
    lines = [header + "."]
    if masked is not None:
        lines.append(LEGEND)
    for row in range(shown):
        lines += ["", *_describe_row(arrays, masked, row, tokenizer, objective)]
    if shown < num_rows:
        lines += ["", f"({num_rows - shown} more rows)"]
    return "\n".join(lines)


def _describe_row(
    arrays: Mapping[str, np.ndarray],
    masked: Masked | None,
    row: int,
    tokenizer: Tokenizer,
    objective: str,
) -> list[str]:
    """The row's title, then a paragraph for each sentence or segment."""
    tokens, types, segments = (arrays[name][row] for name in ("tokens", "type_ids", "segment_ids"))
    real = int((segments != 0).sum())
    title = [f"row {row}", f"stream {int(arrays['row_index'][row])}", f"{real} tokens"]
    label = _LABELS.get(objective, {}).get(int(arrays["nsp_labels"][row]))
    num_segments = int(segments.max(initial=0))
    if label:
        title.append(label)
    if num_segments > 1:
        title.append(f"{num_segments} segments")
    inputs, predicted = tokens, np.zeros(tokens.shape, bool)
    if masked is not None:
        inputs = np.asarray(masked.tokens)[row]
        predicted[np.asarray(masked.positions)[row][np.asarray(masked.weights)[row] > 0]] = True
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
    """A token without the mark that tells where words begin, unless it is all there is."""
    text = tokenizer.id_to_token(token)
    if tokenizer.kind != "wordpiece":
        return text.removeprefix("▁").removeprefix("Ġ") or text
    return (text.removeprefix("##") if glued else text) or text
