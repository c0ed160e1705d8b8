"""Precision, recall and F1 of entities; an entity is right with the right words and type.

Two readings of tags, as in seqeval, and equal to it on all tags that it knows:

- lenient (`scheme=None`), the CoNLL script's: an I that continues nothing begins an entity. On the
  prefixes B, I and O it is what conlleval does. That script knows no S (two in a row are one entity
  to it) and lets a B continue an entity that ended in E; here, as in seqeval, S is an entity and an
  entity ends at E. The letters L, U and M, which seqeval takes for no tags, are read as E, S and I.
- strict (`scheme="iob2"` and so on), seqeval's `mode="strict"`: what the scheme does not allow is
  no entity. Both differ only on unsound tags; a model may predict them, so say which was used.
  Published CoNLL-2003 scores are lenient.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bert_jax.tasks.tagging.schemes import Scheme, entities, strict_entities


class EntityScore(NamedTuple):
    """Counts of entities and the shares made from them; 0 where a denominator is 0."""

    correct: int
    """Number of entities both predicted and in the data."""
    predicted: int
    gold: int
    """Number of entities in the data."""

    @property
    def precision(self) -> float:
        """Share of the predicted entities that are right."""
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the entities in the data that are found."""
        return self.correct / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        total = self.predicted + self.gold
        return 2 * self.correct / total if total else 0.0


@dataclass(frozen=True)
class EntityScores:
    """Scores of a tagging."""

    overall: EntityScore
    """Score over all types together (micro average)."""
    per_type: Mapping[str, EntityScore]
    """Scores of the types met in data or predictions, sorted by name."""
    token_accuracy: float
    """Share of words whose tag equals the tag in the data."""

    @property
    def macro_f1(self) -> float:
        """Mean of the types' F1; 0 without any type."""
        scores = [score.f1 for score in self.per_type.values()]
        return sum(scores) / len(scores) if scores else 0.0

    def table(self) -> str:
        """Return the figures in per cent, as the CoNLL script rounds them, one line a type."""
        width = max([8, *map(len, self.per_type)])
        head = f"{'':{width}}  precision  recall      F1  entities"
        lines = [
            f"{name:{width}}  {100 * s.precision:9.2f}  {100 * s.recall:6.2f}  {100 * s.f1:6.2f}"
            f"  {s.gold:8,}"
            for name, s in [*self.per_type.items(), ("all", self.overall)]
        ]
        return "\n".join([head, *lines, f"token accuracy {100 * self.token_accuracy:.2f}"])


def entity_scores(
    gold: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    *,
    scheme: Scheme | None = None,
) -> EntityScores:
    """Score predicted tags; an entity never goes beyond its sentence.

    `scheme` names the scheme of the strict reading; None: the lenient reading.

    Raises:
        ValueError: no words at all, sentences of different number or length, or a word without a
            valid tag.
    """
    if len(gold) != len(predicted):
        raise ValueError(f"{len(gold)} sentences in the data, {len(predicted)} predicted")
    golds: Counter[str] = Counter()
    guesses: Counter[str] = Counter()
    correct: Counter[str] = Counter()
    words = hits = 0
    for number, (truth, guess) in enumerate(zip(gold, predicted, strict=True)):
        if len(truth) != len(guess):
            raise ValueError(f"sentence {number}: {len(truth)} tags, {len(guess)} predicted")
        words += len(truth)
        hits += sum(a == b for a, b in zip(truth, guess, strict=True))
        first, second = (
            set(entities(tags) if scheme is None else strict_entities(tags, scheme))
            for tags in (truth, guess)
        )
        golds.update(entity.type for entity in first)
        guesses.update(entity.type for entity in second)
        correct.update(entity.type for entity in first & second)
    if not words:
        raise ValueError("no words to score")
    return EntityScores(
        EntityScore(correct.total(), guesses.total(), golds.total()),
        {k: EntityScore(correct[k], guesses[k], golds[k]) for k in sorted(guesses | golds)},
        hits / words,
    )
