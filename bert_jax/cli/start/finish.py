"""The second half of `bert-jax start`: pretraining, fine-tuning, exports and a page."""

import base64
import html
import math
import time
from collections.abc import Iterator
from pathlib import Path

from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.saved.ancestors import known_ancestors
from bert_jax.artefacts.saved.lineage import ancestor_entry
from bert_jax.artefacts.saved.runs import REPORT
from bert_jax.cli.inspection.evaluate import evaluate_run
from bert_jax.cli.start.begin import CHOICES, RECIPE, Asked, Promise, open_labels
from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.tasks.task import Task
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.train import finetune
from bert_jax.training.finetune.voice import NothingLearnedError
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import duration

PAGE = "start.html"
_FEWEST_STEPS, _BATCH_SIZE, _MOST_EPOCHS, _LEAST_EPOCHS = 300, 32, 20, 3
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#f4f6f8;padding:.8rem;white-space:pre-wrap}img{max-width:100%}"
    "td{padding:.2rem .8rem}meter{width:14rem}"
)


def finish(asked: Asked, promise: Promise, home: Path) -> str:
    """Carry out the recipe to its end, and write a page; keep what an earlier call finished.

    Return the name of the signal that ended the work early, or an empty string. At the end, raise a
    NothingLearnedError if the classifier is no better than a constant.
    """
    began = time.perf_counter()
    result = train(load_config(PretrainConfig, str(home / RECIPE)), home / "run")
    if result.stopped_by:
        return result.stopped_by
    measured = result.eval_metrics or evaluate_run(home / "run")  # metrics.jsonl may be lost
    reached = measured["eval/nats_below_unigram"]
    lines = [f"reached     {reached:.2f} nats; promised: {promise}"]
    lines += _exported(home, "run", "encoder")
    scores: list[tuple[str, str, float]] = []
    if asked.labels:
        task = open_labels(asked, home)
        config = classifier_config(asked, home, len(task.train_split().rows))
        result = finetune(config, home / "classifier")
        if result.stopped_by:
            return result.stopped_by
        lines += _exported(home, "classifier", "classifier")
        scores = list(_scores(task, home / "classifier"))
        lines += [f"{metric:11} {score:.3f}  {name}" for name, metric, score in scores]
    spent = duration(time.perf_counter() - began)
    lines.append(f"time        {spent} after the choice, of {duration(3600 * asked.hours)} in all")
    _write_page(asked, lines, scores, home)
    print("\n".join([*lines, f"page        {home / PAGE}: open it in a browser"]))
    if result.unlearned:
        raise NothingLearnedError(result.unlearned)
    return ""


def classifier_config(asked: Asked, home: Path, num_rows: int) -> FinetuneConfig:
    """Return the configuration of the classifier: about 300 steps or more, in 3 to 20 epochs."""
    epochs = math.ceil(_FEWEST_STEPS * _BATCH_SIZE / num_rows)
    epochs = min(_MOST_EPOCHS, max(_LEAST_EPOCHS, epochs))
    training = {"num_epochs": float(epochs), "batch_size": _BATCH_SIZE}
    values = {"init": str(home / "run"), "task": asked.task, "training": training}
    return build(FinetuneConfig, values)


def _scores(task: Task, workdir: Path) -> Iterator[tuple[str, str, float]]:
    """Yield prediction, metric and score of the model, a linear model and a constant.

    The scores are on test data or, without test data, on dev.
    """
    split = (*task.test_splits(), *task.dev_splits())[0]
    report = read_json_object(workdir / REPORT, max_bytes=1 << 26)
    metric, found = report["metric"], report["splits"][split.name]
    ends = found["intervals"].get(metric)
    interval = "" if ends is None else ", 95%: {:.3f} to {:.3f}".format(*ends)
    model = f"this model (on {split.num_scored:,} examples of {split.name}{interval})"
    yield model, metric, found["scores"][metric]
    words = split.linear_score(task.train_split())
    if words is not None and math.isfinite(words):
        yield "TF-IDF and a linear model, same rows", metric, words
    yield "a constant", metric, split.constant_score


def _exported(home: Path, run: str, name: str) -> Iterator[str]:
    """Export a model with a proof, unless the export exists; yield lines about the proof.

    Raise a UserError if the directory holds an export of another model.
    """
    out = home / "export" / name
    if not out.exists():
        export(home / run, "huggingface", out, say=print)
    parity = read_json_object(out / "parity.json", max_bytes=1 << 24)
    made = known_ancestors(parity, out / "parity.json").get("source")
    now = ancestor_entry("source", home / run, made.step if made else None)
    if made and made.recorded != now.get("digest", ""):
        raise UserError(f"{out} is the export of another model; delete it and repeat the command")
    gap = max(parity["differences"].values(), default=0.0)
    readers = [reader for reader, proof in parity.get("proofs", {}).items() if proof["ran"]]
    proven = ", ".join(readers) or "bert_jax itself (Transformers is not installed)"
    yield f"export      {out}: read back by {proven}, largest difference {gap:.1e}"


def _write_page(
    asked: Asked, lines: list[str], scores: list[tuple[str, str, float]], home: Path
) -> None:
    """Write an HTML page that loads nothing: result, scores, pictures and choices."""
    names = html.escape(", ".join(asked.files))
    parts = [f"<h1>{names}</h1><h2>Result</h2><pre>{html.escape(chr(10).join(lines))}</pre>"]
    rows = [
        f"<tr><td>{html.escape(name)}<td>{html.escape(metric)} {score:.3f}"
        f"<td><meter value={max(0.0, score):.3f}></meter>"
        for name, metric, score in scores
    ]
    if rows:
        parts.append(f"<h2>Classifier</h2><table>{''.join(rows)}</table>")
    for title, path in (("Loss", "run/loss.png"), ("Labels", "classifier/confusion.png")):
        if (home / path).exists():
            data = base64.b64encode((home / path).read_bytes()).decode()
            parts.append(f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">')
    parts.append(f"<h2>Choices</h2><pre>{html.escape((home / CHOICES).read_text('utf-8'))}</pre>")
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{names}</title>'
    head += f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    replace_file(home / PAGE, "".join([head, *parts]).encode(errors="backslashreplace"))
