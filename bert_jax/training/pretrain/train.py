"""Pretraining: how a configuration becomes a plan, which the training loop carries out."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.data.pipeline import ExampleStream, TrainBatches
from bert_jax.distributed.parallel import sharding
from bert_jax.distributed.parallel.sharding import make_mesh, place_batch
from bert_jax.files.remote import WorkDir
from bert_jax.training.loop import carry_out
from bert_jax.training.pretrain.branch import open_branch
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, MixedCorpora, open_corpus, phase_stores
from bert_jax.training.pretrain.evaluate import HeldOut, check_evaluated, heldout_rows
from bert_jax.training.pretrain.probes import Probe, Translations
from bert_jax.training.pretrain.saves import PretrainSaves, check_workdir
from bert_jax.training.pretrain.settings import (
    check_stages,
    mixed_corpora,
    step_config,
    with_batch_unit,
)
from bert_jax.training.pretrain.start import resolve_start
from bert_jax.training.pretrain.voice import PretrainVoice, summary
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run.session import Session, hold_workdir
from bert_jax.training.run_plan import Batches, Policy, Profiler, Result, RunPlan, Scorer, Stage
from bert_jax.training.sweep.statistics import Trial
from bert_jax.training.workdir import look_into


def train(
    config: PretrainConfig,
    workdir: Path | str,
    *,
    corpus: Corpus | None = None,
    read: Callable[[str], SavedModel] = read_model,
    branch_from: str = "",
    clock: Clock | None = None,
    echo: Callable[[str], None] | None = None,
    profiler: Profiler | None = None,
    track: Sequence[str] = (),
) -> Result:
    """Start a pretraining run, or continue the run in `workdir`, until its last step or a signal.

    All processes must call this function, after `jax.distributed.initialize`, and share `workdir`.

    Args:
        workdir: Local directory, made if missing, or `gs://bucket/directory`.
        corpus: Corpus to read instead of `config.data.corpus`.
        read: Function that reads the teacher and, at the first start, the model `config.init`.
        branch_from: Checkpoint of another run to continue, as `WORKDIR@STEP`, or `WORKDIR` for its
            newest checkpoint that was read back. A restart does not need this argument.
        clock: Clock that was started with the process; by default, a new clock.
        echo: Function that receives each line to print. By default, lines go to standard output,
            and a terminal shows a progress bar.
        profiler: Profiler of some steps (see `planning.profile`).
        track: Packages of experiment trackers that show the metrics, too: `wandb`, `trackio`.

    Raises:
        UserError: Configuration, corpus, devices or work directory conflict; nothing is written.
        BadStepError: The guard has stopped the run at a bad step (see `GuardConfig.on_bad_step`).
        DivergedError: The loss has diverged, and `guard.on_divergence` is "stop".
        DamagedCheckpointError: None of the run's checkpoints is intact.
        SaveFailedError: Several saves in a row have failed.
    """
    corpus = corpus or open_corpus(config.data.corpus, config.data)
    with hold_workdir(workdir, echo=echo) as work:
        seconds = config.training.stall_seconds
        session = Session(work, stall_seconds=seconds, clock=clock, echo=echo, track=track)
        plan = resolve_pretraining(config, work, corpus, read, branch_from)
        return carry_out(plan, session, profiler and profiler(plan))


def _batches(
    examples: ExampleStream, mesh: Mesh, first: int
) -> Generator[Mapping[str, Any], None, None]:
    with contextlib.closing(TrainBatches(examples, first, *sharding.data_shard(mesh))) as rows:
        for batch in rows:
            yield place_batch(batch, mesh)


def resolve_pretraining(
    config: PretrainConfig,
    work: WorkDir,
    corpus: Corpus,
    read: Callable[[str], SavedModel] = read_model,
    branch_from: str = "",
) -> RunPlan:
    """Make the plan of a run: open all models and texts, and check that they fit together."""
    store, there = corpus.train, look_into(work, "pretrain")
    branch = open_branch(branch_from, work, there)
    branched = branch.config if branch else None
    config, start = resolve_start(config, read, store.tokenizer_fingerprint, there, branched)
    mesh = make_mesh(config.mesh)
    shards, begun = sharding.num_batch_shards(mesh), there.config(PretrainConfig) or branched
    warmed = begun and any(phase.batch_warmup_steps for phase in begun.training.phases)
    unit = begun.training.batch_unit if begun and warmed else 0
    config = with_batch_unit(config, shards, unit).with_vocabulary(store.vocab_size)
    training, numbers = config.training, range(len(config.phases))
    texts = phase_stores(config, store)
    check_workdir(work, there, config, store, texts, start.teacher_digest)
    begins = max(there.steps, default=branch.step if branch else 0)
    check_stages(config, shards, begins)
    check_evaluated(config, corpus)
    steps = [step_config(config, corpus, number) for number in numbers]
    trial = Trial(config.init, config.optimizer.learning_rate, config.seed)
    saves = PretrainSaves(config, work, corpus, texts, mesh, steps[0], start, branch, trial)
    if branch is not None:
        branch.check(config, store, texts, start.teacher_digest, saves.saved)
    mixed = MixedCorpora(mixed_corpora(config), config.data)
    named = mixed.named(texts, training.phases, store)
    examples = ExampleStream(store, config.data, config.phases, config.seed, named)
    for number in numbers:
        examples.plan(number)
    ends = (0, *training.phase_starts, training.num_steps)
    scorers: list[Scorer] = []
    files = store.path and store.path / "tokenizer"
    if corpus.heldout is not None:
        parts = mixed.heldout()
        settings = [step_config(config, corpus, number, evaluates=True) for number in numbers]
        rows = heldout_rows(config, corpus.heldout, mesh)
        mix = {name: heldout_rows(config, each, mesh, len(parts)) for name, each in parts.items()}
        scorers.append(HeldOut(settings, mesh, rows, mix, training.eval_every_steps, ends[1:]))
        if training.eval_translations:
            scorers.append(Translations(config, corpus.heldout.shards[0], files, scorers[0]))
    scorers += [
        Probe(config, number, files, saves.abstract.params, work)
        for number in range(len(training.probes))
    ]
    objective = steps[0].objective
    voice = PretrainVoice(
        summary(config, work.name, corpus, examples, mesh, objective),
        [*([branch.line(config)] if branch else []), *start.lines(saves.saved.params)],
        work, objective, config.phases, partial(mixed.seen, examples), saves,
    )  # fmt: skip
    return RunPlan(
        name=work.name, mesh=mesh, scorers=tuple(scorers), saves=saves, voice=voice, begins=begins,
        stages=tuple(
            Stage(range(*bounds), step, (trial,))
            for bounds, step in zip(pairwise(ends), steps, strict=True)
        ),
        batches=Batches(partial(_batches, examples, mesh), examples.wait_for_checks),
        policy=Policy(
            log_every=training.log_every_steps,
            scores_start=start.initial is not None and bool(scorers),
            save_every=config.checkpoint.save_every_steps, saves_end=True,
            metric=config.retention.best_metric.removeprefix("eval/") if training.patience else "",
            patience=training.patience,
            stops_diverged=config.guard.on_divergence == "stop",
        ),
    )  # fmt: skip
