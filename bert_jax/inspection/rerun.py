"""Looking again at a run from its work directory: its evaluation, and any of its batches."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from bert_jax.config.mapping import build
from bert_jax.data.pipeline import EvalBatches, ExampleStream
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.inspection.replay import describe_batch
from bert_jax.parallel.sharding import MeshConfig, make_mesh
from bert_jax.saved.runs import pretrained_checkpoint
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.config import PretrainConfig
from bert_jax.training.corpus import Corpus, open_corpus, step_config
from bert_jax.training.evaluate import EVAL_SEED, evaluate
from bert_jax.training.state import state_shardings
from bert_jax.training.step import make_eval_step
from bert_jax.training.workdir import check_workdir, read_config


def evaluate_run(
    workdir: Path | str, *, corpus: str | None = None, max_rows: int | None = None
) -> dict[str, float]:
    """Losses (nats) and accuracies of the newest intact checkpoint on held-out text.

    Rows have the length of the run's last phase. Any corpus of the same tokenizer will do.

    Args:
        workdir: Work directory of a `bert-jax pretrain` run.
        corpus: Directory of another corpus; None: the run's own.
        max_rows: At most so many rows; None: all.

    Raises:
        UserError: No checkpoint there, no held-out text, or a corpus of another tokenizer.
    """
    restored = pretrained_checkpoint(workdir)
    config = build(PretrainConfig, restored.record.config, where=f"checkpoint {restored.step}")
    tokenizer = open_workdir(workdir).local / "tokenizer"
    stores = open_corpus(corpus or config.data.corpus)
    expected = load_tokenizer(tokenizer).fingerprint
    if stores.train.tokenizer_fingerprint != expected:
        raise UserError(
            f"the corpus {corpus or config.data.corpus} was made with the tokenizer "
            f"{stores.train.tokenizer_fingerprint[:12]} and the run with {expected[:12]}; build "
            f"the corpus with --tokenizer {tokenizer}"
        )
    if stores.heldout is None:
        raise UserError(
            f"the corpus {corpus or config.data.corpus} has no held-out text; build it with "
            "--heldout-rate above 0"
        )
    config = dataclasses.replace(config, mesh=MeshConfig())
    mesh = make_mesh(config.mesh)
    phase = config.phases[-1]
    batch_size = -(-min(phase.batch_size, 256) // mesh.size) * mesh.size
    rows = EvalBatches(stores.heldout, config.data, phase.length, batch_size, max_rows=max_rows)
    settings = step_config(config, stores)
    params = jax.device_put(restored.state, state_shardings(settings, mesh).params)
    eval_step = make_eval_step(settings, mesh, EVAL_SEED)
    metrics = evaluate(settings.objective, eval_step, params, rows, mesh)
    baseline = settings.objective.baseline
    return {
        "step": float(restored.step),
        **metrics,
        **({} if baseline is None else {"unigram_entropy": baseline}),
    }


def replay_batch(
    workdir: Path | str, step: int, *, corpus: str | None = None, max_rows: int | None = None
) -> str:
    """Batch `step` of a run, decoded, with the masks it was trained with.

    Args:
        workdir: Work directory of a `bert-jax pretrain` run.
        step: Number of the batch, from 0.
        corpus: Where the run's corpus lies now; None: where it lay.
        max_rows: Rows to show; None: all.

    Raises:
        UserError: No run there, a step outside it, or another corpus.
    """
    place = open_workdir(workdir)
    config = read_config(place.local)
    stores = open_corpus(corpus or config.data.corpus)
    check_workdir(place, config, stores.train)
    return _describe(config, stores, step, max_rows)


def _describe(config: PretrainConfig, stores: Corpus, step: int, max_rows: int | None) -> str:
    if not 0 <= step < config.training.num_steps:
        raise UserError(
            f"--step is {step}; the run has batches 0 to {config.training.num_steps - 1}"
        )
    store = stores.train
    config = config.with_vocabulary(store.vocab_size)
    stream = ExampleStream(store, config.data, config.phases, config.seed)
    batch = stream.batch(step)
    settings = step_config(config, stores)
    rows = settings.objective.prepare(jax.tree.map(jnp.asarray, batch), config.seed)
    shown = settings.objective.shown(rows)
    if store.path is None:
        raise UserError(
            "a batch is decoded with its store's tokenizer, so the store must be a file"
        )
    return describe_batch(
        batch,
        shown,
        load_tokenizer(store.path / "tokenizer"),
        pairing=config.data.pairing,
        max_rows=max_rows,
    )
