"""The section `objective` of a configuration, which chooses and configures an objective."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bert_jax.config.bounds import Bounded, Natural, Part, Positive, Rate
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import MASKED_LM
from bert_jax.model.seq2seq.network import Network, Tying
from bert_jax.model.seq2seq.recurrent import RecurrentNetwork
from bert_jax.model.seq2seq.recurrent_layers import RecurrentConfig
from bert_jax.model.seq2seq.transformer import TransformerNetwork
from bert_jax.objectives import translation
from bert_jax.objectives.distillation import DistillationConfig, Distilled
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.objectives.objective import Metric, Objective, Teachable
from bert_jax.objectives.replaced_tokens import (
    METRICS,
    ReplacedTokens,
    discriminator_params,
    generator_of,
    generator_params,
)
from bert_jax.objectives.translation import Translation
from bert_jax.tokenization.special_ids import SpecialIds


class Given(NamedTuple):
    """Settings of other sections, and facts about the corpus, that an objective needs."""

    model: ModelConfig
    masking: MaskingConfig
    pairs: bool
    """Whether rows are pairs of sentences with a label."""
    special_ids: SpecialIds
    continues_word: np.ndarray | None = None
    """Mask (vocab_size,) of the ids that continue the preceding word, for whole-word masking."""
    baseline: float | None = None
    """Baseline loss of the corpus (see `ObjectiveConfig.baseline`). None if there is no corpus."""


@dataclass(frozen=True)
class ObjectiveConfig(Bounded, section="objective"):
    """Choice of the training objective. Each subclass adds the fields of one objective."""

    PAIRINGS: ClassVar[tuple[str, ...]] = ("nsp", "sop", "none")
    """Values of `data.pairing` that the objective supports."""
    TEACHER_HEAD: ClassVar[str] = ""
    """Parameter entry of the head that a student learns from; "" if teachers are not supported."""
    METRICS: ClassVar[tuple[Metric, ...]] = ()
    """Metrics of a run, before its model and corpus are known."""
    LEARNED: ClassVar[Mapping[str, str]] = {}
    """Phrases for a model card that say what a run learned, by `data.pairing` ("": all others)."""

    CHOSEN_BY: ClassVar = "name"
    VARIANTS: ClassVar[Mapping[str, "type[ObjectiveConfig]"]] = {}

    name: str = "masked_lm"
    """Objective of the run."""
    FORMER: ClassVar[Mapping[str, str]] = {
        "distilled_masked_lm": "a student has objective.name 'masked_lm', and its teacher and "
        "weights in the section distil: --config.distil.teacher=DIR"
    }
    """Former names of objectives, and messages that say what replaces them."""

    @classmethod
    def learned(cls, pairing: str) -> str:
        """Describe, for a model card, what a run with this `data.pairing` learned."""
        return cls.LEARNED.get(pairing, cls.LEARNED.get("", f"the objective {cls.name}"))

    def metrics(self, pairs: bool) -> tuple[Metric, ...]:
        """List the metrics of a run; `pairs` says whether rows are pairs with a label."""
        return self.METRICS

    def make(self, given: Given) -> Objective:
        """Make the objective."""
        raise NotImplementedError

    def laid_out(self, model: ModelConfig, params: Any) -> Any:
        """Add to the initial parameters the entries that this objective needs.

        Raise a UserError if the entries cannot be made from `params`.
        """
        return params

    def baseline(self, store: TokenStore) -> float | None:
        """Return the loss (nats) of the best model that ignores its input, on the training text."""
        return store.unigram_entropy

    def models(self, model: ModelConfig, params: Any) -> dict[str, tuple[ModelConfig, Any]]:
        """Split a run's parameters into models by name; the first model is the run's result."""
        return {"model": (model, params)}

    def network(self, model: ModelConfig) -> Network | None:
        """Return the sequence-to-sequence network; None if the objective trains only an encoder."""
        return None


@dataclass(frozen=True)
class MaskedLMConfig(ObjectiveConfig):
    """Masked LM and, with sentence pairs, next-sentence prediction (Devlin et al. 2018)."""

    TEACHER_HEAD: ClassVar = MASKED_LM
    LEARNED: ClassVar = {
        "nsp": "masked words and next sentences (BERT, Devlin et al. 2018)",
        "sop": "masked words and the order of sentences (ALBERT, Lan et al. 2019)",
        "": "masked words",
    }

    def metrics(self, pairs: bool) -> tuple[Metric, ...]:
        """List the metrics of masked LM and, if rows are pairs, the metrics of pairs."""
        return MaskedLM.metrics_of(pairs)

    def models(self, model: ModelConfig, params: Any) -> dict[str, tuple[ModelConfig, Any]]:
        """Return the model. If it has no head `mlm`, add an empty one (tied decoder, no bias)."""
        known = {name: tree for name, tree in params.items() if name in ("encoder", "mlm", "nsp")}
        return {"model": (model, {"mlm": {}, **known})}

    def make(self, given: Given) -> MaskedLM:
        """Make the objective."""
        return MaskedLM(**given._asdict())


@dataclass(frozen=True)
class ReplacedTokensConfig(ObjectiveConfig):
    """Detection of tokens that a small generator has replaced (ELECTRA, Clark et al. 2020)."""

    METRICS: ClassVar = METRICS
    LEARNED: ClassVar = {"": "replaced-token detection (ELECTRA, Clark et al. 2020)"}

    name: str = "replaced_tokens"
    """Objective: replaced_tokens."""
    generator_size: Part = 0.25
    """Ratio of the generator's width, number of heads and feed-forward width to the model's."""
    discriminator_weight: Positive = 50.0
    """Factor of the discriminator's loss. The generator's loss has the factor 1."""
    temperature: Positive = 1.0
    """Temperature by which the generator's logits are divided before a token is drawn."""
    disentangled: bool = False
    """Whether the discriminator's token table is the generator's table, with stopped gradient, plus
    a second table that starts as zeros (He et al. 2023, DeBERTaV3). If not, both share a table."""

    def models(self, model: ModelConfig, params: Any) -> dict[str, tuple[ModelConfig, Any]]:
        """Split a run's parameters into the discriminator with its head, and the generator."""
        generator = generator_of(model, self.generator_size), generator_params(params)
        return {"discriminator": (model, discriminator_params(params)), "generator": generator}

    def laid_out(self, model: ModelConfig, params: Any) -> Any:
        """Give the token table of `init` to the generator, if `disentangled` is set."""
        if not self.disentangled or "generator" in params:
            return params
        embeddings = params["encoder"]["embeddings"]
        table, own = embeddings["token"], {"token": np.zeros_like(embeddings["token"])}
        encoder = {**params["encoder"], "embeddings": {**embeddings, **own}}
        given = {"encoder": {"embeddings": {"token": table}}}
        return {**params, "encoder": encoder, "generator": given}

    def make(self, given: Given) -> ReplacedTokens:
        """Make the objective. It ignores the labels of sentence pairs."""
        return ReplacedTokens(
            given.model, given.masking, given.special_ids, self.generator_size,
            self.discriminator_weight, self.temperature, self.disentangled, given.continues_word,
            baseline=given.baseline,
        )  # fmt: skip


@dataclass(frozen=True)
class NetworkConfig(ObjectiveConfig):
    """Settings of translation that the Transformer and the recurrent network share."""

    PAIRINGS: ClassVar = ("translation",)
    METRICS: ClassVar = translation.METRICS

    label_smoothing: Rate = 0.1
    """Share of a label's probability spread over all tokens (Szegedy et al. 2016, section 7)."""
    forces_end: bool = False
    """Whether the end token costs nothing at a translation's maximum length, as in opus-mt. A run
    whose `init` has this rule keeps the rule."""

    def network(self, model: ModelConfig) -> Network:
        """Make the network, whose encoder is `model`."""
        raise NotImplementedError

    def baseline(self, store: TokenStore) -> float | None:
        """Return the unigram entropy of the targets."""
        return store.target_entropy

    def make(self, given: Given) -> Translation:
        """Make the objective."""
        network = self.network(given.model)
        return Translation(
            network.model, network, given.special_ids, self.label_smoothing,
            baseline=given.baseline,
        )  # fmt: skip


@dataclass(frozen=True)
class TranslationConfig(NetworkConfig):
    """Translation by a Transformer (Vaswani et al. 2017), whose encoder is `model`."""

    name: str = "translation"
    """Objective: translation."""
    num_decoder_layers: Natural = 0
    """Number of decoder layers. 0 means as many as model.num_layers."""
    tying: Tying = "all"
    """Sharing of token tables. `all`: source, target and output share one table. `output`: target
    and output share a table, and the source has another. `none`: each has its own."""
    init_decoder: bool = False
    """Whether the decoder is also initialised from `init` (Rothe et al. 2020): self-attention,
    feed-forward and norms from the first layers of the encoder, positions from the encoder, and the
    output from the masked-LM head. Cross-attention starts from random values."""

    def laid_out(self, model: ModelConfig, params: Any) -> Any:
        """Copy the encoder to a decoder, and `mlm` to an output head, if `init_decoder` is set."""
        norm = params.get("decoder", {}).get("layers", {}).get("cross_norm")
        there = len(norm["scale"]) if norm else model.num_layers
        wanted = self.num_decoder_layers or model.num_layers
        if (norm and wanted != there) or (self.init_decoder and wanted > there):
            raise UserError(
                f"objective.num_decoder_layers is {self.num_decoder_layers}, so the decoder has "
                f"{wanted} layers, but the {'decoder' if norm else 'encoder'} of init has {there}; "
                f"set objective.num_decoder_layers to {there}"
            )
        if not self.init_decoder or "decoder" in params:
            return params
        network = self.network(model)
        return {**params, **network.decoder_from(params["encoder"], params.get("mlm", {}))}

    def network(self, model: ModelConfig) -> TransformerNetwork:
        """Make the network, whose encoder is `model`."""
        layers, tying = self.num_decoder_layers, self.tying
        return TransformerNetwork(model, layers, tying, forces_end=self.forces_end)


@dataclass(frozen=True)
class RecurrentTranslationConfig(NetworkConfig, RecurrentConfig):
    """Translation by a recurrent network. `model` sets widths, encoder layers and dropout rates."""

    name: str = "recurrent_translation"
    """Objective: recurrent_translation."""

    def network(self, model: ModelConfig) -> RecurrentNetwork:
        """Make the network with the widths and layers of `model`."""
        own = {field.name: getattr(self, field.name) for field in fields(RecurrentConfig)}
        return RecurrentNetwork(model, RecurrentConfig(**own), forces_end=self.forces_end)


@dataclass(frozen=True)
class StudentConfig(DistillationConfig):
    """Distillation from a masked-LM teacher, which may also initialise the student."""

    from_teacher: bool = False
    """Whether the student starts as a copy of the teacher's embeddings and heads, and of the layers
    that `layers` lists. Both must then have the same sizes, except for model.num_layers."""
    architecture: ModelConfig | None = None
    """Architecture of the teacher, which a run reads from the directory `teacher`."""

    def taught(self, objective: ObjectiveConfig, given: Given) -> Objective:
        """Make a run's objective from `objective`, with distillation if there is a teacher."""
        student = objective.make(given)
        if not self.teacher:
            return student
        assert self.architecture is not None  # set by `resolve_teacher`
        teacher = objective.make(given._replace(model=self.architecture))
        assert isinstance(student, Teachable)
        assert isinstance(teacher, Teachable)
        return Distilled(student, teacher, self)


OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    "masked_lm": MaskedLMConfig,
    "replaced_tokens": ReplacedTokensConfig,
    "translation": TranslationConfig,
    "recurrent_translation": RecurrentTranslationConfig,
}
"""Objectives by name. To add an objective, add an entry."""
ObjectiveConfig.VARIANTS = OBJECTIVES
