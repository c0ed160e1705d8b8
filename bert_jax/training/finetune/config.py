"""The configuration of a fine-tuning run: one frozen value, built strictly from a nested dict."""

import math
from dataclasses import dataclass, field
from typing import Literal

from bert_jax.config.mapping import check_values
from bert_jax.distributed.parallel.sharding import MeshConfig
from bert_jax.errors import UserError
from bert_jax.model.lora import LoraConfig
from bert_jax.objectives.distillation import DistillationConfig
from bert_jax.objectives.embedding import ContrastConfig
from bert_jax.tasks.config import TaskConfig
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
"""Fields that a restart may change; of `init`, `head` and `distil.teacher` the weights that a run
takes from them are compared instead."""

_MAX_SEEDS = 1000


@dataclass(frozen=True)
class FinetuneTrainingConfig:
    """How long, in which shapes, and how often to look."""

    num_epochs: float = 3.0
    """Passes over the training examples; may be a part of one."""
    batch_size: int = 32
    """Rows per step of each run, over all devices and micro-batches."""
    accumulation: int = 1
    """Micro-batches per step: memory for time, the result is the same within rounding. Vectors
    (task.kind=embedding) are then made twice, once to be compared with all of the batch."""
    eval_batch_size: int = 64
    """Rows per step of an evaluation."""
    evals_per_epoch: int = 1
    """Evaluations per pass; the best of them, by the task's metric, is the run's result."""
    log_every_steps: int = 100
    """Steps between two rows of metrics; each evaluation writes a row, too."""
    max_buckets: int = 4
    """Lengths to which rows are padded; each is compiled once. 1: all to the longest."""
    dropout_rate: float | None = 0.1
    """Rate in the encoder, its attention and before the head, but for squad's, which has none;
    None: the encoder as it was pretrained, 0.1 before the head. Attention of a model with rotations
    that was pretrained without dropout stays without."""
    remat: Literal["none", "dots", "full"] = "none"
    """Values that the backward pass recomputes: none, all but matrix products, or whole layers."""
    attention_impl: Literal["auto", "xla", "splash", "cudnn", "fused"] = "auto"
    """Attention kernel."""
    patience: int = 0
    """Evaluations in a row without a better score, after which a run stops; the learning rate falls
    as if it went on. Of several runs at once each stops alone. 0: all passes are made."""
    freeze: str = ""
    """Parts that keep their values: embeddings; a number, for embeddings and so many lower layers;
    encoder, for all but the pooler and the head. Empty: none."""
    stall_seconds: float = 1800.0
    """Nothing completed for so long: the process writes the stacks of its threads and ends with
    exit code 6. 0: never."""

    def __post_init__(self) -> None:
        """Refuse a run that trains nothing."""
        positive = (
            "batch_size", "accumulation", "eval_batch_size", "evals_per_epoch", "log_every_steps",
            "max_buckets",
        )  # fmt: skip
        check_values(
            "training",
            self,
            num_epochs=(math.isfinite(self.num_epochs) and self.num_epochs > 0, "above 0"),
            **{name: (getattr(self, name) >= 1, "at least 1") for name in positive},
            dropout_rate=(
                self.dropout_rate is None or 0 <= self.dropout_rate < 1,
                "in [0, 1), or None",
            ),
            stall_seconds=(self.stall_seconds >= 0, "at least 0"),
            patience=(self.patience >= 0, "at least 0"),
            freeze=(
                self.freeze in ("", "embeddings", "encoder") or self.freeze.isdecimal(),
                "'embeddings', a number of lower layers, 'encoder', or '' for none",
            ),
        )
        if self.batch_size % self.accumulation:
            raise UserError(
                f"training.batch_size {self.batch_size} is not divisible by "
                f"training.accumulation {self.accumulation}"
            )


@dataclass(frozen=True)
class FinetuneOptimizerConfig(OptimizerConfig):
    """AdamW with bias correction, without which small data fails (Mosbach et al. 2021)."""

    learning_rate: float = 3e-5
    warmup_rate: float = 0.1
    layer_decay: float = 1.0
    """Factor of the learning rate from each layer to the layer below: the head has the whole rate,
    the top layer this share of it, the embeddings the lowest. 1: all have the same."""
    head_learning_rate: float | None = None
    """Peak of the pooler, the map before the head and the head; None: that of the encoder."""

    def __post_init__(self) -> None:
        """Refuse rates that cannot train."""
        super().__post_init__()
        rate = self.head_learning_rate
        check_values(
            "optimizer",
            self,
            layer_decay=(0 < self.layer_decay <= 1, "above 0 and at most 1"),
            head_learning_rate=(rate is None or rate > 0, "positive, or None"),
        )


@dataclass(frozen=True)
class FinetuneGuardConfig(GuardConfig):
    """Treatment of bad steps, run by run: a run that is stopped has failed, the others go on.

    With one run alone the process ends with exit code 4.
    """

    spike_sigmas: float = 0.0
    """Least height of a spike above the mean of the recent losses, in standard deviations. 0: only
    non-finite values are bad, because small batches of hard examples are no faults."""

    def __post_init__(self) -> None:
        """Refuse values out of range, and what only pretraining has."""
        super().__post_init__()
        if self.on_divergence != "report":
            raise UserError(
                f"guard.on_divergence is {self.on_divergence!r}; fine-tuning has none to stop at: "
                "the statistics call a run that learned nothing failed. Leave it at 'report'"
            )


@dataclass(frozen=True)
class SweepConfig:
    """Several runs at once: every learning rate with every seed, of every initialisation."""

    seeds: int = 1
    """Runs for each learning rate; their seeds are `seed`, `seed` + 1, ..."""
    learning_rates: tuple[float, ...] = ()
    """Empty: `optimizer.learning_rate`."""
    baseline: str = ""
    """A second initialisation to compare with, over the same seeds: `random`, or a directory like
    `init`, of the same architecture and vocabulary."""
    at_once: int = 0
    """Runs in one program; 0: all. Others wait their turn; nothing is compiled again for them."""

    def __post_init__(self) -> None:
        """Refuse an empty sweep."""
        check_values(
            "sweep",
            self,
            seeds=(1 <= self.seeds <= _MAX_SEEDS, f"from 1 to {_MAX_SEEDS:,}"),
            at_once=(self.at_once >= 0, "at least 0"),
        )
        for rate in self.learning_rates:
            if not rate > 0:
                raise UserError(f"sweep.learning_rates has {rate:g}; rates must be above 0")
        if len(set(self.learning_rates)) < len(self.learning_rates):
            raise UserError(
                f"sweep.learning_rates is {self.learning_rates}; each may be there once"
            )


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything that determines a fine-tuning run."""

    task: TaskConfig = field(default_factory=TaskConfig)
    init: str = ""
    """Model to start from: the work directory of a pretraining or fine-tuning run, or a directory
    in Hugging Face's format (BERT, safetensors)."""
    reinitialise: bool = False
    """Take the architecture and the tokenizer of `init` and random weights."""
    pooling: Literal["auto", "cls", "mean", "late"] = "auto"
    """Choice of a classification by a model without a pooler (ModernBERT, EuroBERT): the first
    token's state, the mean of the tokens' states, or, with `late`, the mean of the tokens' logits.
    auto: what the files of `init` say (`classifier_pooling`), else mean."""
    embedding: ContrastConfig = field(default_factory=ContrastConfig)
    """Vectors and their loss (task.kind=embedding)."""
    head: Literal["auto", "keep", "fresh"] = "auto"
    """First weights of the head: those of `init`, whose labels must be the task's, in any order
    (keep), or random ones (fresh). auto: keep where the labels are the same."""
    training: FinetuneTrainingConfig = field(default_factory=FinetuneTrainingConfig)
    optimizer: FinetuneOptimizerConfig = field(default_factory=FinetuneOptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    distil: DistillationConfig = field(default_factory=DistillationConfig)
    """Fine-tuned model that the runs learn from beside the labels."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Devices of each run; runs at once are spread over the others first."""
    guard: FinetuneGuardConfig = field(default_factory=FinetuneGuardConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    seed: int = 0
    """Seed of the head's first weights, the order of examples and dropout."""

    def __post_init__(self) -> None:
        """Refuse seeds that are no 32-bit numbers."""
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
