"""The page that `bert-jax start --go` writes: what was made, and how well it does."""

import base64
import html
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import bert_jax
from bert_jax.cli.start.begin import CHOICES, Asked, Chosen
from bert_jax.files.staging import replace_file
from bert_jax.training.run.telemetry import duration

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;"
    "color:#1a202c}table{border-collapse:collapse}td,th{padding:.3rem .8rem;text-align:left;"
    "border-bottom:1px solid #e2e8f0}pre{background:#f7fafc;padding:.8rem;overflow-x:auto;"
    "font-size:.85rem}img{max-width:100%}.bar{background:#2b6cb0;height:.8rem}.wide{width:14rem}"
)


class Classifier(NamedTuple):
    """Scores of the fine-tuned model beside two simpler predictions."""

    metric: str
    rows: int
    """Number of scored examples."""
    split: str
    """Name of the data that the scores are from: `test`, or `dev`, which chose the epoch."""
    model: float | None
    interval: tuple[float, float] | None
    """95% interval of the model's score."""
    words: float | None
    """Score of TF-IDF and a linear model; None without scikit-learn."""
    constant: float
    unlearned: str
    """Message if no run was better than a constant; else empty."""

    def rows_of_scores(self) -> Iterator[tuple[str, float, str]]:
        """Yield name, score and interval of each prediction that has a score."""
        ends = "" if self.interval is None else "{:.3f} to {:.3f}".format(*self.interval)
        for name, score, more in (
            ("this model", self.model, ends),
            ("TF-IDF and a linear model", self.words, ""),
            ("a constant", self.constant, ""),
        ):
            if score is not None and math.isfinite(score):
                yield name, score, more


class Made(NamedTuple):
    """What a start has made."""

    asked: Asked
    chosen: Chosen
    reached: float
    """Nats below the unigram entropy that the model reached."""
    seconds: float
    """Time of this call."""
    exports: Mapping[str, str]
    classifier: Classifier | None

    def lines(self) -> Iterator[str]:
        """Describe the result beside the promise."""
        low, high = self.chosen.nats - self.chosen.spread, self.chosen.nats + self.chosen.spread
        inside = "inside" if low <= self.reached <= high else "outside"
        yield (
            f"reached     {self.reached:.2f} nats below the unigram line; {self.chosen.nats:.2f} "
            f"promised, {inside} {low:.2f} to {high:.2f}"
        )
        yield f"time        {duration(self.seconds)} of {duration(self.asked.seconds)}"
        if judged := self.classifier:
            for name, score, more in judged.rows_of_scores():
                yield f"{judged.metric:11} {score:.3f}  {name}{more and f' (95%: {more})'}"
        for name, line in self.exports.items():
            yield f"{name:11} {line}"


def write_page(made: Made, path: Path) -> None:
    """Write a self-contained HTML page beside the runs of a start."""
    home, parts = path.parent, []
    parts.append(f"<h1>{html.escape(', '.join(made.asked.files))}</h1>")
    parts.append(f"<p>An encoder of {made.chosen.size}, trained by bert_jax "
                 f"{bert_jax.__version__}.</p>")  # fmt: skip
    parts.append("<h2>Result</h2><pre>" + html.escape("\n".join(made.lines())) + "</pre>")
    if made.classifier:
        parts.append(_scores(made.classifier))
    for name, picture in (
        ("Loss", home / "run" / "loss.png"),
        ("Labels", home / "classifier" / "confusion.png"),
    ):
        if picture.exists():
            data = base64.b64encode(picture.read_bytes()).decode()
            parts.append(f'<h2>{name}</h2><img alt="{name}" src="data:image/png;base64,{data}">')
    choices = (home / CHOICES).read_text("utf-8")
    parts.append("<h2>Choices</h2><pre>" + html.escape(choices) + "</pre>")
    title = html.escape(f"bert-jax start: {', '.join(made.asked.files)}")
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}</title><style>{_STYLE}</style>'
        + "\n".join(parts)
    )
    replace_file(path, page.encode())


def _scores(found: Classifier) -> str:
    rows = "".join(
        f"<tr><td>{name}<td>{score:.3f}<td>{more}<td class=wide>"
        f'<div class=bar style="width:{100 * max(0.0, min(1.0, score)):.0f}%"></div>'
        for name, score, more in found.rows_of_scores()
    )
    return (
        f"<h2>Classifier</h2><table><tr><th>prediction<th>{html.escape(found.metric)}<th>95%<th>"
        f"{rows}</table><p>On {found.rows:,} examples of {html.escape(found.split)}. "
        f"{html.escape(found.unlearned)}</p>"
    )
