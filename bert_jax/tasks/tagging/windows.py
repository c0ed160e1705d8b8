"""Sequences of token ids from words with tags; a word's label is at its first sub-word.

A sentence longer than a sequence is read in overlapping windows, and each word has its label in
exactly one window, where it has the most context: so no word counts twice in training, and each
word is scored once in evaluation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Integer

from bert_jax.errors import UserError
from bert_jax.tasks.examples import LabelSet, Origin, TaggedExample, counted, listed
from bert_jax.tasks.rows import NO_LABEL
from bert_jax.tokenization.tokenizer import Tokenizer, make_row


@dataclass(frozen=True, eq=False)
class TagWindow:
    """A sequence [CLS] sub-words [SEP], not padded."""

    example: int
    """Number of the sentence in the list of sentences."""
    ids: Int32[np.ndarray, " L"]
    words: Int32[np.ndarray, " L"]
    """Number of the word in its sentence, where this window labels the word; elsewhere -1."""
    labels: Int32[np.ndarray, " L"]
    """Label of that word; `NO_LABEL` elsewhere, and everywhere without tags."""


@dataclass(frozen=True, eq=False)
class TagWindows:
    """The sequences of a list of sentences."""

    windows: tuple[TagWindow, ...]
    """Sequences in the order of the sentences, and from left to right within a sentence."""
    sentence_words: tuple[int, ...]
    """Number of words of each sentence."""
    warnings: tuple[str, ...]
    """Counts of sentences in several windows, of unreadable words and of unknown tags."""

    def gather(self, predictions: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return one value a word for each sentence, from one value a position.

        Each window has an array of whole numbers, or of probabilities, that begins with its
        positions; what follows them, padding, is left out.

        Raises:
            ValueError: not one array for each window, or one that is shorter than its window.
        """
        if len(predictions) != len(self.windows):
            raise ValueError(f"{len(self.windows)} windows, {len(predictions)} predictions")
        kind = np.float64 if predictions[0].dtype.kind == "f" else np.int32
        found = [np.full(words, NO_LABEL, kind) for words in self.sentence_words]
        for number, (window, values) in enumerate(zip(self.windows, predictions, strict=True)):
            if len(values) < len(window.ids):
                raise ValueError(f"window {number}: {len(window.ids)} ids, {len(values)} values")
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
    """Return sentences as sequences of at most `max_length` ids, [CLS] and [SEP] included.

    Each word is encoded by itself, as a word inside a sentence. A word without tokens (a zero-width
    space) becomes [UNK], so that it too is labelled. A word whose tag is not among `labels` has
    `NO_LABEL`, and a warning names such tags; where `labels` is None, all words have `NO_LABEL`.
    `stride` ids lie between the starts of two windows (BERT's `doc_stride`; Transformers uses this
    name for the overlap).

    Raises:
        UserError: `max_length` or `stride` out of range.
    """
    room = max_length - 2
    if room < 1:
        raise UserError(f"max_length is {max_length}; [CLS], a sub-word and [SEP] need 3")
    if not 1 <= stride <= room:
        raise UserError(
            f"stride is {stride}; from 1 to {room} for max_length {max_length}, else sub-words "
            "would fall between two windows"
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
                elif tag:
                    strange.append((tag, example.origin))
        starts = np.arange(0, max(1, len(ids) - room + stride), stride)
        ends = np.minimum(starts + room, len(ids))
        if len(starts) > 1:
            long.append(example.origin)
        bounds = np.searchsorted(first, _ends_of_most_context(starts, ends))
        words_of = np.split(np.arange(len(parts)), bounds[:-1])
        for start, end, mine in zip(starts, ends, words_of, strict=True):
            positions = first[mine] - start + 1
            owned, marks = np.full((2, end - start + 2), NO_LABEL, np.int32)
            owned[positions], marks[positions] = mine, label[mine]
            row = make_row(tokenizer, ids[start:end])
            windows.append(TagWindow(number, row.ids, owned, marks))
    warnings = counted(f"sentences of more than {room} sub-words, read in windows", long)
    warnings += counted("words of which the tokenizer leaves nothing, read as [UNK]", unreadable)
    names = listed(sorted({tag for tag, _ in strange}), 100)
    what = f"words with tags that the model does not know, counted as misses: {names}"
    warnings += counted(what, [origin for _, origin in strange])
    return TagWindows(tuple(windows), tuple(len(each.tokens) for each in examples), warnings)


def _ends_of_most_context(
    starts: Integer[np.ndarray, " N"], ends: Integer[np.ndarray, " N"]
) -> Integer[np.ndarray, " N"]:
    """Return the end of the positions that each window owns, by the longest shorter side.

    A later window has more to the right of a position and less to the left, so the windows own
    consecutive positions. Of two windows with the same context, the first owns the position.
    """
    # The next window has more context once its left side exceeds this window's right side.
    return np.append((starts[1:] + ends[:-1] - 1) // 2 + 1, ends[-1])
