"""The configuration of a pretraining run, as frozen dataclasses (see `config.mapping.build`)."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from bert_jax.config.bounds import AtLeast, Below, Bounded
from bert_jax.data.pairings import PAIRINGS, DataConfig
from bert_jax.data.phases import THETAS, MixtureConfig, Phase, scaled
from bert_jax.distributed.parallel.sharding import MeshConfig
from bert_jax.errors import UserError
from bert_jax.objectives.config import OBJECTIVES, MaskedLMConfig, ObjectiveConfig, StudentConfig
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.objectives.objective import Metric
from bert_jax.training.pretrain import sections
from bert_jax.training.steps.guard import GuardConfig
from bert_jax.training.steps.optim import OptimizerConfig, PhaseRate

FREE_FIELDS = (
    "checkpoint",
    "data.corpus",  # the directory may move; the corpus's fingerprint is compared instead
    "data.cache_dir",
    "data.cache_gb",
    "data.num_threads",
    "data.prefetch_batches",
    "data.read_timeout",
    "distil.teacher",  # the directory may move; the teacher's digest is compared instead
    "guard",
    "masking.eval_rate",
    "mesh",
    "model.attention_impl",
    "model.remat",
    "model.scan_unroll",
    "training.accumulation",
    "training.eval_every_steps",
    "training.eval_rows",
    "training.eval_translations",
    "training.gather",
    "training.log_every_steps",
    "training.patience",
    "training.probes",
    "training.stall_seconds",
)
"""Fields and sections that a restart may change: paths, intervals, evaluations, the guard, and how
a step is computed. Fields that determine the examples or the objective must not change."""


@dataclass(frozen=True)
class PretrainConfig(Bounded):
    """Everything that determines a pretraining run."""

    ELSEWHERE: ClassVar = {
        "sweep": "only `bert-jax finetune` has sweeps; in pretraining, start a run in another work "
        "directory for each learning rate and seed",
        "lora": "only `bert-jax finetune` has low-rank updates; pretraining trains all parameters",
        "task": "only `bert-jax finetune` has a task; training.probes scores an encoder on tasks",
    }
    objective: ObjectiveConfig = field(default_factory=MaskedLMConfig)
    model: sections.PretrainModelConfig = field(default_factory=sections.PretrainModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    training: sections.TrainingConfig = field(default_factory=sections.TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: sections.CheckpointConfig = field(default_factory=sections.CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    distil: StudentConfig = field(default_factory=StudentConfig)
    """Distillation: a teacher from which the run learns, in addition to the text."""
    init: str = ""
    """Directory of a model to start from, made by `bert-jax import` or by another run. The model's
    architecture replaces the one in section `model`. If empty, parameters are random."""
    seed: Annotated[int, AtLeast(0), Below(2**32)] = 0
    """Seed for the initial parameters, the order and pairing of examples, masks and dropout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for number, phase in enumerate(self.training.phases):
            peak = self.peak_rate(number)
            if phase.end_rate is not None and phase.end_rate > peak:
                raise UserError(
                    f"training.phases[{number}].end_rate is {phase.end_rate:g}; it must be at most "
                    f"the phase's peak learning rate, {peak:g}"
                )
        objective, pairing = self.objective, self.data.pairing
        if pairing not in objective.PAIRINGS:
            raise UserError(
                f"data.pairing is {pairing!r}, but objective.name {objective.name!r} needs "
                f"data.pairing {' or '.join(map(repr, objective.PAIRINGS))}"
            )
        if self.distil.teacher and not objective.TEACHER_HEAD:
            taught = " and ".join(name for name, kind in OBJECTIVES.items() if kind.TEACHER_HEAD)
            raise UserError(
                f"distil.teacher is {self.distil.teacher!r}, but objective.name is "
                f"{objective.name!r}; only {taught} can learn from a teacher"
            )
        self._check_best()
        if not self.init:  # else the model's architecture is not known yet
            self.check_architecture()

    def check_architecture(self) -> None:
        """Check that the model suits pairs and lengths, and uses each rotary base of a phase.

        Raise a UserError that names the field that does not suit.
        """
        whose = f"the model of init, {self.init}, has " if self.init else "model."
        if self.has_pairs and self.model.num_types == 1:
            remedy = "" if self.init else (
                "set model.num_types to 2 (or to 0, if separators are enough to tell sentences "
                "apart), or "
            )  # fmt: skip
            raise UserError(
                f"{whose}num_types is 1, but with data.pairing {self.data.pairing!r} rows have two "
                f"segment types; {remedy}set data.pairing to 'none'"
            )
        if self.has_pairs and not self.model.pooler:
            remedy = "" if self.init else "set model.pooler to true, or "
            raise UserError(
                f"{whose}pooler is false, but data.pairing {self.data.pairing!r} needs a pooler to "
                f"learn labels of pairs; {remedy}set data.pairing to 'none'"
            )
        most, limit = self.model.num_positions, "model.num_positions"
        remedy = f"raise {limit}"
        if self.init:
            limit = f"num_positions of the model {self.init}:"
            remedy = "start from a model with more (`bert-jax grow` adds them to rotary models)"
        phases = list(enumerate(self.training.phases))
        lengths = {f"training.phases[{number}].length": phase.length for number, phase in phases}
        for name, length in {"data.target_length": self.data.target_length, **lengths}.items():
            if length > most:
                raise UserError(f"{name} {length} exceeds {limit} {most}. Lower {name} or {remedy}")
        for number, phase in phases:
            given = {name: getattr(phase, name) for name in THETAS}
            for name in (name for name, theta in given.items() if theta is not None):
                where = f"training.phases[{number}].{name} is {given[name]:g}"
                if self.model.positions != "rope":
                    raise UserError(
                        f"{where}, but model.positions is {self.model.positions!r}; only 'rope' "
                        "rotates queries and keys"
                    )
                if name == "local_rope_theta" and "L" not in self.model.attention_pattern:
                    raise UserError(
                        f"{where}, but model.attention_pattern {self.model.attention_pattern!r} "
                        "has no local layers (L); set rope_theta"
                    )

    def _check_best(self) -> None:
        checkpoint, training = self.checkpoint, self.training
        every = training.eval_every_steps
        if training.patience and not every:
            raise UserError(
                f"training.patience is {training.patience}, but training.eval_every_steps is 0"
            )
        if checkpoint.keep_best and (not every or checkpoint.save_every_steps % every):
            raise UserError(
                f"checkpoint.keep_best is {checkpoint.keep_best}, but not every checkpoint is "
                f"evaluated: checkpoint.save_every_steps {checkpoint.save_every_steps} must be a "
                f"multiple of training.eval_every_steps, which is {every}"
            )
        names = [f"eval/{metric.name}" for metric in self.objective.metrics(self.has_pairs)]
        names += ["eval/bleu", "eval/chrf"] if training.eval_translations else []
        if checkpoint.best_metric not in ("", *names):
            raise UserError(
                f"checkpoint.best_metric is {checkpoint.best_metric!r}, but the evaluations of "
                f"this run (objective.name {self.objective.name!r}, data.pairing "
                f"{self.data.pairing!r}) compute {', '.join(names)}"
            )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases in the form that the input pipeline takes."""
        training = self.training
        return tuple(
            Phase(p.length, p.batch_size, n, scaled(p.batch_warmup_steps, n), training.batch_unit)
            for p, n in zip(training.phases, training.phase_steps, strict=True)
        )

    def mixture_of(self, number: int) -> tuple[MixtureConfig, ...]:
        """Return the corpora that a phase mixes; empty if it reads a single corpus."""
        phase = self.training.phases[number]
        return () if phase.corpus else phase.mixture or self.data.mixture

    def temperature_of(self, number: int) -> float | None:
        """Return the exponent of corpus sizes in a phase's mixture; None if there is no mixture."""
        own = self.training.phases[number].mixture_temperature
        if not self.mixture_of(number):
            return None
        return self.data.mixture_temperature if own is None else own

    def accumulation_of(self, number: int) -> int:
        """Return the number of micro-batches in each step of a phase."""
        return self.training.phases[number].accumulation or self.training.accumulation

    def masking_of(self, number: int) -> MaskingConfig:
        """Return the masking of a phase."""
        rate = self.training.phases[number].masking_rate
        return self.masking if rate is None else replace(self.masking, rate=rate)

    def model_of(self, number: int) -> sections.PretrainModelConfig:
        """Return the model's configuration with the rotary bases (thetas) of a phase."""
        return replace(self.model, **self._thetas(number))

    def with_thetas_of(self, number: int) -> "PretrainConfig":
        """Return an equivalent configuration in which `model` has the thetas of a phase.

        In the result, each phase that took a theta from the given `model` sets this theta itself.
        Checkpoints store this form, because readers of models take thetas from `model`.
        """
        set_ = {n for n in THETAS for p in self.training.phases if getattr(p, n) is not None}
        if not set_:
            return self
        phases = tuple(
            replace(phase, **{n: theta for n, theta in self._thetas(at).items() if n in set_})
            for at, phase in enumerate(self.training.phases)
        )
        return replace(
            self, model=self.model_of(number), training=replace(self.training, phases=phases)
        )

    def _thetas(self, number: int) -> dict[str, Any]:
        own = {name: getattr(self.training.phases[number], name) for name in THETAS}
        return {n: getattr(self.model, n) if theta is None else theta for n, theta in own.items()}

    def peak_rate(self, number: int) -> float:
        """Return the peak learning rate of a phase."""
        own = self.training.phases[number].learning_rate
        return self.optimizer.learning_rate if own is None else own

    def phase_rate(self, number: int) -> PhaseRate | None:
        """Return a phase's own learning rate; None if the phase follows the run's rate."""
        phase, peak = self.training.phases[number], self.peak_rate(number)
        if not phase.decay:
            return None if phase.learning_rate is None else PhaseRate(peak)
        end = self.optimizer.end_share * peak if phase.end_rate is None else phase.end_rate
        start = (0, *self.training.phase_starts)[number]
        return PhaseRate(peak, phase.decay, end, start, self.training.phase_steps[number])

    @property
    def has_pairs(self) -> bool:
        """Whether rows are pairs of sentences with a label."""
        return PAIRINGS[self.data.pairing].has_labels

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of the run."""
        return (*self.objective.metrics(self.has_pairs), *self.distil.metrics)

    @property
    def retention(self) -> sections.CheckpointConfig:
        """Section `checkpoint`, in which the first metric replaces an empty `best_metric`."""
        named = self.checkpoint.best_metric or f"eval/{self.metrics[0].name}"
        return replace(self.checkpoint, best_metric=named)

    @property
    def warmup_steps(self) -> int:
        """Number of steps until the learning rate reaches its peak."""
        return self.optimizer.num_warmup_steps(self.training.num_steps)

    def with_vocabulary(self, vocab_size: int) -> "PretrainConfig":
        """Return this configuration for a tokenizer of `vocab_size` tokens.

        Raise a UserError if `model.vocab_size` is set to another number.
        """
        if self.model.vocab_size not in (0, vocab_size):
            raise UserError(
                f"model.vocab_size is {self.model.vocab_size}, but the tokenizer of the corpus has "
                f"{vocab_size} tokens. Leave model.vocab_size at 0 to take it from the corpus"
            )
        return replace(self, model=replace(self.model, vocab_size=vocab_size))
