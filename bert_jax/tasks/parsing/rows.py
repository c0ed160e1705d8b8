"""Rows of sentences: a word stands at its first sub-word, the root at the first token."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from bert_jax.tasks.parsing.sources import Sentence
from bert_jax.tasks.problems import counted
from bert_jax.tasks.rows import NO_LABEL, Rows
from bert_jax.tokenization.tokenizer import Tokenizer, make_row


class ParsingRows:
    """Rows of the sentences of one file, one a sentence.

    A sentence longer than a row is cut; the words after the cut have no position.
    """

    def __init__(
        self,
        sentences: Sequence[Sentence],
        tokenizer: Tokenizer,
        relations: Mapping[str, int],
        max_length: int,
    ) -> None:
        words = list(dict.fromkeys(word for each in sentences for word in each.words))
        unknown = np.array([tokenizer.special_ids.unk], np.int32)
        pieces = {
            word: ids if len(ids) else unknown
            for word, ids in zip(words, tokenizer.encode_words(words), strict=True)
        }
        self.positions: list[np.ndarray] = []
        """Positions of the words of each sentence, up to its cut."""
        tokens: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        room = max_length - 2
        for sentence in sentences:
            parts = [pieces[word] for word in sentence.words]
            firsts = np.cumsum([0, *map(len, parts[:-1])])
            row = make_row(tokenizer, np.concatenate(parts)[:room]).ids
            positions = 1 + firsts[firsts < room]
            tokens.append(row)
            self.positions.append(positions)
            labels.append(_labels(sentence, positions, relations, len(row)))
        lengths = np.array([len(ids) for ids in tokens], np.int32)
        known = all(sentence.heads is not None for sentence in sentences)
        self.rows = Rows(tokens, lengths, labels if known else None)
        pairs = list(zip(sentences, self.positions, strict=True))
        long = [each.origin.line for each, read in pairs if len(read) < len(each.words)]
        self.warnings: tuple[str, ...] = ()
        """Count of the sentences that were cut, with lines."""
        if long:
            what = (
                f"sentences of more than {room} sub-words, cut there: each word behind the cut is "
                "attached to the word before"
            )
            self.warnings = (counted(sentences[0].origin.path, what, long),)


def _labels(
    sentence: Sentence, positions: np.ndarray, relations: Mapping[str, int], length: int
) -> Int32[np.ndarray, " n"]:
    """Encode each word's head and relation: position of the head * relations + relation."""
    found: np.ndarray = np.full(length, NO_LABEL, np.int32)
    if sentence.heads is None or sentence.relations is None:
        return found
    at = [0, *positions.tolist()]
    words = zip(positions.tolist(), sentence.heads, sentence.relations, strict=False)
    for position, head, relation in words:
        if head < len(at) and relation in relations:
            found[position] = at[head] * len(relations) + relations[relation]
    return found
