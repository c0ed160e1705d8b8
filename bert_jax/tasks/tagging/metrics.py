"""Precision, recall and F1 of entities: right is what has the right words and the right type.

Tags are read as the CoNLL script does, and equal to seqeval on all tags that seqeval knows: an I
that continues nothing begins an entity. On the prefixes B, I and O it is what conlleval does. That
script knows no S (two in a row are one entity to it) and lets a B continue an entity that ended in
E; here, as in seqeval, S stands alone and an entity ends at E. The letters L, U and M, which
seqeval takes for no tags, are read as E, S and I.
"""

from collections.abc import Sequence

from bert_jax.tasks.tagging.schemes import entities

ENTITY_METRICS = ("f1", "precision", "recall", "accuracy")


def entity_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Score predicted tags; an entity never goes beyond its sentence.

    Args:
        gold: the tags of each sentence.
        predicted: likewise.

    Returns:
        `ENTITY_METRICS`: F1, precision and recall over all types together (micro average), 0 where
        nothing can be divided; accuracy is the share of words whose tag is exactly that of `gold`.

    Raises:
        ValueError: no words at all, sentences of different number or length, or what is no tag.
    """
    if len(gold) != len(predicted):
        raise ValueError(f"{len(gold)} sentences in the data, {len(predicted)} predicted")
    words = hits = correct = found = right = 0
    for number, (truth, guess) in enumerate(zip(gold, predicted, strict=True)):
        if len(truth) != len(guess):
            raise ValueError(f"sentence {number}: {len(truth)} tags, {len(guess)} predicted")
        words += len(truth)
        hits += sum(a == b for a, b in zip(truth, guess, strict=True))
        expected, guessed = set(entities(truth)), set(entities(guess))
        correct += len(expected & guessed)
        found += len(guessed)
        right += len(expected)
    if not words:
        raise ValueError("no words to score")
    f1 = 2 * correct / (found + right) if found + right else 0.0
    precision, recall = (correct / total if total else 0.0 for total in (found, right))
    return dict(zip(ENTITY_METRICS, (f1, precision, recall, hits / words), strict=True))
