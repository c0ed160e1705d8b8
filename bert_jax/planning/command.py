"""The work of the verb `bert-jax plan`: compilations, output and exit code."""

import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.config.command_line import overridden
from bert_jax.distributed.parallel.sharding import make_mesh, num_batch_shards
from bert_jax.errors import UserError
from bert_jax.planning import output
from bert_jax.planning.compile import Plan, default_cache, row_tokens, with_vocabulary
from bert_jax.planning.planner import Planner
from bert_jax.planning.search import Settings, accumulation_field
from bert_jax.planning.topology import Topology, devices, parse_topology
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.settings import check_stages, warmup_lines, with_batch_unit

_FEW_TOKENS = 2048
"""Number of tokens per chip and micro-batch below which a chip is not kept busy."""


def run_plan(
    config: PretrainConfig, topologies: Sequence[str], *, phase: str, batch: str, as_json: bool,
    plot: Path | None, cache: Path | None,
) -> int:  # fmt: skip
    """Compile the chosen phases for every topology, and print the results.

    `phase` is the index of a phase or "all". `batch` is a number of rows per chip, "fit", "fast",
    or "" for the configured batch. `plot` is a PNG file. `cache` is passed to `compile_step`.
    Return 0 if the configured steps fit, else 1; the output then proposes settings, if any fit.
    Raise a UserError if an argument is out of range, or `train` would reject `config`.
    """
    parsed = [parse_topology(name) for name in topologies]
    count = len(config.training.phases)
    if phase != "all" and not (phase.isdecimal() and int(phase) < count):
        raise UserError(f"--phase is {phase!r}; it must be a phase from 0 to {count - 1}, or all")
    phases = range(count) if phase == "all" else [int(phase)]
    config, vocabulary = with_vocabulary(config)
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UserError(f"--plot {plot}: there is no directory {plot.parent}")
    cases = []
    for topology in parsed:
        make_mesh(config.mesh, devices(topology))  # raises if `train` would
        if not batch:  # --batch-per-chip plans other batches
            for line in startable(config, topology):
                print(f"{topology.name}: {line}", file=sys.stderr)
        for number in phases:
            batched = config
            if batch.isdecimal():
                batched = with_rows_per_chip(config, number, topology, int(batch))
            cases.append((batched, number, topology))
    if not as_json:
        print(vocabulary)
    answers: list[_Answer] = []
    for case in cases:
        planner = Planner(*case, cache=cache)
        answer = {"fit": _fit, "fast": _fast}.get(batch, _as_configured)(planner)
        answers.append(answer)
        if not as_json:
            print("\n" + "\n".join([*answer.before, output.as_text(answer.plan), *answer.after]))
    plans = [answer.plan for answer in answers]
    if as_json:
        records = [{**output.as_dict(answer.plan), **answer.record} for answer in answers]
        print(json.dumps({"schema": output.SCHEMA, "vocabulary": vocabulary, "plans": records}))
    elif len(plans) > 1:
        print("\n" + output.comparison(plans))
    if plot is not None:
        output.draw(plans, plot)
    return 0 if all(answer.record["configuration_fits"] for answer in answers) else 1


def plans(config: PretrainConfig, topology: Topology) -> list[Plan]:
    """Plan each phase as configured; raise a UserError if `train` would reject `config`."""
    config, _ = with_vocabulary(config)
    startable(config, topology)
    phases = range(len(config.training.phases))
    planners = [Planner(config, phase, topology, cache=default_cache()) for phase in phases]
    return [planner.plan(planner.configured) for planner in planners]


@dataclasses.dataclass(frozen=True)
class _Answer:
    plan: Plan
    """Plan for the configured settings or, if they do not fit, for settings that do."""
    record: dict[str, Any]
    """Entries that the JSON output has in addition to the plan."""
    before: Sequence[str] = ()
    """Lines above the plan's report."""
    after: Sequence[str] = ()
    """Lines below the plan's report."""


def startable(config: PretrainConfig, topology: Topology) -> list[str]:
    """Return messages about the warm-ups that `train` would change on a topology.

    Raise a UserError if `train` would reject the configuration.
    """
    shards = num_batch_shards(make_mesh(config.mesh, devices(topology)))
    config = with_batch_unit(config, shards)
    check_stages(config, shards)
    return warmup_lines(config)


def with_rows_per_chip(
    config: PretrainConfig, phase: int, topology: Topology, rows: int
) -> PretrainConfig:
    """Set the rows per chip in each micro-batch of a phase; raise a UserError if below 1."""
    if rows < 1:
        raise UserError(f"--batch-per-chip is {rows}; it must be at least 1")
    batch_size = rows * topology.num_chips * config.accumulation_of(phase)
    return overridden(config, [f"--config.training.phases[{phase}].batch_size={batch_size}"])


def _as_configured(planner: Planner) -> _Answer:
    """Plan the configured settings or, if they do not fit, the fastest settings found that fit."""
    plan = planner.plan(planner.configured)
    if plan.fits:
        hint = (
            "", f"{plan.rows_per_chip:g} rows do not keep a chip busy. --batch-per-chip=fast shows "
            "the speed of larger steps, and --batch-per-chip=fit finds the largest step",
        )  # fmt: skip
        few = plan.rows_per_chip * plan.length < _FEW_TOKENS
        return _Answer(plan, {"configuration_fits": True}, after=hint if few else ())
    found = planner.settings_that_fit()
    record: dict[str, Any] = {"configuration_fits": False, "configured": output.as_dict(plan)}
    if found is None:
        place = f"{planner.topology.name} with any mesh, accumulation or rematerialisation"
        return _nothing_fits(plan, record, f"{plan.rows} rows per step do not fit on {place}")
    overrides = found.settings.overrides(planner.config, planner.phase)
    tried = [
        f"  fsdp {settings.fsdp}, tensor {settings.tensor}, accumulation "
        f"{settings.accumulation}, remat {settings.remat}: {guess.peak / 2**30:.2f} GiB "
        f"per device, {guess.seconds * 1e3:.1f} ms ({how})"
        for settings, guess, how in found.tried
    ]
    head = "the fastest settings found that fit, with the same rows per step; add to the command:"
    added = "  " + shlex.join(overrides)
    before = [output.as_text(plan), "", head, added, "tried on the way:", *tried, ""]
    return _Answer(planner.plan(found.settings), {**record, "overrides": overrides}, before)


def _nothing_fits(plan: Plan, record: dict[str, Any], why: str) -> _Answer:
    return _Answer(plan, {**record, "overrides": None}, after=("", f"{why}; use more chips"))


def _fit(planner: Planner) -> _Answer:
    """Plan the largest batch per chip on the configured mesh or, if none fits, on another mesh."""
    settings = planner.configured
    fit = planner.fit(settings)
    record: dict[str, Any] = {"configuration_fits": fit.largest > 0}
    if not fit.largest:
        found = planner.settings_that_fit()
        if found is None:
            plan = planner.plan(planner.with_batch(settings, 1, settings.accumulation))
            return _nothing_fits(plan, record, "not even one row per chip fits")
        settings = dataclasses.replace(found.settings, accumulation=1)
        fit = planner.fit(settings)
    best = planner.with_batch(settings, fit.best, settings.accumulation)
    overrides = best.overrides(planner.config, planner.phase)
    largest, fastest = (planner.rows_per_chip(settings, rows) for rows in (fit.largest, fit.best))
    mfus = {
        f"{planner.rows_per_chip(settings, rows):g}": planner.mfu(planner.rows(settings, rows), s)
        for rows, s in fit.predicted.items()
    }
    record["overrides"] = overrides
    record["fit"] = {
        "largest_rows_per_chip": largest, "best_rows_per_chip": fastest,
        "predicted_mfu_by_rows_per_chip": mfus,
    }  # fmt: skip
    after = [
        "",
        f"largest batch that fits: {largest:g} rows per chip; highest MFU among the "
        f"compiled batches: {fastest:g} rows per chip",
        "  " + shlex.join(overrides),
        "MFU by rows per chip, predicted from two compilations with fewer layers:",
        *(f"  {rows:>6}  {mfu:6.1%}  {'█' * round(mfu * 40)}" for rows, mfu in mfus.items()),
    ]
    configured, least = planner.configured.rows, planner.rows(settings, fit.best)
    if 0 < least < configured:
        unit = planner.rows(settings, 1)  # one row on each shard in each micro-batch
        counts = range(math.ceil(configured / least), configured + 1)
        if parts := next((n for n in counts if configured % (n * unit) == 0), None):
            field = accumulation_field(planner.config, planner.phase)
            added = shlex.quote(f"--config.{field}={parts * settings.accumulation}")
            after.append(f"to keep the configured {configured:,} rows per step: {added}")
    return _Answer(planner.plan(best), record, after=after)


def _fast(planner: Planner) -> _Answer:
    """Compare the configured batch, a batch of 0.5 M tokens, and the batch with the highest MFU."""
    configured = settings = planner.configured
    # If the configured batch does not divide over the chips, plan the other two batches.
    divides = configured.rows % planner.rows(configured, 1) == 0
    plan = planner.plan(configured) if divides else None
    fits = plan is not None and plan.fits
    record: dict[str, Any] = {"configuration_fits": fits}
    pace = planner.pace(settings)
    if pace is None and (found := planner.settings_that_fit()) is not None:
        settings = found.settings
        pace = planner.pace(settings)
    if pace is None:
        plan = plan or planner.plan(planner.with_batch(settings, 1, 1))
        return _nothing_fits(plan, record, "no micro-batch fits")
    usual = lead = planner.usual(settings, pace)
    batches = []
    if plan is not None:
        lead = configured if fits else planner.split(settings, pace, configured.rows)
        name = "configured" if fits else "configured, split"
        batches.append(_batch(planner, name, lead, planner.plan(lead).seconds))
    if not fits:
        record["configured"] = None if plan is None else output.as_dict(plan)
        record["overrides"] = lead.overrides(planner.config, planner.phase)
    batches.append(_batch(planner, "0.5 M tokens", usual, planner.plan(usual).seconds))
    fastest = planner.with_batch(settings, pace.rows, pace.accumulation)
    seconds = pace.tried[pace.rows].seconds(pace.accumulation)
    batches.append(_batch(planner, "highest MFU", fastest, seconds))
    table: dict[str, dict[str, float]] = {}
    for rows, tried in pace.tried.items():  # a row stays empty if its batch does not fit
        row = table[f"{planner.rows_per_chip(settings, rows):g}"] = {}
        for count in (1, 2, 4, 8, 16) if tried.part and tried.peak <= planner.usable else ():
            step = planner.with_batch(settings, rows, count).rows
            row[str(count)] = planner.mfu(step, tried.seconds(count))
    record |= {"batches": batches, "predicted_mfu_by_rows_and_micro_batches": table}
    before = _batch_lines(batches)
    if plan is None:
        shards = planner.topology.num_devices // configured.tensor
        said = f"the configured {configured.rows} rows per step do not divide over {shards} shards"
        before.insert(0, said)
    return _Answer(planner.plan(lead), record, before, _table_lines(table))


def _batch(
    planner: Planner, name: str, settings: Settings, seconds: float | None
) -> dict[str, Any]:
    """Describe one of the compared batches. `seconds` is None if the batch does not fit."""
    rows, tokens = settings.rows, row_tokens(planner.config, planner.phase)
    return {
        "name": name, "batch_size": rows, "tokens": rows * tokens,
        "rows_per_chip": rows / settings.accumulation / planner.topology.num_chips,
        "accumulation": settings.accumulation, "step_seconds": seconds,
        "tokens_per_second": seconds and rows * tokens / seconds,
        "mfu": seconds and planner.mfu(rows, seconds),
        "overrides": settings.overrides(planner.config, planner.phase),
    }  # fmt: skip


def _batch_lines(batches: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["batch                rows a step     tokens  rows a chip x parts    step ms     MFU"]
    for b in batches:
        split = f"{b['rows_per_chip']:g} x {b['accumulation']}"
        time = f"{'does not fit':>19}"
        if b["mfu"]:
            time = f"{b['step_seconds'] * 1e3:10.1f}  {b['mfu']:6.1%}"
        lines.append(f"{b['name']:18} {b['batch_size']:13,} {b['tokens']:10,}  {split:>19} {time}")
        if b["overrides"]:
            lines.append("  " + shlex.join(b["overrides"]))
    said = "the last batch is predicted from 1 and 2 layers; the report is on the first batch:"
    return [*lines, said, ""]


def _table_lines(table: dict[str, dict[str, float]]) -> list[str]:
    counts = next(row for row in table.values() if row)
    said = "MFU by rows per chip and micro-batches per step, from compilations of 1 and 2 layers:"
    lines = ["", said, "          " + "".join(f"{count:>8}" for count in counts)]
    for rows, row in table.items():
        cells = "".join(f"{share:8.1%}" for share in row.values()) or "does not fit"
        lines.append(f"  {rows:>6}  {cells}")
    return lines
