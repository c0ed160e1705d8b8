"""The configuration of a fine-tuning run: one frozen value, built strictly from a nested dict."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from bert_jax.config.bounds import (
    AtLeast,
    AtMost,
    Bounded,
    Count,
    Distinct,
    Natural,
    NonNegative,
    Part,
    Positive,
    Rate,
)
from bert_jax.distributed.parallel.sharding import MeshConfig
from bert_jax.errors import UserError
from bert_jax.model.lora import LoraConfig
from bert_jax.objectives.distillation import DistillationConfig
from bert_jax.objectives.embedding import ContrastConfig
from bert_jax.tasks.config import TableConfig, TaskConfig
from bert_jax.training.steps.guard import GuardConfig
from bert_jax.training.steps.optim import OptimizerConfig

FREE_FIELDS = (
    "distil.teacher",
    "guard",
    "head",
    "init",
    "mesh",
    "training.accumulation",
    "training.attention_impl",
    "training.eval_batch_size",
    "training.log_every_steps",
    "training.remat",
    "training.stall_seconds",
)
"""Fields that a restart may change; `init`, `head` and `distil.teacher` must keep their weights."""


@dataclass(frozen=True)
class FinetuneTrainingConfig(Bounded, section="training"):
    """Length of training, shapes of batches, and intervals of logging and evaluation."""

    num_epochs: Positive = 3.0
    """Passes over the training examples; may be a fraction."""
    batch_size: Count = 32
    """Rows per step of each run, over all devices and micro-batches."""
    accumulation: Count = 1
    """Micro-batches per step, which save memory and cost time; results agree within rounding.
    Vectors (task.kind=embedding) are then computed twice, once for comparison with the whole
    batch."""
    eval_batch_size: Count = 64
    """Rows per step of an evaluation."""
    evals_per_epoch: Count = 1
    """Evaluations per pass; the best evaluation, by the task's metric, is the run's result."""
    log_every_steps: Count = 100
    """Number of steps between two rows of metrics; each evaluation writes a row, too."""
    max_buckets: Count = 4
    """Largest number of padded lengths; each is compiled once. 1: only the longest."""
    dropout_rate: Rate | None = 0.1
    """Dropout rate in encoder and attention and before the head (not squad's); None: as in
    pretraining, and 0.1 before the head. A model with rotations pretrained without attention
    dropout stays so."""
    remat: Literal["none", "dots", "full"] = "none"
    """Values that the backward pass recomputes: none, all but matrix products, or whole layers."""
    attention_impl: Literal["auto", "xla", "splash", "cudnn", "fused"] = "auto"
    """Attention kernel."""
    patience: Natural = 0
    """Number of evaluations in a row without a better score after which a run stops by itself; the
    learning rate follows the full schedule. 0: make all passes."""
    freeze: str = ""
    """Parts that stay frozen: embeddings; a number, for the embeddings and that many lower layers;
    encoder, for everything but the pooler and the head. Empty: none."""
    stall_seconds: NonNegative = 1800.0
    """Longest time in which nothing is completed; then the process writes its threads' stacks and
    ends with exit code 6. 0: no limit."""

    def __post_init__(self) -> None:
        """Refuse a run that trains nothing."""
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
    """AdamW with bias correction, without which small data fails (Mosbach et al. 2021)."""

    learning_rate: Positive = 3e-5
    warmup_rate: Rate = 0.1
    layer_decay: Part = 1.0
    """Factor of the learning rate from each layer to the layer below: the head has the full rate,
    the top layer this share of it, the embeddings the lowest rate. 1: the same rate for all."""
    head_learning_rate: Positive | None = None
    """Peak learning rate of pooler, head transform and head; None: the encoder's."""


@dataclass(frozen=True)
class FinetuneGuardConfig(GuardConfig):
    """Treatment of bad steps, run by run: a stopped run has failed, and the other runs go on.

    A sweep of one run ends with exit code 4.
    """

    spike_sigmas: NonNegative = 0.0
    """Least height of a spike above the mean of the recent losses, in standard deviations. 0: only
    non-finite values are bad, since small batches of hard examples are normal."""

    def __post_init__(self) -> None:
        """Refuse values out of range, and options that only pretraining has."""
        super().__post_init__()
        if self.on_divergence != "report":
            raise UserError(
                f"guard.on_divergence is {self.on_divergence!r}; fine-tuning has none to stop at: "
                "the statistics call a run that learned nothing failed. Leave it at 'report'"
            )


@dataclass(frozen=True)
class SweepConfig(Bounded, section="sweep"):
    """Several runs at once: every learning rate with every seed, of every initialisation."""

    seeds: Annotated[int, AtLeast(1), AtMost(1000)] = 1
    """Runs for each learning rate; their seeds are `seed`, `seed` + 1, ..."""
    learning_rates: Annotated[tuple[Positive, ...], Distinct()] = ()
    """Learning rates of the sweep; empty: `optimizer.learning_rate`."""
    baseline: str = ""
    """Second initialisation for comparison over the same seeds: `random`, or a directory like
    `init` with the same architecture and vocabulary."""
    at_once: Natural = 0
    """Number of runs in one program; 0: all. Other runs wait, and are not compiled again."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything that determines a fine-tuning run."""

    task: TaskConfig = field(default_factory=TableConfig)
    init: str = ""
    """Model to start from: the work directory of a run, or a directory in Hugging Face's format."""
    reinitialise: bool = False
    """Whether to take architecture and tokenizer from `init`, but random weights."""
    pooling: Literal["auto", "cls", "mean", "late"] = "auto"
    """Pooling for classification by a model without a pooler (ModernBERT, EuroBERT): the first
    token's state, the mean of the tokens' states, or, with `late`, the mean of the tokens' logits.
    auto: `classifier_pooling` in the files of `init`, else mean."""
    embedding: ContrastConfig = field(default_factory=ContrastConfig)
    """Settings of vectors and their loss (task.kind=embedding)."""
    head: Literal["auto", "keep", "fresh"] = "auto"
    """First weights of the head. keep: the head of `init`, whose labels must be the task's, in any
    order. fresh: random weights. auto: keep where the labels are the same."""
    training: FinetuneTrainingConfig = field(default_factory=FinetuneTrainingConfig)
    optimizer: FinetuneOptimizerConfig = field(default_factory=FinetuneOptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    distil: DistillationConfig = field(default_factory=DistillationConfig)
    """Distillation: the fine-tuned model that the runs learn from besides the labels."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Mesh of devices for each run; simultaneous runs first spread over the other devices."""
    guard: FinetuneGuardConfig = field(default_factory=FinetuneGuardConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    seed: int = 0
    """Seed of the head's first weights, the order of examples and dropout."""

    def __post_init__(self) -> None:
        """Refuse seeds that are not 32-bit numbers."""
        if not 0 <= self.seed < 2**32 - self.sweep.seeds:
            raise UserError(f"seed is {self.seed}; it must be in [0, 2**32 - sweep.seeds)")
        if self.lora.rank and self.training.freeze:
            raise UserError(
                f"training.freeze is {self.training.freeze!r}, but lora.rank {self.lora.rank} "
                "trains low-rank updates and freezes the whole encoder; leave training.freeze empty"
            )
        if self.head == "keep" and self.reinitialise:
            raise UserError("head is 'keep', but reinitialise makes all weights random; drop one")

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Learning rates of the sweep."""
        return self.sweep.learning_rates or (self.optimizer.learning_rate,)

    @property
    def num_trials(self) -> int:
        """Runs of the sweep."""
        return self.sweep.seeds * len(self.learning_rates) * (2 if self.sweep.baseline else 1)
