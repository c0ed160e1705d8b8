"""All checkpoints of a run, read back: `bert-jax verify`."""

from tqdm import tqdm

from bert_jax.checkpoint.record import RecordFaultError, read_record
from bert_jax.checkpoint.storage import AnyPath, as_path, saved_steps
from bert_jax.checkpoint.verify import Verdict, verify_checkpoint
from bert_jax.errors import UserError


def audit(directory: AnyPath, *, only: int | None = None, progress: bool = False) -> list[Verdict]:
    """Read every file and array of the checkpoints in a directory; changes nothing.

    Args:
        directory: Directory of checkpoints.
        only: The step of the one checkpoint to read; None: all.
        progress: Show a bar on standard error.

    Raises:
        UserError: There is no checkpoint, or none of that step.
    """
    directory = as_path(directory)
    steps = saved_steps(directory)
    if not steps:
        raise UserError(
            f"{directory} holds no checkpoint; give the work directory of a `bert-jax pretrain` "
            "run that has saved at least once"
        )
    if only is not None and only not in steps:
        there = ", ".join(map(str, steps))
        raise UserError(f"{directory} has no checkpoint of step {only}; there are {there}")
    verdicts = []
    for step in [only] if only is not None else steps:
        path = directory / str(step)
        with tqdm(
            total=_num_bytes(path), desc=f"step {step:,}", unit="B", unit_scale=True,
            leave=False, disable=not progress,
        ) as bar:  # fmt: skip
            verdicts.append(verify_checkpoint(path, progress=bar.update))
    return verdicts


def audit_report(verdicts: list[Verdict]) -> list[str]:
    """Return a line for each checkpoint and one for all."""
    width = max(len(f"{verdict.step:,}") for verdict in verdicts)
    lines = []
    for verdict in verdicts:
        found = f"intact    {verdict.num_arrays} arrays, {verdict.num_bytes / 1e6:,.1f} MB"
        if not verdict.intact:
            found = f"DAMAGED   {verdict.fault}"
        lines.append(f"step {verdict.step:>{width},}  {found}")
    intact = [verdict.step for verdict in verdicts if verdict.intact]
    if len(verdicts) == 1:
        return lines
    newest = f"the newest intact one is that of step {intact[-1]:,}" if intact else "none is intact"
    return [*lines, f"{len(intact)} of {len(verdicts)} checkpoints are intact; {newest}"]


def _num_bytes(checkpoint: AnyPath) -> int | None:
    try:
        return read_record(checkpoint).num_bytes
    except RecordFaultError:
        return None
