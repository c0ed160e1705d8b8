"""The configuration of a fine-tuning run, as frozen dataclasses (see `config.mapping.build`)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from bert_jax.config import bounds
from bert_jax.distributed.parallel.sharding import MeshConfig
from bert_jax.errors import UserError
from bert_jax.model.lora import LoraConfig
from bert_jax.objectives.distillation import DistillationConfig
from bert_jax.objectives.embedding import ContrastConfig
from bert_jax.tasks.config import TableConfig, TaskConfig
from bert_jax.training.steps.guard import GuardConfig
from bert_jax.training.steps.optim import OptimizerConfig

FREE_FIELDS = (
    "distil.teacher", "guard", "head", "init", "mesh", "training.accumulation",
    "training.attention_impl", "training.eval_batch_size", "training.log_every_steps",
    "training.remat", "training.stall_seconds",
)  # fmt: skip
"""Fields that a restart may change; `init`, `head`, `distil.teacher` must give the same weights."""


@dataclass(frozen=True)
class FinetuneTrainingConfig(bounds.Bounded, section="training"):
    """Length of training, shapes of batches, and intervals of logging and evaluation."""

    num_epochs: bounds.Positive = 3.0
    """Number of passes over the training examples; may be fractional."""
    batch_size: bounds.Count = 32
    """Number of rows in each step of a run, summed over devices and micro-batches."""
    accumulation: bounds.Count = 1
    """Number of micro-batches per step. More micro-batches save memory and cost time; the results
    differ only by rounding. With task.kind=embedding, 2 or more micro-batches compute each vector
    twice, because the loss compares the vector with the whole batch."""
    eval_batch_size: bounds.Count = 64
    """Number of rows in each step of an evaluation."""
    evals_per_epoch: bounds.Count = 1
    """Number of evaluations per epoch. The run's result is the model with the best task metric."""
    log_every_steps: bounds.Count = 100
    """Number of steps between two rows of metrics. Each evaluation writes a row, too."""
    max_buckets: bounds.Count = 4
    """Largest number of lengths to which rows are padded. Each length needs a compilation."""
    dropout_rate: bounds.Rate | None = 0.1
    """Dropout rate in encoder and attention, and before the head (0 there with task.kind=squad).
    None means the rates of pretraining, and 0.1 before the head. Rates of 0 in pretraining stay 0
    for model.embedding_dropout_rate, model.mlp_dropout_rate and, in models with rotary positions,
    model.attention_dropout_rate."""
    remat: Literal["none", "dots", "full"] = "none"
    """Values that the backward pass recomputes. dots: all but matrix products. full: all values."""
    attention_impl: Literal["auto", "xla", "splash", "cudnn", "fused", "triton"] = "auto"
    """Attention kernel."""
    patience: bounds.Natural = 0
    """Patience of early stopping: a run ends after this many evaluations in a row without a better
    score. The learning rate follows the schedule of the full run. 0 means never to stop early."""
    freeze: str = ""
    """Parts that stay frozen: embeddings; a number n (the embeddings and the n lowest layers); or
    encoder (everything except the pooler and the head). If empty, nothing is frozen."""
    stall_seconds: bounds.NonNegative = 1800.0
    """Largest number of seconds without completed work. After this time, the process writes the
    stacks of its threads and ends with exit code 6. 0 means no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.freeze not in ("", "embeddings", "encoder") and not self.freeze.isdecimal():
            raise UserError(
                f"training.freeze is {self.freeze!r}; it must be 'embeddings', a number of lower "
                "layers, 'encoder', or '' for none"
            )
        if self.batch_size % self.accumulation:
            raise UserError(
                f"training.batch_size {self.batch_size} is not divisible by "
                f"training.accumulation {self.accumulation}"
            )


@dataclass(frozen=True)
class FinetuneOptimizerConfig(OptimizerConfig):
    """AdamW with bias correction, which training on small data needs (Mosbach et al. 2021)."""

    learning_rate: bounds.NonNegative = 0.0
    """Peak learning rate. 0 means 3e-5 * (768 / model width)**2 or, with fewer than 3,000 rows, a
    sweep over 1/3, 1 and 3 times this rate, unless the task has folds or `sweep` names rates."""
    warmup_rate: bounds.Rate = 0.1
    layer_decay: bounds.Part = 1.0
    """Factor by which the learning rate falls from each layer to the layer below. The head has the
    full rate, the top layer the full rate times this factor. 1 means one rate for all layers."""
    head_learning_rate: bounds.Positive | None = None
    """Peak learning rate of pooler, head transform and head. None means the encoder's rate or, if
    `learning_rate` is 0 and the model is narrower than 768, at least 1e-3."""

    @staticmethod
    def rate_of(width: int) -> float:
        """Return the default learning rate for an encoder of this width."""
        return float(f"{3e-5 * (768 / width) ** 2:.2g}")


@dataclass(frozen=True)
class FinetuneGuardConfig(GuardConfig):
    """Treatment of bad steps in each run of a sweep.

    If the guard stops a run, the run has failed; others go on. A single run ends with exit code 4.
    """

    spike_sigmas: bounds.NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_divergence != "report":
            raise UserError(
                f"guard.on_divergence is {self.on_divergence!r}; fine-tuning never stops at a "
                "divergence, but counts a run that learned nothing as failed. Leave it at 'report'"
            )


@dataclass(frozen=True)
class SweepConfig(bounds.Bounded, section="sweep"):
    """Several runs at once, one for each combination of learning rate, seed and initialisation."""

    seeds: Annotated[int, bounds.AtLeast(1), bounds.AtMost(1000)] = 1
    """Number of runs for each learning rate, with the seeds `seed`, `seed` + 1, ..."""
    learning_rates: Annotated[tuple[bounds.Positive, ...], bounds.Distinct()] = ()
    """Learning rates of the sweep. If empty, `optimizer.learning_rate` sets the rate or rates."""
    baseline: str = ""
    """Second initialisation, compared with `init` over the same seeds: `random`, or the directory
    of a model with the architecture and the tokenizer of `init`. If empty, nothing is compared."""
    at_once: bounds.Natural = 0
    """Number of runs that train together in one program; 0 means all runs. A larger sweep trains
    groups of this size one after another, without another compilation."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything that determines a fine-tuning run."""

    task: TaskConfig = field(default_factory=TableConfig)
    init: str = ""
    """Model to start from: the work directory of a run, or a directory in Hugging Face's format."""
    reinitialise: bool = False
    """Whether to start from random weights; `init` then gives only architecture and tokenizer."""
    pooling: Literal["auto", "cls", "mean", "late"] = "auto"
    """Pooling for classification with a model that has no pooler (ModernBERT, EuroBERT). cls: the
    first token's state; mean: the mean of the tokens' states; late: the mean of the tokens' logits;
    auto: `classifier_pooling` in the files of `init`, or else mean."""
    embedding: ContrastConfig = field(default_factory=ContrastConfig)
    """Settings of vectors and their loss (task.kind=embedding)."""
    head: Literal["auto", "keep", "fresh"] = "auto"
    """Initial weights of the head. keep: the head of `init`, which must have the labels of the task
    (in any order); fresh: random weights; auto: keep if the labels are the same, else fresh."""
    training: FinetuneTrainingConfig = field(default_factory=FinetuneTrainingConfig)
    optimizer: FinetuneOptimizerConfig = field(default_factory=FinetuneOptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    distil: DistillationConfig = field(default_factory=DistillationConfig)
    """Distillation: a fine-tuned teacher from which the runs learn, in addition to the labels."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Device mesh of each run. Runs that train at the same time first share the devices equally."""
    guard: FinetuneGuardConfig = field(default_factory=FinetuneGuardConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    seed: int = 0
    """Seed for the head's initial weights, the order of examples and dropout."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32 - self.sweep.seeds:
            raise UserError(f"seed is {self.seed}; it must be in [0, 2**32 - sweep.seeds)")
        if self.lora.rank and self.training.freeze:
            raise UserError(
                f"training.freeze is {self.training.freeze!r}, but lora.rank {self.lora.rank} "
                "trains low-rank updates and freezes the whole encoder; leave training.freeze empty"
            )
        if self.head == "keep" and self.reinitialise:
            raise UserError("head is 'keep', but reinitialise makes weights random; set only one")

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Learning rates of the sweep."""
        return self.sweep.learning_rates or (self.optimizer.learning_rate,)

    @property
    def num_trials(self) -> int:
        """Number of runs in the sweep."""
        return self.sweep.seeds * len(self.learning_rates) * (2 if self.sweep.baseline else 1)
