"""Tagging of words: tags and entities in raw texts or in lists of words."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import softmax
from typing_extensions import override

from bert_jax.errors import UserError
from bert_jax.infer.predictor import Answer, Predictor, Prepared, text_field
from bert_jax.tasks.examples import Origin, TaggedExample
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.tagging.schemes import entities, split_tag, to_tags
from bert_jax.tasks.tagging.windows import TagWindows, tag_windows

# As in BERT's tokenizer, each ideograph is a separate word. Kana and Hangul are not split.
_PART = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]"
    "|[^\\s\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]+"
)
_ABBREVIATION = re.compile(r"[^\W\d_]{1,2}(\.[^\W\d_]{1,2})+\.$")


@dataclass(frozen=True)
class TaggableText:
    """Words to tag, and the character ranges of the words in the raw text."""

    words: TaggedExample
    text: str | None
    """Raw text. None means that the caller gave a list of words."""
    offsets: tuple[tuple[int, int], ...]
    """Characters [start, end) of each word in the text; empty without a text."""


def split_words(text: str) -> list[tuple[int, int]]:
    """Return the characters [start, end) of each word in a text.

    The rules follow tagged corpora. White space separates words. A punctuation mark or symbol
    at either end of a word becomes a word of its own; inside a word (`didn't`, `1,000`), it does
    not. Abbreviations such as `U.S.` keep their last full stop. Every Chinese ideograph is a word.
    """
    found: list[tuple[int, int]] = []
    for part in _PART.finditer(text):
        start, end = part.span()
        behind: list[tuple[int, int]] = []
        while start < end and _is_mark(text[start]):
            found.append((start, start + 1))
            start += 1
        while start < end and _is_mark(text[end - 1]) and not _ABBREVIATION.match(text, start, end):
            behind.append((end - 1, end))
            end -= 1
        if start < end:
            found.append((start, end))
        found += reversed(behind)
    return found


def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


@dataclass(eq=False)
class Tagger(Predictor[TaggableText]):
    """Predictor of words' tags. Long texts are read in overlapping windows (see `tag_windows`)."""

    FIELDS = ("text", "tokens")
    PER_TOKEN = True

    def __post_init__(self) -> None:
        model = self.model
        model.require("tag", "tagging head")
        assert model.outputs is not None  # `require` checks it
        self._names = model.outputs.labels
        self._of_entities = "O" in self._names and all(map(split_tag, self._names))
        own, room = model.outputs.reading, model.max_length - 2
        self._stride = own.stride if own and own.stride <= room else max(1, room // 2)

    @override
    def example(self, fields: Mapping[str, Any], origin: Origin) -> TaggableText:
        if "tokens" not in fields:
            text = text_field(fields, "text", origin)
            offsets = tuple(split_words(text))
            words = tuple(text[start:end] for start, end in offsets)
            return TaggableText(TaggedExample("", words, None, origin), text, offsets)
        words = fields["tokens"]
        if not isinstance(words, list | tuple) or not all(isinstance(w, str) and w for w in words):
            raise UserError(
                f"{origin}: the field 'tokens' is {words!r:.60}; it must be a list of words"
            )
        return TaggableText(TaggedExample("", tuple(words), None, origin), None, ())

    @override
    def prepare(self, examples: Sequence[TaggableText]) -> Prepared[TaggableText]:
        words = [example.words for example in examples if example.words.tokens]
        length = self.model.max_length
        windows = tag_windows(words, self.model.tokenizer, max_length=length, stride=self._stride)
        tokens = [window.ids for window in windows.windows]
        return Prepared(examples, Rows(tokens, np.array([*map(len, tokens)], np.int32)), windows)

    @override
    def answers(self, prepared: Prepared[TaggableText], outputs: Sequence[Any]) -> list[Answer]:
        windows: TagWindows = prepared.context
        lengths = prepared.rows.lengths
        flat = np.concatenate([np.zeros((0, len(self._names)), np.float32), *outputs])
        begins = np.cumsum(lengths) - lengths
        own = [begin + np.arange(n) for begin, n in zip(begins, lengths, strict=True)]
        places = iter(windows.gather(own))
        return [
            self._answer(example, flat[next(places)] if example.words.tokens else flat[:0])
            for example in prepared.examples
        ]

    @override
    def lines(self, example: TaggableText, answer: Answer) -> list[str]:
        if "entities" not in answer:
            return [" ".join(map("/".join, zip(answer["tokens"], answer["tags"], strict=True)))]
        found = [f"{e['type']:8} {e['text']}   {e['score']:.3f}" for e in answer["entities"]]
        return found or ["(no entities)"]

    def _answer(self, example: TaggableText, logits: np.ndarray) -> Answer:
        """Return the answer for one text, with the fields described in `LoadedModel.tag`.

        Entity tags are repaired to valid IOB2, as in `bert-jax predict`. The score of an entity is
        the mean, over its words, of the probability of the predicted tag.
        """
        words = example.words.tokens
        tags = [self._names[n] for n in logits.argmax(axis=-1)]
        answer: Answer = {"tokens": list(words), "tags": tags}
        if example.text is not None:
            answer["offsets"] = [list(offset) for offset in example.offsets]
        if not self._of_entities:
            return answer
        shares = softmax(logits.astype(np.float64), axis=-1).max(axis=-1)
        found = entities(tags)
        answer["tags"] = list(to_tags(found, len(tags)))
        answer["entities"] = []
        for kind, first, end in found:
            entity: Answer = {"type": kind, "words": [first, end]}
            if example.text is None:
                entity["text"] = " ".join(words[first:end])
            else:
                start, stop = example.offsets[first][0], example.offsets[end - 1][1]
                entity |= {"start": start, "end": stop, "text": example.text[start:stop]}
            entity["score"] = round(float(shares[first:end].mean()), 6)
            answer["entities"].append(entity)
        return answer
