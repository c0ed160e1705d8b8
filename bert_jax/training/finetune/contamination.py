"""Separate scores of the examples that a corpus contains and of the other examples."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bert_jax.artefacts.saved.lineage import reports_on_ancestors
from bert_jax.data.corpus.overlap.evaluation import text_key
from bert_jax.data.corpus.overlap.search import merged, read_report, share_of
from bert_jax.errors import UserError
from bert_jax.tasks.task import Outputs, Split


def known_texts(workdir: Path | str, reports: Sequence[Path]) -> dict[str, tuple[int, int]]:
    """Count each evaluation text's n-grams, and its n-grams in the run's corpora, by text key.

    Args:
        workdir: Directory of a fine-tuning run.
        reports: Files of `bert-jax contamination`; none takes the reports beside the corpora in the
            run's lineage.

    Raises:
        UserError: A file is no such report.
    """
    found = [read_report(path) for path in reports] or reports_on_ancestors(workdir)
    return merged(found)


def divide(
    split: Split, texts: Mapping[str, tuple[int, int]], *, needed: bool
) -> dict[str, list[int]]:
    """Sort the numbers of the examples under the keys clean, seen and not judged.

    Args:
        split: Examples.
        texts: See `known_texts`.
        needed: Whether a split without a known example is an error; otherwise such a split is not
            divided, and nothing is returned.

    Raises:
        UserError: See `needed`.
    """
    keys = [tuple(map(text_key, each)) for each in split.texts()]
    if not any(all(key in texts for key in each) for each in keys):
        if needed:
            raise UserError(
                f"{split.name}: none of its {len(keys):,} examples is in the report of "
                "--contamination, which is on other texts; name the report on this file"
            )
        return {}
    shares = np.array([share_of(texts, each) for each in keys])
    parts = {"clean": shares == 0, "seen": shares > 0, "unjudged": np.isnan(shares)}
    return {name: np.flatnonzero(chosen).tolist() for name, chosen in parts.items()}


def scores_apart(
    split: Split, outputs: Outputs, scores: Mapping[str, float], parts: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Return the scores of clean and of seen examples, named clean/NAME and seen/NAME.

    Args:
        split: Examples with labels.
        outputs: Logits of all rows.
        scores: Scores of all examples, for a null threshold.
        parts: See `divide`.
    """
    found: dict[str, float] = {}
    for name, examples in parts.items():
        found[f"{name}/examples"] = float(len(examples))
        if examples and name != "unjudged":
            part, rows = split.select(examples)
            some = part.score([outputs[row] for row in rows], scores)
            found |= {f"{name}/{metric}": value for metric, value in some.items()}
    return found
