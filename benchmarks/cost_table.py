"""What shipped recipes cost on TPU slices, by `bert-jax plan`: chip-hours, and dollars if priced.

    python benchmarks/cost_table.py
    python benchmarks/cost_table.py --only bert_tiny --only bert_base
    python benchmarks/cost_table.py --write docs/guide/costs.md

No TPU is needed, only libtpu. `CASES` has the recipes, slices and overrides;
`bert_jax/planning/prices.json` has the dollars of a chip-hour on demand. Each phase costs its steps
x the predicted seconds of a step x the chips of the slice. A step of a batch warm-up counts by its
rows. Phases that differ only in their learning rate, end or text have the same step, which is
compiled once. What was compiled before comes from the cache.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.config.command_line import load_config
from bert_jax.data.phases import PhaseConfig
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.planning.command import startable
from bert_jax.planning.compile import Plan, default_cache, row_tokens, with_vocabulary
from bert_jax.planning.output import memory_per_chip
from bert_jax.planning.planner import Planner
from bert_jax.planning.prices import PRICES, Price, read_prices
from bert_jax.planning.topology import Topology, parse_topology
from bert_jax.terminal import markdown_table
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.settings import with_batch_unit

UNKNOWN = "\N{EN DASH}"
BEGIN, END = "<!-- cost_table.py begins -->", "<!-- cost_table.py ends -->"


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    recipe: str
    topology: str
    overrides: tuple[str, ...] = ()
    """Fields that differ from the recipe, as `FIELD=VALUE`."""

    @property
    def command(self) -> str:
        """The command that prints the plans behind the row."""
        fields = [shlex.quote(f"--config.{each}") for each in self.overrides]
        first = f"bert-jax plan --config={self.recipe} --topology={self.topology} --phase=all"
        return " \\\n    ".join([first, *fields])

    def config(self) -> PretrainConfig:
        """Load the recipe with the overrides, and fill in the model's sizes."""
        overrides = [f"--config.{each}" for each in self.overrides]
        return with_vocabulary(load_config(PretrainConfig, f"pretrain/{self.recipe}", overrides))[0]


MODERN_VOCABULARY = "model.vocab_size=50368"


def once(chips: int) -> tuple[str, ...]:
    """Return settings that split the parameters over all chips, and gather them once a step."""
    return "mesh.data=1", f"mesh.fsdp={chips}", "training.gather=step"


CASES = (
    Case("bert_tiny", "v5e:1x1"),
    Case("electra_small", "v5e:1x1"),
    Case("bert_base", "v5e:4x4", once(16)),
    Case("bert_large", "v5p:4x4x4", once(64)),
    Case(
        "ettin_17m", "v5e:4x4",
        (MODERN_VOCABULARY, *once(16), "training.phases[0].accumulation=12",
         "training.phases[1].accumulation=32", "training.phases[2].accumulation=24"),
    ),
    Case(
        "modernbert_base", "v5e:16x16",
        (MODERN_VOCABULARY, *once(256), "training.accumulation=2",
         "training.reduce_dtype=bfloat16"),
    ),
    Case("neobert", "v5e:16x16", once(256)),
    Case("eurobert_210m", "v5e:16x16",
         ("model.vocab_size=128256", *once(256), "training.accumulation=2")),
)  # fmt: skip
"""Settings are those of the recipe's docstring and of docs/planning.md."""

SCORES = {
    "bert_tiny": "64.2, GLUE test (google-research/bert, README)",
    "bert_base": "79.6, GLUE test without WNLI (Devlin et al. 2019, table 1)",
    "bert_large": "82.1, GLUE test without WNLI (Devlin et al. 2019, table 1)",
    "electra_small": "79.9, GLUE dev (Clark et al. 2020, table 1)",
    "modernbert_base": "88.4, GLUE dev (Warner et al. 2024, table 1)",
}
"""Scores that the sources published for their own models; none where we are not certain."""


Prices = Mapping[str, Price | None]
"""Prices by chip; None where none is known."""


@dataclass(frozen=True)
class Cost:
    """The predicted cost of all phases of a recipe on a slice."""

    case: Case
    topology: Topology
    tokens: int
    """Token positions of all steps, padding included."""
    step_seconds: tuple[float, ...]
    """Seconds of a step with all its rows, by phase."""
    peak: int
    """Bytes on a chip, in the phase that needs most."""
    hours: float

    def cells(self, prices: Prices) -> list[str]:
        """As `HEADINGS`; the dollars are left out by `report` if nothing is priced."""
        chip = self.topology.chip
        chip_hours, price = self.hours * self.topology.num_chips, prices[chip.name]
        return [
            f"`{self.case.recipe}`", self.case.topology, f"{self.tokens / 1e9:,.0f}",
            ", ".join(f"{1e3 * seconds:,.1f}" for seconds in self.step_seconds),
            f"{self.peak / 2**30:.1f} of {chip.hbm_bytes / 2**30:g}",
            rounded(self.hours), rounded(chip_hours),
            rounded(chip_hours * price.dollars) if price else UNKNOWN,
            SCORES.get(self.case.recipe, UNKNOWN),
        ]  # fmt: skip


HEADINGS = ["recipe", "slice", "tokens, billions", "ms a step, by phase", "GiB a chip", "hours",
            "chip-hours", "dollars", "score of the source's own model"]  # fmt: skip


def main() -> int:
    arguments = _arguments()
    try:
        prices = read_prices(arguments.prices)
        if arguments.write:
            replaced(arguments.write, "")  # fails before the minutes of compilation
        cases = [case for case in CASES if not arguments.only or case.recipe in arguments.only]
        text = report([cost(case, arguments.cache) for case in cases], prices)
        if arguments.write:
            replace_file(arguments.write, replaced(arguments.write, text).encode())
    except UserError as error:
        print(f"cost_table: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def cost(case: Case, cache: Path | None) -> Cost:
    """Plan the phases of a case.

    Raises:
        UserError: `train` would refuse the configuration, or a step does not fit the memory.
    """
    config = case.config()
    topology = parse_topology(case.topology)
    startable(config, topology)
    compiled: dict[tuple[Any, ...], Plan] = {}
    plans = []
    for number, phase in enumerate(config.training.phases):
        step = step_of(phase)
        if step not in compiled:
            planner = Planner(config, number, topology, cache=cache)
            compiled[step] = planner.plan(planner.configured)
        plans.append(plan := compiled[step])
        if not plan.fits:
            raise UserError(f"{case.recipe} does not fit on {case.topology}: {plan.refused}")
    shards = topology.num_devices // plans[0].mesh_shape["tensor"]
    phases = with_batch_unit(config, shards).phases
    step_seconds = tuple(plan.seconds or 0.0 for plan in plans)
    steps = (phase.num_rows / phase.batch_size for phase in phases)
    return Cost(
        case, topology,
        tokens=sum(p.num_rows * row_tokens(config, n) for n, p in enumerate(phases)),
        step_seconds=step_seconds, peak=max(memory_per_chip(plan)["peak"] for plan in plans),
        hours=sum(a * b for a, b in zip(steps, step_seconds, strict=True)) / 3600,
    )  # fmt: skip


def step_of(phase: PhaseConfig) -> tuple[Any, ...]:
    """The fields of a phase that change its compiled step by more than the learning rate."""
    return (phase.length, phase.batch_size, phase.accumulation, phase.masking_rate,
            phase.rope_theta, phase.local_rope_theta)  # fmt: skip


def report(costs: Sequence[Cost], prices: Prices) -> str:
    """The table, the prices in it, and the commands behind its rows."""
    rows = [HEADINGS, *(cost.cells(prices) for cost in costs)]
    used = {cost.topology.chip.name: prices[cost.topology.chip.name] for cost in costs}
    told = [
        f"{name}: ${price.dollars:g} a chip-hour on demand on {price.date} ({price.source})."
        for name, price in used.items()
        if price
    ]
    if not told:
        column = HEADINGS.index("dollars")
        rows = [[*row[:column], *row[column + 1 :]] for row in rows]
    commands = "\n".join(cost.case.command for cost in costs)
    return "\n\n".join([markdown_table(rows), *told, f"```\n{commands}\n```"])


def rounded(number: float) -> str:
    """Whole numbers from 100 on, and three digits below."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def replaced(page: Path, text: str) -> str:
    """The page with `text` between its two marks. Raise a UserError if it lacks them."""
    try:
        before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    except (OSError, ValueError) as error:
        raise UserError(f"{page}: {error}") from None
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{page} must have the lines {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(dict.fromkeys(case.recipe for case in CASES))
    parser.add_argument("--only", action="append", choices=names, help="default: all of them")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table in this page")
    parser.add_argument("--prices", type=Path, default=PRICES, help="default: %(default)s")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
