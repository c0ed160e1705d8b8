"""The second half of `bert-jax start`: pretraining, fine-tuning, exports and the page."""

import math
import time
from pathlib import Path
from typing import Any

from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.saved.runs import REPORT
from bert_jax.cli.start.begin import RECIPE, Asked, Chosen
from bert_jax.cli.start.page import Classifier, Made, write_page
from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import build
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.setup import set_up
from bert_jax.training.finetune.train import finetune
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.train import train

PAGE = "start.html"
_FEWEST_STEPS, _BATCH_SIZE = 300, 32
_NOTHING_LEARNED = 8


def finish(asked: Asked, chosen: Chosen, home: Path) -> int:
    """Carry out the recipe to its end, and write a page; return the exit code.

    The same call continues what a signal stopped. Each part is done once.

    Returns:
        0; 8 if the classifier learned nothing; 130 or 0 if Ctrl-C or SIGTERM stopped a run.
    """
    began = time.perf_counter()
    result = train(load_config(PretrainConfig, str(home / RECIPE)), home / "run")
    if not result.finished:
        return 130 if result.stopped_by == "SIGINT" else 0
    reached = result.eval_metrics["eval/nats_below_unigram"]
    exports = {"encoder": _exported(home / "run", home / "export" / "encoder")}
    classifier = None
    if asked.labels:
        config = classifier_config(asked, home)
        found = finetune(config, home / "classifier")
        if not found.finished:
            return 130 if found.stopped_by == "SIGINT" else 0
        classifier = _judged(config, home / "classifier", found.unlearned)
        exports["classifier"] = _exported(home / "classifier", home / "export" / "classifier")
    made = Made(asked, chosen, reached, time.perf_counter() - began, exports, classifier)
    write_page(made, home / PAGE)
    print("\n".join(made.lines()))
    print(f"page        {home / PAGE}: open it in a browser")
    return _NOTHING_LEARNED if classifier and classifier.unlearned else 0


def classifier_config(asked: Asked, home: Path) -> FinetuneConfig:
    """Return the configuration of the classifier: at least 300 steps, rates by the model's size."""
    task = {"kind": "table", "train": asked.labels, "test": asked.test, **dict(asked.columns)}
    values: dict[str, Any] = {"init": str(home / "run"), "task": task}
    config = build(FinetuneConfig, values)
    rows = len(set_up(config).train.rows)
    epochs = min(20.0, max(3.0, math.ceil(_FEWEST_STEPS * _BATCH_SIZE / rows)))
    values["training"] = {"num_epochs": epochs, "batch_size": _BATCH_SIZE}
    return build(FinetuneConfig, values)


def _judged(config: FinetuneConfig, workdir: Path, unlearned: str) -> Classifier:
    """Return the scores of model, linear model and constant on test data or, without, on dev."""
    setup = set_up(config)
    split = (*setup.test, *setup.dev)[0]
    report = read_json_object(workdir / REPORT, max_bytes=1 << 26)
    metric, found = report["metric"], report["splits"][split.name]
    return Classifier(
        metric=metric,
        rows=split.num_scored,
        split=split.name,
        model=found["scores"][metric],
        interval=found["intervals"].get(metric),
        words=split.linear_score(setup.train),
        constant=split.constant_score,
        unlearned=unlearned,
    )


def _exported(source: Path, out: Path) -> str:
    """Export a model with its proof, unless that is done; describe the proof."""
    if not out.exists():
        export(source, "huggingface", out, say=print)
    parity = read_json_object(out / "parity.json", max_bytes=1 << 24)
    gap = max(parity["differences"].values(), default=0.0)
    readers = [name for name, proof in parity.get("proofs", {}).items() if proof["ran"]]
    proven = f"read back by {', '.join(readers)}" if readers else "Transformers is not installed"
    return f"{out}: largest difference {gap:.1e}, {proven}"
