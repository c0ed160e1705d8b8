"""Evaluation of a pretraining run from its work directory."""

from pathlib import Path

import jax

from bert_jax.config.mapping import build
from bert_jax.data.pipeline import EvalBatches
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.parallel.sharding import MeshConfig, make_mesh
from bert_jax.saved.runs import pretrained_checkpoint
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.config import PretrainConfig
from bert_jax.training.corpus import open_corpus, step_config
from bert_jax.training.evaluate import EVAL_SEED, evaluate
from bert_jax.training.state import state_shardings
from bert_jax.training.step import make_eval_step


def evaluate_run(
    workdir: Path | str, *, corpus: str | None = None, max_rows: int | None = None
) -> dict[str, float]:
    """Return losses (nats) and accuracies of the newest intact checkpoint on held-out text.

    Rows have the length of the run's last phase. Any corpus of the same tokenizer will do.

    Args:
        workdir: Work directory of a `bert-jax pretrain` run.
        corpus: Directory of another corpus; None: the run's own.
        max_rows: Largest number of rows; None: all.

    Raises:
        UserError: No checkpoint there, no held-out text, or a corpus of another tokenizer.
    """
    restored = pretrained_checkpoint(workdir)
    config = build(PretrainConfig, restored.record.config, where=f"checkpoint {restored.step}")
    tokenizer = open_workdir(workdir).local / "tokenizer"
    name = corpus or config.data.corpus
    stores = open_corpus(name)
    expected = load_tokenizer(tokenizer).fingerprint
    if stores.train.tokenizer_fingerprint != expected:
        raise UserError(
            f"the corpus {name} was made with the tokenizer "
            f"{stores.train.tokenizer_fingerprint[:12]} and the run with {expected[:12]}; build "
            f"the corpus with --tokenizer {tokenizer}"
        )
    if stores.heldout is None:
        raise UserError(
            f"the corpus {name} has no held-out text; build it with --heldout-rate above 0"
        )
    mesh = make_mesh(MeshConfig())
    phase = config.phases[-1]
    batch_size = -(-min(phase.batch_size, 256) // mesh.size) * mesh.size
    rows = EvalBatches(stores.heldout, config.data, phase.length, batch_size, max_rows=max_rows)
    settings = step_config(config.for_evaluation(), stores)
    params = jax.device_put(restored.state, state_shardings(settings, mesh).params)
    eval_step = make_eval_step(settings, mesh, EVAL_SEED)
    metrics = evaluate(settings.objective, eval_step, params, rows, mesh)
    values = {"step": float(restored.step), **metrics}
    baseline = settings.objective.baseline
    return values if baseline is None else values | {"unigram_entropy": baseline}
