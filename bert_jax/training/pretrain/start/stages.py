"""Checks that a mesh can take the rows of a run's steps."""

import dataclasses
import math

from bert_jax.config.mapping import build
from bert_jax.data.phases import scaling, stages_from
from bert_jax.distributed.checkpoint import saved_steps
from bert_jax.distributed.parallel.sharding import check_batch_size
from bert_jax.files.remote import WorkDir
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.start.branch import Branch
from bert_jax.training.workdir import record_there


def begun(work: WorkDir, branch: Branch | None) -> tuple[int, int]:
    """Return the `training.batch_unit` of a run that has begun, else 0; and its number of steps."""
    config, step = (branch.config, branch.step) if branch else (None, 0)
    if (record := record_there(work, "pretrain")) is not None:
        config = build(PretrainConfig, record["config"], where=str(work.local / "config.json"))
        step = max(saved_steps(work.checkpoints), default=step)
    return config.training.batch_unit if config else 0, step


def with_batch_unit(config: PretrainConfig, shards: int, kept: int = 0) -> PretrainConfig:
    """Set a batch unit whose batches divide over the mesh's shards, or the unit `kept`."""
    training = config.training
    unit = training.batch_unit
    if kept:
        unit = unit if kept % unit else kept
    else:
        needed = [shards * config.accumulation_of(n) for n in range(len(training.phases))]
        if any(rows % needed[number] for number, rows in stages_from(config.phases, 0)):
            unit = math.lcm(unit, *needed)
    return dataclasses.replace(config, training=dataclasses.replace(training, batch_unit=unit))


def check_stages(config: PretrainConfig, shards: int, step: int = 0) -> None:
    """Refuse a mesh whose shards do not divide the batches after the first `step` steps."""
    for number, rows in stages_from(config.phases, step):
        where, whole = f"training.phases[{number}].batch_size", config.phases[number].batch_size
        where += "" if rows == whole else f" {whole} in the batch warm-up"
        check_batch_size(rows, shards, config.accumulation_of(number), where)


def warmup_lines(config: PretrainConfig) -> list[str]:
    """Name the warm-ups scaled to the run, and the warm-ups rounded to `training.batch_unit`."""
    unit, given = config.training.batch_unit, config.training.phases
    steps, warmup = config.training.num_steps, config.optimizer.warmup_steps or 0
    lines = scaling("optimizer.warmup_steps", warmup, steps)
    for number, phase in enumerate(config.phases):
        name = f"training.phases[{number}].batch_warmup_steps"
        lines += scaling(name, given[number].batch_warmup_steps, phase.num_steps)
        rows, wanted = (
            ", ".join(f"{rows:,}" for _, rows in each.stages[:-1])
            for each in (phase, dataclasses.replace(phase, unit=1))
        )
        if rows != wanted:
            said = f"steps of {rows} rows in place of {wanted}, multiples of training.batch_unit"
            lines.append(f"batch warm-up of phase {number}: {said} {unit}")
    return lines
