"""The masked-LM loss of any model on the held-out text of a corpus."""

import jax
from tqdm import tqdm

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.data.pairings import DataConfig
from bert_jax.data.phases import PhaseConfig
from bert_jax.data.pipeline import EvalBatches
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh
from bert_jax.errors import UserError
from bert_jax.model.heads import has_vocabulary_head
from bert_jax.training.pretrain.config import PretrainConfig, TrainingConfig
from bert_jax.training.pretrain.corpus import Corpus, step_config
from bert_jax.training.pretrain.evaluate import EVAL_SEED, evaluate
from bert_jax.training.pretrain.start.initial_model import (
    check_tokenizer,
    initial_params,
    with_architecture,
)
from bert_jax.training.steps.state import param_placement
from bert_jax.training.steps.step import make_eval_step

LENGTH = 128
"""Tokens in a row of held-out text, or fewer where the model has fewer positions."""


def check_measurable(
    saved: SavedModel, corpus: Corpus, where: str, name: str, directory: str
) -> None:
    """Refuse a corpus without held-out text or with another tokenizer, and a model without head.

    Args:
        saved: The model.
        corpus: The corpus.
        where: Option that names the corpus.
        name: Name of the corpus.
        directory: Directory of the model.

    Raises:
        UserError: Corpus and model do not fit together; the message says why.
    """
    if corpus.heldout is None:
        raise UserError(
            f"{where}: {name} has no held-out text; build it with --heldout-rate above 0"
        )
    check_tokenizer(saved, corpus.train.tokenizer_fingerprint, where, directory)
    if not has_vocabulary_head(saved.params):
        raise UserError(
            f"{where}: {saved.name} has no masked-LM head whose loss could be measured; leave "
            f"{where} out"
        )


def heldout_metrics(
    saved: SavedModel, corpus: Corpus, *, length: int | None = None, max_rows: int | None = None
) -> dict[str, float]:
    """Compute loss (nats) and accuracy of masked words at 15% masking on packed held-out rows.

    Args:
        saved: A model that `check_measurable` accepts.
        corpus: A corpus that `check_measurable` accepts.
        length: Tokens of a row; None: `LENGTH`.
        max_rows: Largest number of rows; None: all.

    Raises:
        UserError: The length is beyond the model's.
    """
    assert corpus.heldout is not None
    limit = saved.config.num_positions
    if length is not None and not 8 <= length <= limit:
        raise UserError(f"--length is {length}; {saved.name} takes rows of 8 to {limit} tokens")
    mesh, length = make_mesh(MeshConfig()), length or min(LENGTH, saved.max_length)
    config = PretrainConfig(
        data=DataConfig(pairing="none"),
        training=TrainingConfig(phases=(PhaseConfig(length=length),)),
    )
    config = with_architecture(config, saved.config).with_vocabulary(corpus.train.vocab_size)
    settings = step_config(config.for_evaluation(), corpus)
    objective = settings.objective
    fresh = jax.jit(objective.init, out_shardings=param_placement(settings, mesh))
    params = initial_params(saved, fresh(jax.random.key(0)), objective.axes())
    size = -(-32 // mesh.size) * mesh.size
    rows = EvalBatches(corpus.heldout, config.data, length, size, max_rows=max_rows)
    eval_step = make_eval_step(settings, mesh, EVAL_SEED)
    batches = tqdm(rows, "held-out text", unit="batch", disable=None, leave=False)
    return evaluate(objective, eval_step, params, batches, mesh)
