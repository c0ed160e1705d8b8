"""Scores of translations: sacreBLEU's BLEU and chrF, with confidence intervals.

`best_constant` computes a baseline: the best BLEU of a system that outputs the same text for every
sentence. Give texts cased and untokenized; sacreBLEU tokenizes them with its tokenizer 13a (Post
2018, "A Call for Clarity in Reporting BLEU Scores").
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bert_jax.errors import needs_package
from bert_jax.tasks.reports.intervals import Grounds, intervals

BUCKETS = {"up to 10": (1, 10), "11 to 15": (11, 15), "16 to 20": (16, 20), "above 20": (21, None)}
"""Smallest and largest number of source words in each row of `by_length`, by the row's name."""
_ORDERS = range(1, 5)


@dataclass(frozen=True)
class Score:
    """Value of a translation metric, from 0 to 100, with its confidence interval."""

    value: float
    interval: tuple[float, float] | None
    """Bounds of the 95% confidence interval over sentences; None if there is no interval."""
    signature: str
    """Settings of the metric as sacreBLEU writes them; quote them with the score."""


class Constant(NamedTuple):
    """Baseline that outputs one text for every sentence: the best such text, and its BLEU."""

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
        rows.append({
            "words": words, "pairs": len(at),
            "bleu": bleu(found, wanted).value, "chrf": chrf(found, wanted).value,
        })  # fmt: skip
    return rows


def best_constant(references: Sequence[str], captions: Sequence[str]) -> Constant:
    """Find the constant output with the best BLEU, among the training targets `captions`."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokenize, compute = Tokenizer13a(), _metrics().BLEU.compute_bleu
    held: Counter[tuple[tuple[str, ...], int]] = Counter()
    length = 0
    for reference in references:
        tokens = tokenize(reference).split()
        length += len(tokens)
        for ngram, count in _ngrams(tokens):
            for least in range(1, count + 1):
                held[ngram, least] += 1  # references with the n-gram at least `least` times
    best = Constant("", 0.0)
    for caption in dict.fromkeys(captions):
        tokens = tokenize(caption).split()
        correct = [0] * len(_ORDERS)
        for ngram, count in _ngrams(tokens):
            correct[len(ngram) - 1] += sum(held[ngram, least] for least in range(1, count + 1))
        total = [max(len(tokens) - n + 1, 0) * len(references) for n in _ORDERS]
        score = compute(
            correct, total, len(tokens) * len(references), length, smooth_method="exp"
        ).score
        if score > best.bleu:
            best = Constant(caption, score)
    return best


def _ngrams(tokens: Sequence[str]) -> Iterator[tuple[tuple[str, ...], int]]:
    counts: Counter[tuple[str, ...]] = Counter()
    for n in _ORDERS:
        counts.update(zip(*(tokens[place:] for place in range(n)), strict=False))
    yield from counts.items()


def _metrics() -> Any:
    with needs_package("scoring translations needs sacreBLEU: pip install 'bert_jax[translate]'"):
        from sacrebleu import metrics
    return metrics


def _score(
    name: str, hypotheses: Sequence[str], references: Sequence[str], *, with_interval: bool = False
) -> Score:
    """Compute a metric of sacreBLEU, with a 95% interval if `with_interval` is true."""
    metric = getattr(_metrics(), name)()
    value = metric.corpus_score(list(hypotheses), [list(references)]).score
    ends = None
    if with_interval:
        # sacreBLEU's own resampling fails if a sample scores 0.
        stats = np.array(metric._extract_corpus_statistics(hypotheses, [references]), float)

        def score(w: np.ndarray) -> dict[str, np.ndarray]:
            return {"": np.array([metric._compute_score_from_stats(s).score for s in w @ stats])}

        same = [a == b for a, b in zip(hypotheses, references, strict=True)]
        right = np.where(same, 1.0, 0.5)  # 0.5: other translations are neither right nor wrong
        ends = intervals(Grounds(score, np.arange(len(stats)), right, most=100.0)).found.get("")
    return Score(value, ends, metric.get_signature().format())


bleu = partial(_score, "BLEU")
"""BLEU (tokenizer 13a, cased)."""
chrf = partial(_score, "CHRF")
"""chrF2."""
