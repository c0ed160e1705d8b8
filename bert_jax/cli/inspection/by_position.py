"""Held-out masked-LM loss by position and masking rate, which shows how a model uses long rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from bert_jax.cli.inspection.evaluate import HeldOutRun
from bert_jax.distributed.parallel.in_flight import in_flight
from bert_jax.distributed.parallel.sharding import place_batch
from bert_jax.errors import UserError
from bert_jax.objectives.masked_lm import MaskedLM, MaskedLMByPosition
from bert_jax.terminal import progress_bar
from bert_jax.training.pretrain.evaluate import EVAL_SEED
from bert_jax.training.steps.step import make_eval_step


@dataclass(frozen=True)
class PositionLosses:
    """Sums over held-out rows for R masking rates and K buckets of positions.

    A token's position is the number of tokens, including [CLS], before it in its segment. The
    position in the row does not matter, since a token attends to no other segment of a packed row.
    """

    step: int
    length: int
    """Number of tokens in a row."""
    trained_length: int
    """Number of tokens in the longest training row."""
    num_rows: int
    unigram_entropy: float | None
    """Loss in nats of a model that ignores its input."""
    edges: tuple[int, ...]
    """Edges of the buckets, K + 1 positions."""
    rates: tuple[float, ...]
    """Masking rates: shares of the tokens that are masked and predicted."""
    loss: np.ndarray
    """Sums (R, K) of the losses in nats, float64."""
    correct: np.ndarray
    """Numbers (R, K) of tokens that were predicted correctly, float64."""
    count: np.ndarray
    """Numbers (R, K) of masked tokens, float64."""

    def as_json(self) -> dict[str, Any]:
        """Return means as JSON values; the means of a bucket without masked tokens are None."""
        names = ("step", "length", "trained_length", "num_rows", "unigram_entropy")
        rates = []
        for r, rate in enumerate(self.rates):
            sums = zip(self.loss[r], self.correct[r], self.count[r], strict=True)
            buckets = [
                {"from": begin, "to": end - 1, **_means(*each)}
                for begin, end, each in zip(self.edges[:-1], self.edges[1:], sums, strict=True)
            ]
            total = _means(self.loss[r].sum(), self.correct[r].sum(), self.count[r].sum())
            rates.append({"masking_rate": rate, **total, "positions": buckets})
        return {name: getattr(self, name) for name in names} | {"masking_rates": rates}


def _means(loss: float, correct: float, count: float) -> dict[str, Any]:
    if not count:
        return {"loss": None, "accuracy": None, "num_masked": 0}
    return {
        "loss": float(loss / count), "accuracy": float(correct / count), "num_masked": int(count),
    }  # fmt: skip


def measure(run: HeldOutRun, edges: Sequence[int], rates: Sequence[float]) -> PositionLosses:
    """Evaluate a run on held-out rows at each of the masking `rates`; `edges` bound the buckets.

    Raise a UserError if the run's objective is not masked_lm.
    """
    objective = run.settings.objective
    if not isinstance(objective, MaskedLM):
        raise UserError(
            "the run's objective is not masked_lm; losses by position need masked tokens"
        )
    given = {field.name: getattr(objective, field.name) for field in fields(MaskedLM)}
    masking = replace(objective.masking, rate=max(rates), max_predictions=None)
    metered = MaskedLMByPosition(**{**given, "masking": masking}, edges=tuple(edges))
    step = make_eval_step(replace(run.settings, objective=metered), run.mesh, EVAL_SEED)
    sums = {name: np.zeros((len(rates), len(edges) - 1)) for name in ("loss", "correct", "count")}

    def items() -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
        for batch in progress_bar(run.rows, of="held-out text", unit="batches"):
            for number, rate in enumerate(rates):
                shares = np.full(len(batch["row_index"]), rate, np.float32)
                yield number, {**batch, "masking_rates": shares}

    def dispatch(item: tuple[int, Mapping[str, np.ndarray]]) -> Any:
        return step(run.params, place_batch(item[1], run.mesh)).outputs

    for (number, _), found in in_flight(dispatch, items()):
        for name, total in sums.items():
            total[number] += found[name].sum(axis=0, dtype=np.float64)
    return PositionLosses(
        run.step, run.length, run.trained_length, run.rows.num_rows, metered.baseline,
        tuple(edges), tuple(rates), **sums,
    )  # fmt: skip


def position_lines(losses: PositionLosses) -> list[str]:
    """Tabulate loss, accuracy and number of masked tokens, with a row per bucket of positions."""
    entropy = losses.unigram_entropy
    lines = [
        f"step {losses.step:,}: {losses.num_rows:,} held-out rows of {losses.length:,} tokens"
        + ("" if entropy is None else f"; unigram entropy {entropy:.3f} nats"),
        "nats, accuracy and number of the masked tokens, by masking rate and by position in the "
        "document:",
        "",
        " " * 14 + "".join(f"{f'{100 * rate:g}% masked':>27}" for rate in losses.rates),
    ]
    columns = [
        [*rate["positions"], rate | {"from": None}] for rate in losses.as_json()["masking_rates"]
    ]
    for cells in zip(*columns, strict=True):
        begin = cells[0]["from"]
        name = "all" if begin is None else f"{begin}-{cells[0]['to']}"
        lines.append(f"{name:>14}" + "".join(_cell(cell) for cell in cells))
    return lines


def _cell(cell: dict[str, Any]) -> str:
    if cell["loss"] is None:
        return f"{'-':>9}{'-':>8}{0:>10}"
    return f"{cell['loss']:>9.3f}{100 * cell['accuracy']:>7.1f}%{cell['num_masked']:>10,}"
