"""Fine-tuning: a plan from a configuration, and the loop."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from bert_jax.artefacts.saved.runs import STATISTICS
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.resolve import check_model, resolve_finetuning
from bert_jax.training.finetune.saves import check_finetune_workdir, remove_resume
from bert_jax.training.finetune.setup import set_up
from bert_jax.training.finetune.summary import finished_before
from bert_jax.training.loop import carry_out
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run.session import Session, hold_workdir
from bert_jax.training.run_plan import Result


def finetune(
    config: FinetuneConfig,
    workdir: Path | str,
    *,
    clock: Clock | None = None,
    echo: Callable[[str], None] | None = None,
) -> Result:
    """Fine-tune all trials of a sweep, or continue the run in `workdir`.

    Every process calls this function, after `jax.distributed.initialize`; all share `workdir`.

    Args:
        config: Configuration of the run.
        workdir: Local directory, made if missing, or `gs://bucket/directory`.
        clock: Clock started at process start; None: a new clock.
        echo: Function that receives each line for people; None: standard output, with a bar on a
            terminal.

    Raises:
        BadStepError: A step of the only run was not finite, and the guard says to stop.
        UserError: The configuration, the data, the initialisation and the work directory do not fit
            together. Nothing has been written.
        NoModelError: No run of the first initialisation had a finite score; the statistics say so.
        SaveFailedError: Several saves in a row have failed.
        DamagedCheckpointError: None of the run's checkpoints is intact.
    """
    config = dataclasses.replace(config, task=config.task.located())
    setup = set_up(config)
    with hold_workdir(workdir, echo=echo) as work:
        check_finetune_workdir(work, config, setup.fingerprints)
        if by_first(lambda: (work.local / STATISTICS).exists()):
            outcomes = finished_before(work, echo or print)
            remove_resume(work)
            check_model(setup, outcomes)
            num_steps = len(setup.waves) * setup.step.num_steps
            wrong = setup.unlearned(outcomes)
            return Result(work.name, num_steps, finished=True, outcomes=outcomes, unlearned=wrong)
        seconds = config.training.stall_seconds
        session = Session(work, stall_seconds=seconds, clock=clock, echo=echo)
        result = carry_out(resolve_finetuning(config, setup, work), session)
        wrong = setup.unlearned(result.outcomes) if result.finished else ""
        return dataclasses.replace(result, unlearned=wrong)
