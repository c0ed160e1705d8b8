"""Fine-tuning: how a configuration becomes a plan, which the training loop carries out."""

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bert_jax.artefacts.saved.runs import STATISTICS
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.distributed.parallel.sharding import make_trial_mesh
from bert_jax.files.remote import WorkDir
from bert_jax.training.finetune import voice
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.report import TaskScorer
from bert_jax.training.finetune.saves import FinetuneSaves, check_finetune_workdir, remove_resume
from bert_jax.training.finetune.setup import Setup, set_up
from bert_jax.training.loop import carry_out
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run.session import Session, hold_workdir
from bert_jax.training.run_plan import Batches, Policy, Profiler, Result, RunPlan, Stage
from bert_jax.training.steps import trials

_SAVE_SECONDS = 60.0
"""Minimum time between two saves, in seconds. The run saves only after an evaluation."""


def finetune(
    config: FinetuneConfig,
    workdir: Path | str,
    *,
    clock: Clock | None = None,
    echo: Callable[[str], None] | None = None,
    profiler: Profiler | None = None,
    track: Sequence[str] = (),
) -> Result:
    """Fine-tune all trials of a sweep, or continue the run in `workdir`.

    All processes must call this function, after `jax.distributed.initialize`, and share `workdir`.
    `echo` receives each printed line. For the other arguments, see `pretrain.train.train`.

    Raises:
        BadStepError: The guard has stopped the only run (see `GuardConfig.on_bad_step`).
        UserError: Configuration, data, initialisation or directory conflict; nothing is written.
        NoModelError: No run of the first initialisation had a finite score. Statistics are written.
        SaveFailedError: Several saves in a row have failed.
        DamagedCheckpointError: None of the run's checkpoints is intact.
    """
    setup = set_up(dataclasses.replace(config, task=config.task.located()))
    config = setup.config
    with hold_workdir(workdir, echo=echo) as work:
        check_finetune_workdir(work, config, setup.fingerprints)
        if by_first(lambda: (work.local / STATISTICS).exists()):
            outcomes = voice.finished_before(work, echo or print)
            remove_resume(work)
            voice.check_model(setup, outcomes)
            result = Result(work.name, setup.schedule.total_steps, finished=True, outcomes=outcomes)
        else:
            seconds = config.training.stall_seconds
            session = Session(work, stall_seconds=seconds, clock=clock, echo=echo, track=track)
            plan = resolve_finetuning(config, setup, work)
            result = carry_out(plan, session, profiler and profiler(plan))
        bests = [outcome.best for outcome in result.outcomes]
        dev, metric = setup.dev[0], setup.task.metric
        wrong = voice.unlearned(bests, metric, dev.constant_score, dev.baseline)
        return dataclasses.replace(result, unlearned=wrong if result.finished else "")


def _batches(setup: Setup, mesh: Mesh, first: int) -> Generator[Mapping[str, Any], None, None]:
    num_steps, accumulation = setup.schedule.num_steps, setup.step.accumulation
    wave, step = divmod(first, num_steps)
    for number in range(wave, len(setup.schedule.waves)):
        for batch in islice(setup.rows_of(number, step), num_steps - step):
            yield trials.place_rows(batch, mesh, accumulation)
        step = 0


def resolve_finetuning(config: FinetuneConfig, setup: Setup, work: WorkDir) -> RunPlan:
    """Make the plan of a run from its configuration and from the models and data in `setup`."""
    size, num_steps = len(setup.schedule.waves[0]), setup.schedule.num_steps
    goal = voice.goal_of(setup)
    mesh = make_trial_mesh(config.mesh, size)
    trials.check_memory(setup.step, mesh, size)
    saves = FinetuneSaves(config, setup, mesh, work)
    lines = partial(voice.summary, config, setup, mesh, goal)

    def stage(number: int) -> Stage:
        members = setup.schedule.waves[number]
        rates, seeds = [each.learning_rate for each in members], [each.seed for each in members]
        settings = trials.place_settings(rates, seeds, mesh, config.optimizer.head_learning_rate)
        steps = range(number * num_steps, (number + 1) * num_steps)
        own = tuple(dict.fromkeys(members))
        return Stage(steps, setup.step, own, (settings,), number, steps.start, ends=True)

    return RunPlan(
        name=work.name, mesh=mesh, saves=saves, scorers=(TaskScorer(config, setup, mesh, work),),
        stages=tuple(stage(number) for number in range(len(setup.schedule.waves))),
        batches=Batches(partial(_batches, setup, mesh)),
        voice=voice.FinetuneVoice(lines, setup, goal, work, saves),
        policy=Policy(
            config.training.log_every_steps, metric=setup.task.metric, goal=goal,
            patience=config.training.patience, save_seconds=_SAVE_SECONDS,
        ),
    )  # fmt: skip
