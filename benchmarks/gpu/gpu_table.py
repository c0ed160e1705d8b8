"""The table of `measure.py`: records of all parts, their comparison with peers, and the goals."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""A measurement: part, case and side, then numbers, or `failed` with the reason."""
OURS = {"train": "bert_jax", "inference": "bert_jax", "sweep": "together", "numerics": "xla"}
"""Side of each part that the others are compared with."""
COLUMNS = {
    "numerics": ("milliseconds", "gain", "error", "bound"),
    "train": (
        "rows", "milliseconds", "tokens_per_second", "mfu", "ratio", "first_step_seconds",
    ),
    "sweep": ("milliseconds", "ratio", "compile_seconds"),
    "inference": ("texts_per_second", "ratio"),
}  # fmt: skip
HEADINGS = {
    "milliseconds": "ms", "ratio": "ours / this", "gain": "xla / this",
    "tokens_per_second": "tokens/s", "mfu": "MFU",
    "first_step_seconds": "s to the first step", "compile_seconds": "s to compile",
    "texts_per_second": "texts/s",
}  # fmt: skip


@dataclass
class Table:
    """All measurements of one device."""

    device: Record = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Put a record in the place of the same side's; a failure replaces failures only."""
        same = [r for r in self.records if _key(r) == _key(record)]
        if "failed" in record and any("failed" not in r for r in same):
            return
        self.records = [r for r in self.records if r not in same] + [record]

    def forget_failure(self, record: Record) -> None:
        """Remove the failure of a side that is measured again."""
        self.records = [r for r in self.records if "failed" not in r or _key(r) != _key(record)]

    def find(self, part: str, case: str | None = None) -> list[Record]:
        """Return the records of a part, or of one case of it, that are measurements."""
        return [
            r
            for r in self.records
            if r["part"] == part and case in (None, r["case"]) and "failed" not in r
        ]

    def ratio(self, record: Record) -> float | None:
        """Say how many times as fast as this side ours is, on as many rows."""
        for ours in self.find(record["part"], record["case"]):
            same_rows = ours.get("rows") == record.get("rows")
            if ours["side"] == OURS[record["part"]] and same_rows:
                return _rate(ours) / _rate(record)
        return None

    def save(self, directory: Path) -> None:
        """Write results.json and results.md."""
        content = {"device": self.device, "records": self.records, "goals": self.goals()}
        for name, text in (
            ("results.json", json.dumps(content, indent=1) + "\n"),
            ("results.md", self.markdown()),
        ):
            new = directory / f"{name}.new"
            new.write_text(text)
            os.replace(new, directory / name)

    @classmethod
    def load(cls, directory: Path) -> "Table":
        """Read results.json; an empty table where there is none."""
        path = directory / "results.json"
        if not path.exists():
            return cls()
        content = json.loads(path.read_text())
        return cls(content["device"], content["records"])

    def goals(self) -> list[Record]:
        """Compare with the goals: name, value (None: not measured), bar, reached."""
        return [
            {"goal": goal.name, "value": value, "bar": goal.bar,
             "reached": None if value is None else value >= goal.bar}
            for goal in GOALS
            for value in [goal.value(self)]
        ]  # fmt: skip

    def shortfalls(self) -> list[str]:
        """List what falls short of the goals, and what was not measured."""
        return [
            f"{goal['goal']}: "
            + (
                "not measured"
                if goal["value"] is None
                else f"{goal['value']:.3g}, goal {goal['bar']:.3g}"
            )
            for goal in self.goals()
            if not goal["reached"]
        ]

    def markdown(self) -> str:
        """Write the table for people."""
        about = self.device
        found = ", ".join(f"{k} {v}" for k, v in about.get("versions", {}).items() if v)
        peak = about.get("matmul_flops") or 0.0
        lines = [
            f"# {about.get('device')}", "",
            f"Driver {about.get('driver')}; {found}. Product of bfloat16 matrices: "
            f"{peak / 1e12:.4g} TFLOP/s, measured in the same run; MFU is relative to it. "
            "`ours / this` compares rates: above 1 ours is the faster side.",
        ]  # fmt: skip
        for part, columns in COLUMNS.items():
            records = [r for r in self.records if r["part"] == part]
            if not records:
                continue
            names = ["case", "side", *(HEADINGS.get(name, name) for name in columns)]
            lines += ["", f"## {part}", "", _row(names), _row(["---"] * len(names))]
            for record in sorted(records, key=lambda r: (r["case"], r["side"] != OURS[part])):
                cells = [record["case"], record["side"]]
                if "failed" in record:
                    cells += [f"failed: {record['failed']}"] + [""] * (len(columns) - 1)
                else:
                    ratio = self.ratio(record)
                    values = {**record, "ratio": ratio, "gain": 1 / ratio if ratio else None}
                    cells += [_shown(name, values.get(name)) for name in columns]
                lines.append(_row(cells))
        lines += ["", "## Short of the goals", ""]
        lines += [f"- {text}" for text in self.shortfalls()] or ["Nothing."]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Goal:
    """A number that is to reach a bar."""

    name: str
    bar: float
    value: Callable[[Table], float | None]


def _over_peers(case: str) -> Callable[[Table], float | None]:
    """Make the comparison of our training step with the fastest peer."""
    return lambda table: _least(
        table.ratio(r) for r in table.find("train", case) if r["side"] != OURS["train"]
    )


def _mfu(case: str) -> Callable[[Table], float | None]:
    return lambda table: _least(
        r["mfu"] for r in table.find("train", case) if r["side"] == OURS["train"]
    )


def _sweep(table: Table) -> float | None:
    alone = [
        r for r in table.find("sweep") if r["side"] == "alone" and r["case"].startswith("8 x ")
    ]
    return max((x for r in alone if (x := table.ratio(r)) is not None), default=None)


def _right(table: Table) -> float | None:
    right = [r["right"] for r in table.find("numerics")]
    return sum(right) / len(right) if right else None


GOALS = (
    Goal("share of right outputs and gradients of attention", 1.0, _right),
    Goal("bert_large, L=128: MFU", 0.5, _mfu("bert_large, L=128")),
    *(
        Goal(f"{case}: times the fastest peer", 1.5, _over_peers(case))
        for case in ("bert_large, L=128", "modernbert_base, L=1024", "modernbert_base, L=8192")
    ),
    Goal("sweep of 8: times one after another", 3.0, _sweep),
)


def _key(record: Record) -> tuple[str, str, str]:
    return record["part"], record["case"], record["side"]


def _rate(record: Record) -> float:
    """Return units of work a second, whichever was measured."""
    if "texts_per_second" in record:
        return record["texts_per_second"]
    return 1 / record["milliseconds"]


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "mfu":
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 1000 or name == "rows" else f"{value:.3g}"
