"""Rows of token ids from words with tags; a word's label is at its first sub-word.

A sentence longer than a row is read in overlapping windows. Each word has its label only in the
window with the most context around it, so that no word counts twice in training or evaluation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from bert_jax.errors import UserError
from bert_jax.tasks.examples import LabelSet, Origin, TaggedExample, counted, listed
from bert_jax.tasks.rows import NO_LABEL
from bert_jax.tokenization.tokenizer import Tokenizer, make_row


@dataclass(frozen=True, eq=False)
class TagWindow:
    """A row of one sentence's sub-words, [CLS] ... [SEP] (see `make_row`), not padded."""

    example: int
    """Index of the window's sentence."""
    ids: Int32[np.ndarray, " L"]
    words: Int32[np.ndarray, " L"]
    """Index, in the sentence, of the word whose label is at a position; -1 at other positions."""
    labels: Int32[np.ndarray, " L"]
    """Label of each position's word; `NO_LABEL` if there is no word or its tag is unknown."""


@dataclass(frozen=True, eq=False)
class TagWindows:
    """Windows of a list of sentences."""

    windows: tuple[TagWindow, ...]
    """Windows in the order of the sentences, and from left to right within a sentence."""
    sentence_words: tuple[int, ...]
    """Number of words of each sentence."""
    warnings: tuple[str, ...]
    """Warnings about sentences in several windows, words without tokens, and unknown tags."""

    def gather(self, predictions: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return one value per word for each sentence, given one value per position.

        `predictions` has an array of integers or probabilities for each window, with an entry for
        each position; entries after the window's last position are padding.
        """
        kind = np.float64 if predictions and predictions[0].dtype.kind == "f" else np.int32
        found = [np.full(words, NO_LABEL, kind) for words in self.sentence_words]
        for window, values in zip(self.windows, predictions, strict=True):
            here = window.words >= 0
            found[window.example][window.words[here]] = values[: len(here)][here]
        return found


def tag_windows(
    examples: Sequence[TaggedExample],
    tokenizer: Tokenizer,
    labels: LabelSet | None = None,
    *,
    max_length: int = 128,
    stride: int = 64,
) -> TagWindows:
    """Cut sentences into windows of at most `max_length` ids, including [CLS] and [SEP].

    Each word is encoded on its own, as a word inside a sentence. A word without tokens (a
    zero-width space) becomes [UNK], so that it can be labelled. A word whose tag is not among
    `labels` has `NO_LABEL`, and a warning names such tags; if `labels` is None, all words have
    `NO_LABEL`. `stride` is the number of ids between two windows' starts (`doc_stride` in BERT).
    Raise a UserError if `max_length` or `stride` is out of range.
    """
    room = max_length - 2
    if room < 1:
        raise UserError(f"max_length is {max_length}; [CLS], a sub-word and [SEP] need 3 or more")
    if not 1 <= stride <= room:
        raise UserError(
            f"stride is {stride}; expected 1 to {room} for max_length {max_length}, or sub-words "
            "would be left out between windows"
        )
    words = list(dict.fromkeys(word for each in examples for word in each.tokens))
    pieces = dict(zip(words, tokenizer.encode_words(words), strict=True))
    unknown = np.array([tokenizer.special_ids.unk], np.int32)
    windows: list[TagWindow] = []
    long: list[Origin] = []
    unreadable: list[Origin] = []
    strange: list[tuple[str, Origin]] = []
    for number, example in enumerate(examples):
        parts = [pieces[word] for word in example.tokens]
        if not all(map(len, parts)):
            unreadable += [example.origin] * sum(not len(part) for part in parts)
            parts = [part if len(part) else unknown for part in parts]
        ids = np.concatenate(parts)
        first = np.cumsum([0, *map(len, parts[:-1])])
        label = np.full(len(parts), NO_LABEL, np.int32)
        if labels is not None and example.tags is not None:
            for word, tag in enumerate(example.tags):
                if (known := labels.find(tag)) is not None:
                    label[word] = known
                elif tag and labels.find(tag.replace("B-", "I-", 1)) is None:
                    strange.append((tag, example.origin))
        starts = np.arange(0, max(1, len(ids) - room + stride), stride)
        ends = np.minimum(starts + room, len(ids))
        if len(starts) > 1:
            long.append(example.origin)
        # A position is labelled by the window that maximises min(positions to the left, positions
        # to the right); the first window wins ties. Later windows have less context on the left
        # and more on the right, so each window labels consecutive positions, up to where the next
        # window's left side exceeds this window's right side.
        last = np.append((starts[1:] + ends[:-1] - 1) // 2 + 1, ends[-1])
        bounds = np.searchsorted(first, last)
        words_of = np.split(np.arange(len(parts)), bounds[:-1])
        for start, end, mine in zip(starts, ends, words_of, strict=True):
            row = make_row(tokenizer, ids[start:end]).ids
            positions = first[mine] - start + tokenizer.special_ids.opens
            owned, marks = np.full((2, len(row)), NO_LABEL, np.int32)
            owned[positions], marks[positions] = mine, label[mine]
            windows.append(TagWindow(number, row, owned, marks))
    warnings = counted(f"sentences of more than {room} sub-words, read in windows", long)
    warnings += counted("words for which the tokenizer has no token, read as [UNK]", unreadable)
    names = listed(sorted({tag for tag, _ in strange}), 100)
    what = f"words with tags that the model does not know, counted as misses: {names}"
    warnings += counted(what, [origin for _, origin in strange])
    return TagWindows(tuple(windows), tuple(len(each.tokens) for each in examples), warnings)
