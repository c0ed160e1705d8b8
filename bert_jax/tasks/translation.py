"""Scores of translations: sacreBLEU's BLEU and chrF, and data for their confidence intervals.

`best_constant` computes a baseline: the best BLEU of a system that outputs the same text for every
sentence. Give texts cased and untokenized; sacreBLEU tokenizes them with its tokenizer 13a (Post
2018, "A Call for Clarity in Reporting BLEU Scores").
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

from bert_jax.errors import needs_package
from bert_jax.tasks.reports.intervals import Grounds, unweighted
from bert_jax.tokenization.tokenizer import Tokenizer

BUCKETS = {"up to 10": (1, 10), "11 to 15": (11, 15), "16 to 20": (16, 20), "above 20": (21, None)}
"""Smallest and largest number of source words in each row of `by_length`, by the row's name."""
_ORDERS = 1, 4


class Quality(NamedTuple):
    """BLEU (tokenizer 13a, cased) and chrF2 of translations, by the names `bleu` and `chrf`."""

    values: dict[str, float]
    """Scores, from 0 to 100."""
    grounds: Grounds
    """Data for confidence intervals of the scores over sentences."""
    signatures: dict[str, str]
    """Settings of the metrics as sacreBLEU writes them; quote them with the scores."""


class Constant(NamedTuple):
    """Best baseline that outputs the same text for every sentence, and the baseline's BLEU."""

    text: str
    bleu: float


def by_length(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> list[dict[str, Any]]:
    """Score pairs by length of the source; return a row for each of `BUCKETS` that has pairs."""
    rows: list[dict[str, Any]] = []
    counts = [len(source.split()) for source in sources]
    for words, (first, last) in BUCKETS.items():
        at = [n for n, count in enumerate(counts) if first <= count <= (last or count)]
        if not at:
            continue
        found, wanted = [hypotheses[n] for n in at], [references[n] for n in at]
        rows.append({"words": words, "pairs": len(at), **quality(found, wanted).values})
    return rows


def best_constant(references: Sequence[str], captions: Sequence[str]) -> Constant:
    """Find the constant output with the best BLEU, among the training targets `captions`."""
    compute = _metrics().BLEU.compute_bleu
    from sacrebleu.metrics.helpers import extract_all_word_ngrams
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokenize = Tokenizer13a()
    held: Counter[tuple[tuple[str, ...], int]] = Counter()
    length = 0
    for reference in references:
        counts, size = extract_all_word_ngrams(tokenize(reference), *_ORDERS)
        length += size
        # Number of references that contain the n-gram at least `least` times.
        held.update((ngram, least) for ngram, n in counts.items() for least in range(1, n + 1))
    best = Constant("", 0.0)
    for caption in dict.fromkeys(captions):
        counts, size = extract_all_word_ngrams(tokenize(caption), *_ORDERS)
        correct = [0] * _ORDERS[1]
        for ngram, n in counts.items():
            correct[len(ngram) - 1] += sum(held[ngram, least] for least in range(1, n + 1))
        total = [max(size - n, 0) * len(references) for n in range(_ORDERS[1])]
        score = compute(correct, total, size * len(references), length, smooth_method="exp").score
        if score > best.bleu:
            best = Constant(caption, score)
    return best


def _metrics() -> Any:
    with needs_package("scoring translations needs sacreBLEU: pip install 'bert_jax[translate]'"):
        from sacrebleu import metrics
    return metrics


def quality(hypotheses: Sequence[str], references: Sequence[str]) -> Quality:
    """Compute BLEU and chrF of translations; raise a UserError if sacreBLEU is not installed."""
    made = {"bleu": _metrics().BLEU(), "chrf": _metrics().CHRF()}
    # sacreBLEU's own resampling fails if a sample scores 0.
    stats = {
        name: np.array(metric._extract_corpus_statistics(hypotheses, [references]), float)
        for name, metric in made.items()
    }

    def score(w: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: np.array([metric._compute_score_from_stats(s).score for s in w @ stats[name]])
            for name, metric in made.items()
        }

    same = [a == b for a, b in zip(hypotheses, references, strict=True)]
    right = np.where(same, 1.0, 0.5)  # 0.5: other translations are neither right nor wrong
    grounds = Grounds(score, np.arange(len(same)), right, most=100.0)
    signatures = {name: metric.get_signature().format() for name, metric in made.items()}
    return Quality(unweighted(score, len(same)), grounds, signatures)


def decoded(tokenizer: Tokenizer, ids: Integer[np.ndarray, " n"]) -> str:
    """Decode a translation to one line of text, without special tokens except the unknown token."""
    special = tokenizer.special_ids
    silent = (special.pad, special.cls, special.sep, special.mask)
    return " ".join(tokenizer.decode(ids[~np.isin(ids, silent)]).splitlines()).strip()
