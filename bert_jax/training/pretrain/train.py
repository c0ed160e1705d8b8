"""Pretraining: a plan from a configuration, and the loop."""

from collections.abc import Callable
from pathlib import Path

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.training.loop import carry_out
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, open_corpus
from bert_jax.training.pretrain.resolve import resolve_pretraining
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run.session import Session, hold_workdir
from bert_jax.training.run_plan import Result


def train(
    config: PretrainConfig,
    workdir: Path | str,
    *,
    corpus: Corpus | None = None,
    initial: Callable[[], SavedModel] | None = None,
    branch_from: str = "",
    clock: Clock | None = None,
    echo: Callable[[str], None] | None = None,
) -> Result:
    """Pretrain, or continue the run in `workdir`, until its last step or a signal.

    Every process calls this function, after `jax.distributed.initialize`; all share `workdir`.

    Args:
        config: Configuration of the run.
        workdir: Local directory, made if missing, or `gs://bucket/directory`.
        corpus: Replacement for the corpus that `config.data.corpus` names.
        initial: Function that reads the model that `config.init` names; called by the first start.
        branch_from: Checkpoint of another run to continue, as `WORKDIR@STEP`, or WORKDIR for the
            newest that was read back; a run that has begun remembers it.
        clock: Clock started at process start; None: a new clock.
        echo: Function that receives each line for people; None: standard output, with a bar on a
            terminal.

    Raises:
        UserError: The configuration, the corpus, the devices and the work directory do not fit
            together. Nothing has been written.
        BadStepError: A step was not finite or its loss a spike, and the guard says to stop.
        DamagedCheckpointError: None of the run's checkpoints is intact.
        SaveFailedError: Several saves in a row have failed.
    """
    corpus = corpus or open_corpus(config.data.corpus, config.data)
    with hold_workdir(workdir, echo=echo) as work:
        session = Session(work, stall_seconds=config.training.stall_seconds, clock=clock, echo=echo)
        return carry_out(resolve_pretraining(config, work, corpus, initial, branch_from), session)
