"""Output of `bert-jax plan`: tables and bars for the terminal, a PNG chart, and JSON."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_jax.files.pictures import INK, new_figure, write_picture
from bert_jax.planning.compile import Plan
from bert_jax.planning.hlo_cost.cost import Cost

SCHEMA = 2
"""Version of the JSON output. It is incremented if a field changes its meaning or is removed."""
_FIELDS = (
    "phase", "length", "accumulation", "rows_per_chip", "fits", "ideal_seconds",
    "tokens_per_second", "mfu", "lowering_seconds", "compile_seconds", "cached",
)  # fmt: skip
"""Properties of a `Plan` that have the same names in the JSON output."""
_MODEL_FIELDS = (
    "vocab_size", "num_layers", "hidden_dim", "num_heads", "remat", "scan_unroll",
    "hidden_dropout_rate", "attention_dropout_rate",
)  # fmt: skip
_BAR = 40
_MEMORY = {
    "parameters": "float32", "optimizer": "moments, float32", "batch": "",
    "temporaries": "activations, gradients", "other": "code, tile padding",
}  # fmt: skip
_COLORS = ("#2b6cb0", "#4299e1", "#90cdf4", "#c2410c", "#a0aec0")


def memory_per_chip(plan: Plan) -> dict[str, int]:
    """Return bytes per chip by purpose, and their sum as `peak`. A chip may have two devices."""
    memory, n = plan.memory, plan.topology.chip.devices_per_chip
    return {**{name: getattr(memory, name) * n for name in _MEMORY}, "peak": memory.peak * n}


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return the entry for a plan in the JSON output: settings, memory, times, collectives."""
    cost, chip = plan.cost, plan.topology.chip
    return {
        **{name: getattr(plan, name) for name in _FIELDS},
        "topology": plan.topology.name,
        "chips": plan.topology.num_chips,
        "batch_size": plan.rows,
        "mesh": dict(plan.mesh_shape),
        "model": {name: getattr(plan.config.model, name) for name in _MODEL_FIELDS},
        "optimizer": plan.config.optimizer.name,
        "refused": plan.refused or None,
        "memory_per_chip": memory_per_chip(plan),
        "hbm_per_chip": chip.hbm_bytes,
        "usable_per_chip": plan.usable * chip.devices_per_chip,
        "needs_per_chip": (plan.needs or plan.memory.peak) * chip.devices_per_chip,
        "collectives": [{**dataclasses.asdict(e), "axes": list(e.axes)} for e in plan.exchanges],
        "step_seconds": plan.seconds,
        "cycles": None if plan.program is None else plan.program.cycles,
        **{n: dict(getattr(cost, n)) if cost else {} for n in ("parts", "hidden", "how")},
        "top": [
            {"seconds": seconds, "source": source, "name": name}
            for seconds, source, name in (() if cost is None else cost.top)
        ],
    }


def as_text(plan: Plan) -> str:
    """Return the full report of one plan, about 50 lines."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh_shape.items())
    parts = f" in {plan.accumulation} micro-batches" if plan.accumulation > 1 else ""
    count = plan.topology.num_chips
    chips = f"{count} chip{'s' if count > 1 else ''}"
    compiled_in = "cached" if plan.cached else f"{plan.compile_seconds:.0f} s"
    lines = [
        f"{plan.topology.name}  {chips}, mesh {mesh}  phase {plan.phase}: "
        f"L={plan.length}, {plan.rows} rows per step{parts}, {plan.rows_per_chip:g} per "
        f"chip at once  (lowered in {plan.lowering_seconds:.0f} s, compiled: {compiled_in})",
        "",
        *_memory_lines(plan),
    ]
    if plan.cost is not None:
        head = f"{'collectives per step':37} {'over':15} devices  times  bytes a device"
        exchanges = [
            f"  {e.kind:22} {e.network:10}  {','.join(e.axes):15} {e.group_size:7} {e.runs:6}  "
            f"{_size(e.bytes)}"
            for e in plan.exchanges
        ]
        lines += ["", head, *(exchanges or ["  none"]), "", *_time_lines(plan, plan.cost)]
    return "\n".join(lines)


def _memory_lines(plan: Plan) -> Iterator[str]:
    chip = plan.topology.chip
    memory = memory_per_chip(plan)
    usable = plan.usable * chip.devices_per_chip
    yield f"memory per chip, of {_size(usable)} usable ({_size(chip.hbm_bytes)} HBM)"
    for name, note in _MEMORY.items():
        yield _row(name, _size(memory[name]), memory[name] / usable, note)
    peak = plan.peak * chip.devices_per_chip
    yield _row("peak", _size(peak), peak / usable, f"{peak / usable:.0%}")
    if not plan.fits:
        yield (
            f"does not fit: the step needs {_size(peak)} per chip, which is "
            f"{_size(peak - usable)} more than the usable {_size(usable)}"
        )


def _time_lines(plan: Plan, cost: Cost) -> Iterator[str]:
    seconds, mfu, rate = cost.seconds, plan.mfu or 0.0, plan.tokens_per_second or 0.0
    yield (
        f"predicted step {seconds * 1e3:.2f} ms, {rate:,.0f} tokens/s "
        f"({rate / plan.topology.num_chips:,.0f} per chip), MFU {mfu:.1%}"
    )
    yield _row("ideal", _ms(plan.ideal_seconds), plan.ideal_seconds / seconds,
               "the model's FLOPs at peak")  # fmt: skip
    for name, part in sorted(cost.parts.items(), key=lambda item: -item[1]):
        if part:
            yield _row(name, _ms(part), part / seconds, f"{part / seconds:.1%}")
    for name, part in cost.hidden.items():
        if part:
            yield f"  {name + ' (hidden)':22} {_ms(part):>10}  concurrent with the above, not added"
    yield ""
    yield "most expensive operations             ms  share  source"
    for part, source, name in cost.top:
        yield f"  {name[:32]:32} {part * 1e3:7.3f}  {part / seconds:5.1%}  {source}"
    yield ""
    yield "how it is estimated"
    for name, how in cost.how.items():
        if cost.parts.get(name, 1):
            yield f"  {name}: {how}"


def comparison(plans: Sequence[Plan]) -> str:
    """Return a table with one line per plan."""
    lines = [
        "topology           chips  phase     L    rows  rows/chip  accum  fits    peak/HBM      "
        "step ms      tokens/s    MFU"
    ]
    for plan in plans:
        chip = plan.topology.chip
        peak = plan.peak * chip.devices_per_chip / 2**30
        time = f"{'-':>12} {'-':>13} {'-':>6}"
        if plan.seconds and plan.mfu and plan.tokens_per_second:
            time = f"{plan.seconds * 1e3:12.2f} {plan.tokens_per_second:13,.0f} {plan.mfu:6.1%}"
        lines.append(
            f"{plan.topology.name:18} {plan.topology.num_chips:5} {plan.phase:6} {plan.length:5} "
            f"{plan.rows:7} {plan.rows_per_chip:10g} {plan.accumulation:6}  "
            f"{'yes' if plan.fits else 'no':4} {peak:6.2f}/{chip.hbm_bytes / 2**30:g} GiB {time}"
        )
    return "\n".join(lines)


def draw(plans: Sequence[Plan], path: Path) -> None:
    """Write a PNG with bars of memory and time per plan; a failure leaves no incomplete file."""
    figure = new_figure((11.0, 2.6 + 0.55 * len(plans)))
    memory, time = figure.subplots(1, 2)
    labels = [f"{p.topology.name} L={p.length}" for p in plans]
    gib = [{name: memory_per_chip(plan)[name] / 2**30 for name in _MEMORY} for plan in plans]
    _stack(memory, labels, gib)
    for row, plan in enumerate(plans):
        limit = plan.usable * plan.topology.chip.devices_per_chip / 2**30
        memory.plot([limit, limit], [row - 0.4, row + 0.4], color=INK, linewidth=2)
    memory.set(xlabel="GiB per chip (line: usable)", title="Memory")
    _stack(time, labels, [_shares_of_time(plan) for plan in plans])
    time.set(xlabel="ms per step", title="Time, by source file")
    time.set_yticklabels([])
    write_picture(figure, path)


def _shares_of_time(plan: Plan) -> dict[str, float]:
    """Return milliseconds for each of the six slowest source files, and `other` for the rest."""
    if plan.cost is None:
        return {}
    files: dict[str, float] = {}
    for seconds, source in plan.cost.by_source:
        name = source.split(" ")[0].split(":")[0]
        files[name] = files.get(name, 0.0) + seconds * 1e3
    ordered = sorted(files.items(), key=lambda item: -item[1])
    rest = sum(value for _, value in ordered[6:])
    return {**dict(ordered[:6]), **({"other": rest} if rest else {})}


def _stack(axes: Any, labels: Sequence[str], bars: Sequence[dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for bar in bars for name in bar))
    left = [0.0] * len(bars)
    for number, name in enumerate(names):
        widths = [bar.get(name, 0.0) for bar in bars]
        color = _COLORS[number] if number < len(_COLORS) else None
        axes.barh(range(len(bars)), widths, left=left, label=name, color=color, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3)


def _row(name: str, value: str, share: float, note: str) -> str:
    filled = round(min(max(share, 0.0), 1.0) * _BAR)
    bar = "█" * filled + (">" if share > 1.005 else "")
    return f"  {name:22} {value:>10}  {bar:{_BAR + 1}} {note}".rstrip()


def _size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
