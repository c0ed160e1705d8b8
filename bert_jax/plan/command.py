"""The verb `bert-jax plan`: what is compiled, printed and answered for the arguments given."""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.plan import report
from bert_jax.plan.compile import row_flops, with_vocabulary
from bert_jax.plan.predict import Plan
from bert_jax.plan.search import Fit, Found, Pace, Settings
from bert_jax.plan.topology import Topology, parse_topology
from bert_jax.plan.tunnel import Tunnel
from bert_jax.training.config import PretrainConfig

_FEW_TOKENS = 2048
"""A chip with fewer in a micro-batch spends most of a step on what does not depend on them."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of the verb, as given."""

    topologies: tuple[str, ...]
    phase: str = "0"
    """A number, or `all`."""
    batch_per_chip: int | None = None
    fit: bool = False
    fast: bool = False
    json: bool = False
    plot: Path | None = None
    cache: Path | None = None


def run_plan(config: PretrainConfig, request: Request) -> int:
    """Compiles and prints; 0 if all fits, 1 if something does not (what would is printed).

    Raises:
        UserError: a topology, phase or batch that does not exist, or no libtpu.
    """
    topologies = [parse_topology(name) for name in request.topologies]
    phases = _phases(config, request.phase)
    config, vocabulary = with_vocabulary(config)
    if request.plot is not None and not request.plot.absolute().parent.is_dir():
        raise UserError(f"--plot {request.plot}: there is no directory {request.plot.parent}")
    cases = []
    for topology in topologies:
        for phase in phases:
            batched = config
            if request.batch_per_chip is not None:
                batched = with_rows_per_chip(config, phase, topology, request.batch_per_chip)
            cases.append((batched, phase, topology))
    say = _Progress()
    if not request.json:
        print(vocabulary)
    done: list[_Answer] = []
    for batched, phase, topology in cases:
        tunnel = Tunnel(batched, phase, topology, cache=request.cache, say=say)
        answer = (_fit if request.fit else _fast if request.fast else _as_configured)(tunnel)
        say.done()
        done.append(answer)
        if not request.json:
            print("\n" + "\n".join([*answer.before, report.text(answer.plan), *answer.after]))
    plans = [answer.plan for answer in done]
    if request.json:
        record = {
            "schema": report.SCHEMA,
            "vocabulary": vocabulary,
            "plans": [{**report.as_dict(answer.plan), **answer.record} for answer in done],
        }
        print(json.dumps(record))
    elif len(plans) > 1:
        print("\n" + report.comparison(plans))
    if request.plot is not None:
        report.draw(plans, request.plot)
    return 0 if all(answer.record["configuration_fits"] for answer in done) else 1


@dataclasses.dataclass(frozen=True)
class _Answer:
    """For one topology and phase."""

    plan: Plan
    """Plan of the configured settings, or of those that fit where they do not."""
    record: dict[str, Any]
    """Entries of the JSON output beside the plan."""
    before: tuple[str, ...] = ()
    """Lines above the plan's report."""
    after: tuple[str, ...] = ()


def with_rows_per_chip(
    config: PretrainConfig, phase: int, topology: Topology, rows: int
) -> PretrainConfig:
    """Return the configuration with so many rows a chip in each micro-batch of a phase."""
    if rows < 1:
        raise UserError(f"--batch-per-chip is {rows}; it must be at least 1")
    phases = list(config.training.phases)
    phases[phase] = dataclasses.replace(
        phases[phase], batch_size=rows * topology.num_chips * config.training.accumulation
    )
    training = dataclasses.replace(config.training, phases=tuple(phases))
    return dataclasses.replace(config, training=training)


def _phases(config: PretrainConfig, wanted: str) -> list[int]:
    count = len(config.training.phases)
    if wanted == "all":
        return list(range(count))
    if not wanted.isdecimal() or int(wanted) >= count:
        raise UserError(
            f"--phase is {wanted!r}; the configuration has 0 to {count - 1}, or `all` for all"
        )
    return [int(wanted)]


def _as_configured(tunnel: Tunnel) -> _Answer:
    """Return the configured settings, or settings that fit with the overrides for them."""
    configured = tunnel.settings()
    plan = tunnel.plan(configured)
    if plan.compiled.fits:
        hint: tuple[str, ...] = ()
        if plan.compiled.rows_per_chip * plan.compiled.length < _FEW_TOKENS:
            hint = ("", f"{plan.compiled.rows_per_chip:g} rows a chip leave it idle: --fast says "
                    "what larger steps would reach, --fit finds the largest")  # fmt: skip
        return _Answer(plan, {"configuration_fits": True}, after=hint)
    found = tunnel.settings_that_fit()
    record: dict[str, Any] = {"configuration_fits": False, "configured": report.as_dict(plan)}
    if found is None:
        nothing = (
            "",
            "No mesh, number of micro-batches or rematerialisation was found with which "
            f"{configured.rows} rows a step fit on {tunnel.topology.name}: more chips are needed",
        )
        return _Answer(plan, {**record, "overrides": None}, after=nothing)
    overrides = found.settings.overrides(tunnel.config, tunnel.phase)
    before = (
        report.text(plan),
        "",
        "what fits, and is the fastest found, with the same rows a step; add to the command:",
        "  " + " ".join(overrides),
        *_tried_lines(found),
        "",
    )
    better = tunnel.plan(found.settings)
    return _Answer(better, {**record, "overrides": overrides}, before=before)


def _fit(tunnel: Tunnel) -> _Answer:
    """Return the largest batch per chip, with the configured mesh if any batch fits on it."""
    settings = tunnel.settings()
    fit = tunnel.fit(settings)
    configuration_fits = fit.largest > 0
    if not fit.largest:
        found = tunnel.settings_that_fit()
        if found is None:
            plan = tunnel.plan(tunnel.with_batch(settings, 1, settings.accumulation))
            after = ("", "not one row a chip fits: more chips are needed")
            return _Answer(plan, {"configuration_fits": False, "overrides": None}, after=after)
        settings = dataclasses.replace(found.settings, accumulation=1)
        fit = tunnel.fit(settings)
    best = tunnel.with_batch(settings, fit.best, settings.accumulation)
    overrides = best.overrides(tunnel.config, tunnel.phase)
    record = {
        "configuration_fits": configuration_fits,
        "overrides": overrides,
        "fit": _fit_dict(tunnel, settings, fit),
    }
    lines = _fit_lines(tunnel, settings, fit, overrides)
    return _Answer(tunnel.plan(best), record, after=tuple(lines))


def _fast(tunnel: Tunnel) -> _Answer:
    """Return the configured batch, a step of 0.5 M tokens, and the batch with the highest MFU."""
    configured = settings = tunnel.settings()
    # A batch that does not divide over the chips is no error here: the others do.
    plan = tunnel.plan(configured) if tunnel.divides(configured) else None
    fits = plan is not None and plan.compiled.fits
    record: dict[str, Any] = {"configuration_fits": fits}
    pace = tunnel.pace(settings)
    if pace is None and (found := tunnel.settings_that_fit()) is not None:
        settings = found.settings
        pace = tunnel.pace(settings)
    if pace is None:
        plan = plan or tunnel.plan(tunnel.with_batch(settings, 1, 1))
        after = ("", "no micro-batch fits: more chips are needed")
        return _Answer(plan, {**record, "overrides": None}, after=after)
    usual = lead = tunnel.usual(settings, pace)
    batches = []
    if plan is not None:
        lead = configured if fits else tunnel.split(settings, pace, configured.rows)
        name = "configured" if fits else "configured, split"
        batches.append(_batch(tunnel, name, lead, tunnel.plan(lead).seconds))
    if not fits:
        record["configured"] = None if plan is None else report.as_dict(plan)
        record["overrides"] = lead.overrides(tunnel.config, tunnel.phase)
    batches.append(_batch(tunnel, "0.5 M tokens", usual, tunnel.plan(usual).seconds))
    best = pace.tried[pace.rows]
    fastest = tunnel.with_batch(settings, pace.rows, pace.accumulation)
    seconds = best.part * pace.accumulation + best.once
    batches.append(_batch(tunnel, "highest MFU", fastest, seconds))
    table = _mfu_table(tunnel, settings, pace)
    record |= {"batches": batches, "predicted_mfu_by_rows_and_micro_batches": table}
    before = _batch_lines(batches)
    if plan is None:
        shards = tunnel.topology.num_devices // configured.tensor
        before.insert(
            0, f"the configured {configured.rows} rows a step do not divide over {shards} shards"
        )
    return _Answer(tunnel.plan(lead), record, tuple(before), tuple(_table_lines(table)))


def _batch(tunnel: Tunnel, name: str, settings: Settings, seconds: float | None) -> dict[str, Any]:
    """One batch that a step could have; `seconds` None: it does not fit."""
    rows, length = settings.rows, tunnel.config.training.phases[tunnel.phase].length
    chips = tunnel.topology.num_chips
    return {
        "name": name,
        "batch_size": rows,
        "tokens": rows * length,
        "rows_per_chip": rows / settings.accumulation / chips,
        "accumulation": settings.accumulation,
        "step_seconds": seconds,
        "tokens_per_second": seconds and rows * length / seconds,
        "mfu": seconds and _mfu(tunnel, rows, seconds),
        "overrides": settings.overrides(tunnel.config, tunnel.phase),
    }


def _batch_lines(batches: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["batch                rows a step     tokens  rows a chip x parts    step ms     MFU"]
    for b in batches:
        split = f"{b['rows_per_chip']:g} x {b['accumulation']}"
        time = f"{'does not fit':>19}"
        if b["mfu"]:
            time = f"{b['step_seconds'] * 1e3:10.1f}  {b['mfu']:6.1%}"
        lines.append(f"{b['name']:18} {b['batch_size']:13,} {b['tokens']:10,}  {split:>19} {time}")
        if b["overrides"]:
            lines.append("  " + " ".join(b["overrides"]))
    return [*lines, "the last one from compilations of 1 and 2 layers; now the first one:", ""]


def _mfu_table(tunnel: Tunnel, settings: Settings, pace: Pace) -> dict[str, dict[str, float]]:
    """MFU by rows a chip and micro-batches a step; empty where they do not fit."""
    per_chip = tunnel.topology.chip.devices_per_chip / settings.tensor
    table: dict[str, dict[str, float]] = {}
    for rows, tried in pace.tried.items():
        row = table[f"{rows * per_chip:g}"] = {}
        for count in (2**n for n in range(5) if tried.part):
            step = tunnel.with_batch(settings, rows, count).rows
            row[str(count)] = _mfu(tunnel, step, tried.part * count + tried.once)
    return table


def _table_lines(table: dict[str, dict[str, float]]) -> list[str]:
    counts = next(row for row in table.values() if row)
    return [
        "",
        "MFU by rows a chip and micro-batches a step, from compilations of 1 and 2 layers:",
        "          " + "".join(f"{count:>8}" for count in counts),
        *(
            f"  {rows:>6}  "
            + ("".join(f"{share:8.1%}" for share in row.values()) or "does not fit")
            for rows, row in table.items()
        ),
    ]


def _fit_dict(tunnel: Tunnel, settings: Settings, fit: Fit) -> dict[str, Any]:
    per_chip = tunnel.topology.chip.devices_per_chip / settings.tensor
    return {
        "largest_rows_per_chip": fit.largest * per_chip,
        "best_rows_per_chip": fit.best * per_chip,
        "predicted_mfu_by_rows_per_chip": {
            f"{rows * per_chip:g}": _mfu(tunnel, tunnel.rows(settings, rows), seconds)
            for rows, seconds in fit.predicted.items()
        },
    }


def _mfu(tunnel: Tunnel, rows: int, seconds: float) -> float:
    """MFU of a step of so many global rows."""
    config, length = tunnel.config, tunnel.config.training.phases[tunnel.phase].length
    flops = row_flops(config, length)
    peak = tunnel.topology.num_chips * tunnel.topology.chip.bf16_flops
    return flops * rows / (seconds * peak)


def _fit_lines(tunnel: Tunnel, settings: Settings, fit: Fit, overrides: Sequence[str]) -> list[str]:
    per_chip = tunnel.topology.chip.devices_per_chip / settings.tensor
    lines = [
        "",
        f"largest batch that fits: {fit.largest * per_chip:g} rows a chip; highest MFU of those "
        f"compiled: {fit.best * per_chip:g} rows a chip",
        "  " + " ".join(overrides),
        "MFU by rows a chip, as a line through two compilations of reduced depth:",
    ]
    for rows, seconds in fit.predicted.items():
        mfu = _mfu(tunnel, tunnel.rows(settings, rows), seconds)
        lines.append(f"  {rows * per_chip:6g}  {mfu:6.1%}  {'█' * round(mfu * 40)}")
    configured = tunnel.settings().rows
    parts = configured / tunnel.rows(settings, fit.best) if fit.best else 0
    if parts > 1:
        shards = tunnel.topology.num_devices // settings.tensor
        wanted = next(
            (n for n in range(math.ceil(parts), configured + 1) if configured % (n * shards) == 0),
            None,
        )
        if wanted:
            lines.append(
                f"to keep the configured {configured:,} rows a step: "
                f"--config.training.accumulation={wanted * settings.accumulation}"
            )
    return lines


def _tried_lines(found: Found) -> list[str]:
    lines = ["tried on the way:"]
    for settings, guess, how in found.tried:
        lines.append(
            f"  fsdp {settings.fsdp}, tensor {settings.tensor}, accumulation "
            f"{settings.accumulation}, remat {settings.remat}: {guess.peak / 2**30:.2f} GiB a "
            f"device, {guess.seconds * 1e3:.1f} ms ({how})"
        )
    return lines


class _Progress:
    """A line on standard error for each compilation, and how long it took."""

    def __init__(self) -> None:
        self._begun = 0.0

    def __call__(self, line: str) -> None:
        self.done()
        self._begun = time.perf_counter()
        print(f"[plan] {line} ...", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        """End the line that is open."""
        if self._begun:
            print(f" {time.perf_counter() - self._begun:.0f} s", file=sys.stderr, flush=True)
        self._begun = 0.0
