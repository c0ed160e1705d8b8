"""Write docs/record.md from the lines of records/*.jsonl, the best recipe of each track first.

python records/page.py
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.training.sweep.statistics import student_interval

HOME = Path(__file__).parent
PAGE, RULES = HOME.parent / "docs" / "record.md", HOME / "rules.md"
Lines = Sequence[Mapping[str, Any]]


def gain(lines: Lines, base: Lines) -> str:
    """Describe how much lower the loss is than the baseline's, paired by seed, with a 95% interval.

    With one seed in common there is no interval.
    """
    of = {line["seed"]: line["loss"] for line in base}
    gains = [of[line["seed"]] - line["loss"] for line in lines if line["seed"] in of]
    if not gains:
        return ""
    mean = statistics.mean(gains)
    if len(gains) == 1:
        return f"{mean:+.3f} (one seed)"
    low, high = student_interval(np.array(gains))
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def table(lines: Lines, baseline: str) -> Iterator[str]:
    """Yield the rows of a track's table; a recipe with other code or steps has a row of its own."""
    rows: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        rows.setdefault((line["name"], line["recipe"], line["steps"]), []).append(line)
    base = next((own for (name, *_), own in rows.items() if name == baseline), [])
    yield "| loss (nats) | gain | seeds | steps | hours | recipe | what it changes |"
    yield "|---|---|---|---|---|---|---|"
    for own in sorted(rows.values(), key=lambda own: statistics.mean(x["loss"] for x in own)):
        first, loss = own[0], statistics.mean(line["loss"] for line in own)
        against = "baseline" if own is base else gain(own, base)
        hours = statistics.mean(line["hours"] for line in own)
        yield (
            f"| {loss:.4f} | {against} | {len(own)} | {first['steps']:,} | {hours:.2f} | "
            f"{first['name']} | {first['what']} |"
        )


def page() -> str:
    """Return the whole page."""
    parts = [RULES.read_text("utf-8").rstrip()]
    for path in sorted(HOME.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        track = json.loads((HOME / "tracks" / f"{path.stem}.json").read_text("utf-8"))
        device = f"{lines[0]['device']}, jax {lines[0]['versions']['jax']}"
        parts.append(
            f"## {path.stem.replace('_', ' ').capitalize()}, {track['seconds'] / 60:g} minutes\n\n"
            f"Lines: `records/{path.name}`. Measured on {device}.\n\n"
            + "\n".join(table(lines, lines[0]["name"]))
        )
    parts.append(
        "## Next\n\n- [Pretraining](pretraining.md): the fields that a recipe sets.\n"
        "- [Experiments](experiments.md#what-the-record-screened): what was tried beside the "
        "record."
    )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
