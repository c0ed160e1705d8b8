"""Evaluation of pretraining runs and pretrained models on held-out text."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.artefacts.saved.runs import is_run, pretrained_checkpoint, split_name
from bert_jax.config.mapping import build
from bert_jax.data.pipeline import EvalBatches
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.evaluate import (
    EVAL_SEED,
    check_measurable,
    evaluate,
    heldout_metrics,
)
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.run.telemetry import readout
from bert_jax.training.steps.state import StepConfig, state_shardings
from bert_jax.training.steps.step import make_eval_step

_TOKENS = 1 << 15
"""Largest number of tokens in a batch; a batch still has at least one row per device."""

_log = logging.getLogger("bert_jax")


class HeldOutRun(NamedTuple):
    """A checkpoint of a run, with the held-out rows on which it is evaluated."""

    step: int
    """Number of steps that trained the parameters."""
    length: int
    """Number of tokens in a row."""
    trained_length: int
    """Number of tokens in the longest row of the phases up to the step."""
    settings: StepConfig
    params: Any
    """Parameters on `mesh`."""
    rows: EvalBatches
    mesh: Mesh


def open_heldout(
    workdir: Path | str,
    *,
    corpus: str | None = None,
    max_rows: int | None = None,
    length: int | None = None,
    step: int | None = None,
) -> HeldOutRun:
    """Read a checkpoint and plan rows of held-out text.

    Rows may be longer than in training (with a warning), unless learned positions limit them. Raise
    a UserError if there is no such checkpoint or no held-out text, the corpus has another
    tokenizer, or rows are shorter than 8 tokens or exceed the learned positions.

    Args:
        workdir: Work directory of a `bert-jax pretrain` run.
        corpus: Directory of another corpus; None means the run's own corpus.
        max_rows: Largest number of rows; None means all rows.
        length: Number of tokens in a row; None means as in the run's last phase.
        step: Step of the checkpoint; None means the newest intact checkpoint.
    """
    restored = pretrained_checkpoint(workdir, step)
    config = build(PretrainConfig, restored.record.config, where=f"checkpoint {restored.step}")
    tokenizer = open_workdir(workdir).local / "tokenizer"
    name = corpus or config.data.corpus
    stores = open_corpus(name)
    expected = load_tokenizer(tokenizer).fingerprint
    if stores.train.tokenizer_fingerprint != expected:
        raise UserError(
            f"the corpus {name} was made with the tokenizer "
            f"{stores.train.tokenizer_fingerprint[:12]}, but the run has the tokenizer "
            f"{expected[:12]}; build the corpus with --tokenizer {tokenizer}"
        )
    if stores.heldout is None:
        raise UserError(
            f"the corpus {name} has no held-out text; build it with --heldout-rate above 0"
        )
    mesh = make_mesh(MeshConfig())
    phase = config.phases[-1]
    length = phase.length if length is None else length
    done = config.training.phase_of(max(restored.step - 1, 0))
    trained_length = max(each.length for each in config.phases[: done + 1])
    config = _with_positions(config, length, trained_length)
    batch_size = min(phase.batch_size, max(1, _TOKENS // length))
    batch_size = -(-batch_size // mesh.size) * mesh.size
    rows = EvalBatches(stores.heldout, config.data, length, batch_size, max_rows=max_rows)
    settings = step_config(config, stores, done, evaluates=True)
    params = _placed(restored.state, settings, mesh)
    return HeldOutRun(restored.step, length, trained_length, settings, params, rows, mesh)


def _placed(params: Any, settings: StepConfig, mesh: Mesh) -> Any:
    """Put the parameters that the objective uses onto a mesh; leave out all other parameters."""
    shardings = state_shardings(settings, mesh).params
    return jax.device_put({name: params[name] for name in shardings}, shardings)


def _with_positions(config: PretrainConfig, length: int, trained_length: int) -> PretrainConfig:
    """Return `config` with at least `length` positions. Warn if training rows were shorter."""
    model = config.model
    if length < 8:
        raise UserError(f"--length is {length}; it must be at least 8")
    if length > model.num_positions and model.positions in ("learned", "relative"):
        raise UserError(
            f"--length is {length}; the model has {model.num_positions} {model.positions} "
            f"positions, so rows have at most {model.num_positions} tokens"
        )
    if length > trained_length:
        _log.warning(
            "rows have %d tokens, but training had at most %d: the model has not seen "
            "the later positions", length, trained_length,
        )  # fmt: skip
    return replace(config, model=replace(model, num_positions=max(length, model.num_positions)))


def evaluate_run(
    workdir: Path | str,
    *,
    corpus: str | None = None,
    max_rows: int | None = None,
    length: int | None = None,
    step: int | None = None,
) -> dict[str, float]:
    """Return losses (nats) and accuracies of a checkpoint on held-out text.

    The corpus must have the model's tokenizer. Arguments and errors are as in `open_heldout`.
    `workdir` may also be a model in Hugging Face's format, with a `corpus` and without a `step`.
    """
    if not is_run(workdir):
        model = f"{workdir} is a model in Hugging Face's format"
        if corpus is None:
            raise UserError(f"{model} and records no corpus; give --corpus")
        if step is not None:
            raise UserError(f"--step is {step}, but {model} and has no steps; leave --step out")
        stores, saved = open_corpus(corpus), read_model(workdir)
        check_measurable(saved, stores, corpus, f"{workdir}")
        values = heldout_metrics(saved, stores, length=length, max_rows=max_rows)
        return values | {"unigram_entropy": stores.train.unigram_entropy}
    run = open_heldout(workdir, corpus=corpus, max_rows=max_rows, length=length, step=step)
    objective = run.settings.objective
    eval_step = make_eval_step(run.settings, run.mesh, EVAL_SEED)
    metrics = evaluate(objective, eval_step, run.params, run.rows, run.mesh)
    values = {"step": float(run.step), **metrics}
    baseline = objective.baseline
    return values if baseline is None else values | {"unigram_entropy": baseline}


def compared_lines(
    names: Sequence[str], *, corpus: str | None = None, max_rows: int | None = None
) -> Iterator[str]:
    """Yield a line of held-out metrics for each of several checkpoints of one model.

    All checkpoints are evaluated on the same rows. The rows come from `corpus` or, if it is None,
    from the last checkpoint's corpus. `names` are checkpoints, WORKDIR@STEP or WORKDIR. Raise a
    UserError if a checkpoint or held-out text is missing, or the corpus has another tokenizer.
    """
    workdir, step = split_name(names[-1])
    run = open_heldout(workdir, corpus=corpus, max_rows=max_rows, step=step)
    objective = run.settings.objective
    eval_step, width = make_eval_step(run.settings, run.mesh, EVAL_SEED), max(map(len, names))
    for name in names:
        params = run.params
        if name != names[-1]:
            params = _placed(pretrained_checkpoint(*split_name(name)).state, run.settings, run.mesh)
        values = evaluate(objective, eval_step, params, run.rows, run.mesh)
        yield f"{name:{width}}  {readout(objective.metrics, values, 'eval', objective.baseline)}"
