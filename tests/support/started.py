"""A text of random words for `bert-jax start`, and speeds that no clock has a part in."""

from pathlib import Path

import pytest
from made_texts import make_text

from bert_jax.cli.start import begin
from bert_jax.cli.start.choose import Speed
from bert_jax.cli.start.recipe import Size, recipe, tokens_per_step
from bert_jax.training.pretrain.corpus import Corpus

OPERATIONS = 1e10
"""Operations per second of the pretended machine."""


def write_text(path: Path, num_documents: int = 60) -> str:
    """About 20 kB."""
    path.write_text(make_text(num_documents))
    return str(path)


def speed_of(size: Size) -> Speed:
    """Return the speed of a size on the pretended machine."""
    tokens = tokens_per_step(recipe(size))
    return Speed(size.cost(tokens) / OPERATIONS, tokens)


def pretend_speeds(patch: pytest.MonkeyPatch) -> list[Size]:
    """Measure nothing; return the list to which each size is added when its speed is asked for."""
    asked: list[Size] = []

    def measured(corpus: Corpus, size: Size) -> Speed:
        asked.append(size)
        return speed_of(size)

    patch.setattr(begin, "_measured", measured)
    return asked
