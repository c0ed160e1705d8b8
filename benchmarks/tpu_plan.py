"""What the defaults reach on TPU slices, by `bert-jax plan`: no TPU is needed, only libtpu.

    python benchmarks/tpu_plan.py --only base --length 128 --topology v5e:4x4 --step configured
    python benchmarks/tpu_plan.py --only modern --loop --check
    python benchmarks/tpu_plan.py --only cases --check
    python benchmarks/tpu_plan.py --check --markdown work/tpu.md

BERT-base and BERT-large, rows of 128 and 512, dropout as published (0.1) and none, on four slices,
and the Megatron sizes. Three steps each: the configured batch, 0.5 M tokens, and the batch with the
highest MFU (large: with LAMB, made for large batches), which `plan --batch-per-chip=fast` picks
with dropout on the first slice of a kind; other slices of the kind and dropout 0 take the same.
ModernBERT-base, -large and Ettin-1B at 1,024 and 8,192 tokens, with the settings that `plan` finds.
`cases` are recipes on a slice, some with another batch, with settings that make the step fast; each
has its own bar.
Everything is compiled; what was compiled before comes from the cache.

Bars of --check: everything fits; with the highest MFU, on v5e at L=128 without dropout an MFU of at
least 0.52 (base) and 0.60 (large), with dropout 0.92 of that at least; at L=512 at least 0.50;
memory and cycles of v5e on 256 chips within 3% of 16 chips; ModernBERT-base on 256 chips of v5e
with 4,608 rows of 1,024 at least 0.50, with 512 rows of 8,192 at least 0.30.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cost_table import Case, once

from bert_jax.config.command_line import load_config
from bert_jax.distributed.parallel.sharding import MeshConfig
from bert_jax.planning.compile import Plan, default_cache, with_vocabulary
from bert_jax.planning.output import memory_per_chip
from bert_jax.planning.planner import Planner
from bert_jax.planning.search import Pace
from bert_jax.planning.topology import parse_topology
from bert_jax.training.pretrain.config import PretrainConfig

STEPS = ("configured", "usual", "fast")
MODELS = {"base": "pretrain/bert_base", "large": "pretrain/bert_large"}
FAST_MODELS = {**MODELS, "large": "pretrain/bert_large_lamb"}
TOPOLOGIES = ("v5e:4x4", "v5e:16x16", "v5p:4x4x4", "v6e:16x16")
MEGATRON = {"megatron_3_9b": "v5p:4x4x8", "megatron_8_3b": "v5p:8x8x16"}
MODERN = {
    "modernbert_base": ("v5e:16x16", ((1024, 4608, 3), (8192, 512, 1))),
    "modernbert_large": ("v5p:4x4x4", ((1024, 4608, 6), (8192, 640, 2))),
    "ettin_1b": ("v5p:4x4x4", ((1024, 4608, 6), (8192, 640, 2))),
}
"""Slice, and lengths with their rows and micro-batches a step."""
MODERN_VOCABULARY = 50368


class Bar(NamedTuple):
    """The MFU that a phase of a recipe on a slice should reach."""

    case: Case
    phase: int
    least_mfu: float


def rows_of_128(count: int, parts: int) -> tuple[str, ...]:
    """Return settings for a phase of `count` rows of 128 tokens, in `parts` micro-batches."""
    phase = f'training.phases=[{{"length": 128, "batch_size": {count}}}]'
    return phase, f"training.accumulation={parts}"


HALF = "training.reduce_dtype=bfloat16"
BARS = (
    Bar(Case("bert_base", "v5e:4x4", (*once(16), HALF)), 0, 0.32),
    Bar(Case("bert_base", "v5e:4x4", (*once(16), *rows_of_128(4096, 4))), 0, 0.58),
    Bar(Case("bert_base", "v6e:16x16", (*once(256), HALF, *rows_of_128(2**18, 8))), 0, 0.25),
    Bar(Case("ettin_17m", "v5e:4x4",
             (*once(16), f"model.vocab_size={MODERN_VOCABULARY}", "training.accumulation=12")),
        0, 0.30),
    Bar(Case("neobert", "v5e:16x16", once(256)), 0, 0.42),
    Bar(Case("eurobert_210m", "v5e:16x16",
             (*once(256), "model.vocab_size=128256", "training.accumulation=2")), 0, 0.42),
    Bar(Case("bert_large_lamb", "v4:4x4x4",
             (*once(64), HALF, "training.phases[1].batch_size=2048", "training.accumulation=1")),
        1, 0.55),
)  # fmt: skip
LENGTHS = (128, 512)
DROPOUTS = (0.1, 0.0)
LEAST_MFU = {("base", 128): 0.52, ("large", 128): 0.60, ("base", 512): 0.50, ("large", 512): 0.50}
LEAST_MODERN_MFU = {("modernbert_base", 1024): 0.50, ("modernbert_base", 8192): 0.30}
LEAST_SHARE_WITH_DROPOUT = 0.92
LARGEST_DIFFERENCE = 0.03


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    length: int
    dropout: float
    topology: str
    step: str
    """One of `STEPS`."""
    plan: Plan
    chosen: str = ""
    """Settings that the tool had to choose, or that a case has."""
    least_mfu: float | None = None

    @property
    def cells(self) -> list[str]:
        """As `HEADINGS`."""
        plan = self.plan
        chip = self.plan.topology.chip
        gib = f"{plan.peak * chip.devices_per_chip / 2**30:.2f}"
        fast = ["-"] * 3
        if self.plan.seconds and self.plan.mfu and self.plan.tokens_per_second:
            per_chip = self.plan.tokens_per_second / self.plan.topology.num_chips
            fast = [f"{self.plan.seconds * 1e3:.1f}", f"{per_chip:,.0f}", f"{self.plan.mfu:.3f}"]
        return [
            self.model, str(self.length), f"{self.dropout:g}", self.topology,
            self.step, f"{plan.rows:,}",
            f"{plan.rows_per_chip:g} x {plan.accumulation}",
            "yes" if plan.fits else "no",
            f"{gib} / {chip.hbm_bytes / 2**30:g}", *fast, self.chosen,
        ]  # fmt: skip


HEADINGS = ["model", "L", "dropout", "slice", "step", "rows", "rows/chip x parts", "fits",
            "GiB/chip", "step ms", "tokens/s/chip", "MFU", "settings"]  # fmt: skip


def main() -> int:
    arguments = _arguments()
    cache = None if arguments.no_cache else arguments.cache
    rows: list[Row] = []
    for model in MODELS:
        if arguments.only in (None, model):
            for length in LENGTHS:
                if arguments.length in (None, length):
                    rows += published(model, length, arguments, cache)
    for name, topology in MEGATRON.items():
        if arguments.only in (None, name, "megatron"):
            config, _ = with_vocabulary(load_config(PretrainConfig, f"pretrain/{name}"))
            rows.append(searched(name, config, topology, cache))
    for name, (topology, shapes) in MODERN.items():
        if arguments.only in (None, name, "modern"):
            for length, batch, parts in shapes:
                target = parse_topology(topology)
                config = modern(name, length, batch, parts, target.num_devices, loop=arguments.loop)
                planner = Planner(config, 0, target, cache=cache)
                rate, plan = config.model.hidden_dropout_rate, planner.plan(planner.configured)
                rows.append(Row(name, length, rate, topology, "configured", plan))
                say(" ".join(rows[-1].cells))
    if arguments.only in (None, "cases"):
        rows += [of_case(bar, cache) for bar in BARS]
    print(table(rows, markdown=False))
    if arguments.markdown:
        arguments.markdown.write_text(table(rows, markdown=True) + "\n")
    missed = bars(rows)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed and arguments.check else 0


def published(
    model: str, length: int, arguments: argparse.Namespace, cache: Path | None
) -> list[Row]:
    """All slices and dropout rates of one model and length, in one batch per kind of chip."""
    rows = []
    picked: dict[tuple[str, bool], Pace] = {}
    cases = itertools.product(
        arguments.topology or TOPOLOGIES,
        DROPOUTS if arguments.dropout is None else (arguments.dropout,),
        arguments.step or STEPS,
    )
    for name, dropout, step in cases:
        topology = parse_topology(name)
        fast = step == "fast"
        config = configuration((FAST_MODELS if fast else MODELS)[model], length, dropout)
        planner = Planner(config, 0, topology, cache=cache)
        settings = planner.configured
        if step != "configured":
            kind = topology.chip.name, fast
            if kind not in picked:
                micro, parts = arguments.batch or (1, 1)
                given = None if arguments.batch else planner.pace(settings)
                picked[kind] = given or Pace(micro, parts, {})
            pace = picked[kind]
            settings = (
                planner.with_batch(settings, pace.rows, pace.accumulation)
                if fast
                else planner.usual(settings, pace)
            )
        rows.append(Row(model, length, dropout, name, step, planner.plan(settings)))
        say(" ".join(rows[-1].cells))
    return rows


def searched(name: str, config: PretrainConfig, topology: str, cache: Path | None) -> Row:
    """The first phase of a configuration; mesh, micro-batches and recomputation are the tool's."""
    planner = Planner(config, 0, parse_topology(topology), cache=cache)
    found = planner.settings_that_fit()
    plan = planner.plan(planner.configured if found is None else found.settings)
    chosen = ""
    if found is not None:
        s = found.settings
        chosen = f"fsdp {s.fsdp} tensor {s.tensor} accumulation {s.accumulation} remat {s.remat}"
    rate = config.model.hidden_dropout_rate
    row = Row(name, planner.length, rate, topology, "configured", plan, chosen)
    say(" ".join(row.cells))
    return row


def of_case(bar: Bar, cache: Path | None) -> Row:
    """Return the row of a case that has a bar."""
    case, config = bar.case, bar.case.config()
    planner = Planner(config, bar.phase, parse_topology(case.topology), cache=cache)
    plan, rate = planner.plan(planner.configured), config.model.hidden_dropout_rate
    fields = (each.partition("=") for each in case.overrides)
    settings = " ".join(f"{field.split('.')[-1]} {value}" for field, _, value in fields
                        if field not in ("training.phases", "model.vocab_size"))  # fmt: skip
    row = Row(case.recipe, planner.length, rate, case.topology, "configured", plan, settings,
              bar.least_mfu)  # fmt: skip
    say(" ".join(row.cells))
    return row


def modern(
    name: str, length: int, rows: int, parts: int, chips: int, *, loop: bool
) -> PretrainConfig:
    """A shipped recipe with the first of its phases that has rows of this length.

    Each chip updates a part of the parameters, which are gathered once a step.
    """
    config = load_config(PretrainConfig, f"pretrain/{name}").with_vocabulary(MODERN_VOCABULARY)
    phase = next(p for p in config.training.phases if p.length == length)
    phase = dataclasses.replace(phase, batch_size=rows, share=1.0, batch_warmup_steps=0)
    unroll = 1 if loop else config.model.scan_unroll
    return dataclasses.replace(
        config,
        training=dataclasses.replace(
            config.training, phases=(phase,), accumulation=parts, gather="step"
        ),
        mesh=MeshConfig(data=1, fsdp=chips),
        model=dataclasses.replace(config.model, scan_unroll=unroll),
    )


def configuration(spec: str, length: int, dropout: float) -> PretrainConfig:
    """The shipped recipe with one phase of this length."""
    config, _ = with_vocabulary(load_config(PretrainConfig, spec))
    phase = dataclasses.replace(config.training.phases[0], length=length, share=1.0)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, phases=(phase,)),
        model=dataclasses.replace(
            config.model, hidden_dropout_rate=dropout, attention_dropout_rate=dropout
        ),
    )


def bars(rows: Sequence[Row]) -> list[str]:
    """What is missed, of what the rows can tell."""
    missed = []
    by_key = {(r.model, r.length, r.dropout, r.topology, r.step): r for r in rows}
    for row in rows:
        model, length, dropout = row.model, row.length, row.dropout
        topology, step = row.topology, row.step
        where = f"{model} L={length} dropout {dropout:g} {topology} {step}"
        if not row.plan.fits:
            missed.append(f"{where}: does not fit")
        least = LEAST_MFU.get((model, length))
        mfu = row.plan.mfu
        least_modern = row.least_mfu or LEAST_MODERN_MFU.get((model, length))
        if least_modern and mfu and mfu < least_modern:
            missed.append(f"{where}: MFU {mfu:.3f}, at least {least_modern}")
        if step != "fast" or least is None or mfu is None or not topology.startswith("v5e"):
            continue
        if dropout == 0 and mfu < least:
            missed.append(f"{where}: MFU {mfu:.3f}, at least {least}")
        without = by_key.get((model, length, 0.0, topology, step))
        if dropout and without and without.plan.mfu:
            share = mfu / without.plan.mfu
            if share < LEAST_SHARE_WITH_DROPOUT:
                missed.append(
                    f"{where}: {share:.3f} of the MFU without dropout, at least "
                    f"{LEAST_SHARE_WITH_DROPOUT}"
                )
        small = by_key.get((model, length, dropout, "v5e:4x4", step))
        if topology == "v5e:16x16" and small:
            missed += differences(where, small.plan, row.plan)
    return missed


def differences(where: str, small: Plan, large: Plan) -> list[str]:
    """Memory and cycles per chip on the larger slice that differ by more than 3%."""
    pairs = {"memory": (memory_per_chip(small)["peak"], memory_per_chip(large)["peak"])}
    if small.program and large.program:
        pairs["cycles"] = small.program.cycles, large.program.cycles
    return [
        f"{where}: {name} {b:,} against {a:,} on 16 chips ({b / a - 1:+.1%})"
        for name, (a, b) in pairs.items()
        if abs(b / a - 1) > LARGEST_DIFFERENCE
    ]


def table(rows: Sequence[Row], *, markdown: bool) -> str:
    """All rows, aligned or as markdown."""
    cells = [HEADINGS, *(row.cells for row in rows)]
    if markdown:
        cells.insert(1, ["---"] * len(HEADINGS))
        return "\n".join("| " + " | ".join(line) + " |" for line in cells)
    widths = [max(len(line[n]) for line in cells) for n in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def say(line: str) -> None:
    print(f"[tpu_plan] {line}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=[*MODELS, "megatron", *MEGATRON, "modern", *MODERN, "cases"]
    )
    parser.add_argument("--length", type=int, choices=LENGTHS)
    parser.add_argument("--topology", action="append", help="in place of the four")
    parser.add_argument(
        "--batch", type=int, nargs=2, metavar=("ROWS", "PARTS"),
        help="rows a chip and micro-batch, and micro-batches a step, in place of the tool's choice",
    )  # fmt: skip
    parser.add_argument("--step", action="append", choices=STEPS, help="in place of the three")
    parser.add_argument("--dropout", type=float, choices=DROPOUTS, help="in place of both")
    parser.add_argument(
        "--loop", action="store_true",
        help="compile the modern encoders as loops over layers: minutes, not tens; slower steps",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    parser.add_argument("--no-cache", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
