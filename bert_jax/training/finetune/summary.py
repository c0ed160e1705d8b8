"""Lines of a fine-tuning run at its start and end, and its statistics."""

import math
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

from bert_jax.artefacts.saved.runs import STATISTICS
from bert_jax.data.phases import scaling
from bert_jax.distributed.checkpoint import SaveFailedError
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.model.embedding import EmbeddingConfig
from bert_jax.model.task_heads import has_transform
from bert_jax.objectives.objective import trains_all
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.setup import Setup
from bert_jax.training.steps.trials import state_sizes
from bert_jax.training.sweep.report import summary_lines, write_summary
from bert_jax.training.sweep.statistics import LEVEL, Outcome, Summary

_MAX_STATISTICS_BYTES = 1 << 28
_POOLINGS = {
    "cls": "the first token's state",
    "mean": "the mean of the tokens' states",
    "late": "the mean of the tokens' logits",
    "last": "the last token's state",
    "weighted": "the mean of the tokens' states, with learned weights",
}


def summary_of_run(
    config: FinetuneConfig,
    setup: Setup,
    mesh: Mesh,
    name: str,
    begun: int,
    total: int,
    *,
    goal: float,
    constant: float,
) -> list[str]:
    """Describe the run that starts or continues at step `begun` of `total`: a line a subject.

    A run must exceed the score `goal` (see `progress.goal_score`); the best constant prediction has
    `constant`.
    """
    head = f"fine-tuning {', '.join(setup.inits)} in {name}"
    lines = [head if not begun else f"{head}, continued at step {begun:,} of {total:,}"]
    notes = [text for split in setup.splits for text in split.warnings]
    lines += [f"Warning: {text}" for text in (*notes, *setup.overlaps())]
    shapes = ", ".join(f"{n} x {length}" for length, n in setup.batches.batches_of.items())
    sizes = ", ".join(f"{split.name} {len(split.rows):,}" for split in setup.splits[1:])
    task = config.task
    fitted = task.fitted(setup.objective.model.num_positions)
    if fitted.length < task.length:
        lines.append(
            f"length   {fitted.length} tokens a row: the model has no more positions; "
            f"task.max_length is {task.length} by default"
        )
    warmup = config.optimizer.warmup_steps or 0
    lines += scaling("optimizer.warmup_steps", warmup, setup.step.num_steps)
    lines += [
        f"data     {len(setup.train.rows):,} rows to train on; {sizes}",
        f"batches  {setup.batches.num_batches:,} of {config.training.batch_size} rows an "
        f"epoch, by length: {shapes}",
        f"runs     {len(setup.members)} of {setup.step.num_steps:,} steps, "
        f"{len(setup.waves[0])} at once, devices as "
        + " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
    ]
    if head := _head(setup):
        name = "vectors" if setup.task.objective == "embedding" else "head"
        lines.append(f"{name:8} {head}")
    if teacher := config.distil.teacher:
        lines.append(f"teacher  {teacher}: each run at once holds a copy, no save does")
    if not trains_all(setup.step.objective):
        lines.append(f"trained  {_trained(setup)}")
    if math.isfinite(constant):
        lines.append(
            f"goal     {setup.task.metric} above {goal:.4g} at the end of training (a "
            f"constant prediction has {constant:.4g}; {LEVEL:.0%} bound for "
            f"{setup.dev[0].num_scored:,} rows)"
        )
    return lines


def _head(setup: Setup) -> str:
    """Describe the vectors, or a pooler-less head's input and first weights."""
    model, head = setup.objective.model, setup.objective.config
    if isinstance(head, EmbeddingConfig):
        return _POOLINGS[head.pooling]
    said = []
    if head.kind == "classification" and not model.pooler:
        said.append(f"from {_POOLINGS[head.pooling]}")
    if "head" in setup.starts[0]:
        said.append("its weights begin as those of init, whose labels are the same")
    if has_transform(model, head):
        known = "transform" in setup.starts[0]
        said.append(f"its map begins {'as that of the pretrained head' if known else 'at random'}")
    return "; ".join(said)


def _trained(setup: Setup) -> str:
    """Describe the part of the parameters that is trained, and the bytes of a run's state."""
    sizes = state_sizes(setup.step)
    params, moments, saved = (
        f"{count / 2**20:,.1f} MiB"
        for count in (sizes.param_bytes, sizes.optimizer_bytes, sizes.saved_bytes)
    )
    return (
        f"{sizes.trained:,} of {sizes.params:,} parameters ({sizes.trained / sizes.params:.2%}); "
        f"a run holds {params} of parameters and {moments} of the optimizer's state, and saves "
        f"{saved}"
    )


def finished_before(work: WorkDir, say: Callable[[str], None]) -> tuple[Outcome, ...]:
    """Print the statistics of a finished run, and return its outcomes."""
    path = work.local / STATISTICS
    rows = by_first(lambda: read_json_object(path, max_bytes=_MAX_STATISTICS_BYTES)["outcomes"])
    if jax.process_index() == 0:
        say(f"{work.name} is finished")
        say((work.local / "statistics.txt").read_text(encoding="utf-8").rstrip())
    return tuple(Outcome.from_json(each) for each in rows)


def write_statistics(summary: Summary, work: WorkDir, *, percent: bool) -> list[str]:
    """Write the statistics into the work directory, and return them as lines.

    Raises:
        SaveFailedError: They cannot be written.
    """

    def write() -> None:
        try:
            write_summary(summary, work.local, title=Path(work.name).name, percent=percent)
        except (OSError, UserError) as error:
            raise SaveFailedError(
                f"the statistics cannot be written to {work.local} ({error}). Fix that and "
                "rerun the command: the run continues from its last save"
            ) from error

    by_first(write)
    return ["", *summary_lines(summary, percent=percent)]
