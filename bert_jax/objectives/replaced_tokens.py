"""Replaced-token detection: a small generator replaces tokens, and the encoder detects them.

Source: Clark et al. 2020, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than
Generators", section 2, appendix A, and the published code. Generator and discriminator share the
token, position and type embeddings and the norm after the embeddings, but no later parameters.

With `disentangled`, each has its own embeddings. The discriminator adds its entry `token` to the
generator's table, which gets no gradient from the sum (He et al. 2023, DeBERTaV3, section 3.2).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from bert_jax.model.config import ModelConfig
from bert_jax.model.counter_hash import hash_u32
from bert_jax.model.flops import TRAIN_OVER_FORWARD, encoder_flops, replaced_flops, vocabulary_flops
from bert_jax.model.heads import (
    ReplacedHead,
    encode,
    init_params,
    logical_axes,
    vocabulary_projection,
    with_params,
)
from bert_jax.model.layout import OnMesh
from bert_jax.objectives.losses import cross_entropy, ratio
from bert_jax.objectives.masked_lm import MaskedLM, check_decoder
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.objectives.objective import (
    Batch,
    Forward,
    Metric,
    Objective,
    Scalars,
    Shown,
    judged_sums,
)
from bert_jax.tokenization.special_ids import SpecialIds

# Words hashed with the seed, so that each use gets other random numbers (see `masking`).
_SAMPLING, _GENERATOR_DROPOUT = 0x53414D50, 0x47454E44
SHARED = ("token", "position", "type", "norm")
"""Parts of the embeddings that generator and discriminator share."""

METRICS = (
    Metric(
        "mlm_loss", "masked-LM loss of the generator", "mlm_loss", "mlm_count", "nats per token",
        short="generator loss", baseline="unigram entropy",
    ),
    Metric(
        "mlm_accuracy", "masked-LM accuracy of the generator", "mlm_correct", "mlm_count",
        better="higher",
    ),
    Metric("rtd_loss", "replaced-token loss", "rtd_loss", "rtd_count", "nats per token"),
    Metric(
        "rtd_accuracy", "replaced-token accuracy", "rtd_correct", "rtd_count", better="higher",
        short="rtd accuracy", floor="rtd_majority",
    ),
    Metric(
        "rtd_recall", "share of replaced tokens that are found", "rtd_found", "rtd_replaced",
        better="higher",
    ),
)  # fmt: skip


def generator_of(model: ModelConfig, size: float) -> ModelConfig:
    """Return the generator's architecture: widths and heads times `size`, at the same depth."""
    heads = max(1, round(model.num_heads * size))
    unit = 2 * heads if model.positions == "rope" else heads  # RoPE needs an even width of a head
    generator = dataclasses.replace(
        model,
        embedding_dim=model.embedding_width,
        hidden_dim=max(1, round(model.hidden_dim * size / unit)) * unit,
        num_heads=heads,
        num_kv_heads=model.num_kv_heads and math.gcd(heads, model.num_kv_heads),
        mlp_dim=max(1, round(model.mlp_dim * size)),
    )
    check_decoder(generator)
    return generator


def generator_params(params: Any) -> Any:
    """Return all parameters of the generator: `encoder`, with shared embeddings, and `mlm`."""
    shared = {n: part for n, part in params["encoder"]["embeddings"].items() if n in SHARED}
    own = params["generator"]["encoder"]
    embeddings = {**shared, **own.get("embeddings", {})}
    return {"mlm": {}, **params["generator"], "encoder": {**own, "embeddings": embeddings}}


def discriminator_params(params: Any) -> Any:
    """Return all parameters of the discriminator: `rtd`, and `encoder` with a whole token table."""
    encoder, theirs = params["encoder"], params["generator"]["encoder"].get("embeddings", {})
    if hasattr(theirs.get("token"), "shape"):  # a tree of axes has nothing to add
        token = jax.lax.stop_gradient(theirs["token"]) + encoder["embeddings"]["token"]
        encoder = {**encoder, "embeddings": {**encoder["embeddings"], "token": token}}
    return {"encoder": encoder, "rtd": params["rtd"]}


@dataclass(frozen=True)
class ReplacedTokens(Objective):
    """Detection of replaced tokens by `model`; for the fields, see `ReplacedTokensConfig`."""

    masking: MaskingConfig
    special_ids: SpecialIds
    generator_size: float = 0.25
    discriminator_weight: float = 50.0
    temperature: float = 1.0
    disentangled: bool = False
    continues_word: np.ndarray | None = field(default=None, compare=False)
    """Mask (vocab_size,) of the ids that continue the preceding word, for whole-word masking."""

    metrics = METRICS

    @property
    def generator(self) -> ModelConfig:
        """Architecture of the generator."""
        return generator_of(self.model, self.generator_size)

    @property
    def proposer(self) -> MaskedLM:
        """Objective of the generator, a masked LM."""
        return MaskedLM(
            self.generator, self.masking, self.special_ids, self.continues_word, pairs=False,
            baseline=self.baseline,
        )  # fmt: skip

    def init(self, key: Array) -> Any:
        """Initialise parameters: encoder and rtd of the discriminator, and the generator."""
        keys = jax.random.split(key, 3)
        params = _joined(
            init_params(self.model, keys[0]),
            init_params(self.model, keys[1], ReplacedHead),
            init_params(self.generator, keys[2]),
            self.disentangled,
        )
        if self.disentangled:
            embeddings = params["encoder"]["embeddings"]
            embeddings["token"] = jnp.zeros_like(embeddings["token"])
        return params

    def axes(self) -> Any:
        """Name the logical axes of each parameter."""
        return _joined(
            logical_axes(self.model),
            logical_axes(self.model, ReplacedHead),
            logical_axes(self.generator),
            self.disentangled,
        )

    def prepare(self, batch: Batch, seed: int | Array) -> Batch:
        """Mask tokens as `MaskedLM` does, and add the seeds (B,) for drawing tokens in each row."""
        seeds = jnp.asarray(hash_u32(seed, _SAMPLING, jnp.asarray(batch["row_index"])))
        return {**self.proposer.prepare(batch, seed), "proposals": seeds}

    def counts(self, rows: Batch) -> Scalars:
        """Count masked positions and real tokens."""
        return {
            "mlm_count": jnp.sum(rows["weights"]),
            "rtd_count": jnp.sum((rows["segment_ids"] > 0).astype(jnp.float32)),
        }

    def forward(self, params: Any, rows: Batch, seed: Array | None, layout: OnMesh) -> Forward:
        """Sum the losses (nats), correct predictions and counts of both models over the rows."""
        logits = self.proposed_logits(generator_params(params), rows, seed, layout)
        sums = judged_sums("mlm", *cross_entropy(logits, rows["labels"]), rows["weights"])
        drawn = draw(logits / self.temperature, rows["proposals"], rows["positions"])
        tokens, is_replaced = replace_tokens(rows, drawn)
        inputs = self.inputs({**rows, "tokens": tokens}, seed)
        states = encode(self.model, discriminator_params(params), *inputs, layout)
        found = with_params(params["rtd"], ReplacedHead, self.model)(states)
        return Forward(sums | detection_sums(found, is_replaced, rows["segment_ids"] > 0))

    def proposed_logits(
        self, generator: Any, rows: Batch, seed: Array | None, layout: OnMesh
    ) -> Float[Array, "B P V"]:
        """Compute the generator's logits at the masked positions."""
        if seed is not None:  # draw other dropout masks than the discriminator
            seed = jnp.asarray(hash_u32(seed, _GENERATOR_DROPOUT))
        if layout is not None:
            layout = layout.of("generator")
        states = encode(self.generator, generator, *self.inputs(rows, seed), layout)
        return vocabulary_projection(self.generator, generator, states, rows["positions"]).logits()

    def loss(self, sums: Scalars, counts: Scalars) -> Float[Array, ""]:
        """Add the generator's loss per masked token and the weighted detection loss per token."""
        masked = ratio(sums["mlm_loss"], counts["mlm_count"])
        detection = ratio(sums["rtd_loss"], counts["rtd_count"])
        return masked + self.discriminator_weight * detection

    def aside(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the best constant answer's accuracy, the share of replaced tokens, and counts."""
        tokens, replaced = sums["rtd_count"], sums["rtd_replaced"]
        return {
            "rtd_majority": max(replaced, tokens - replaced) / max(tokens, 1.0),
            "rtd_share_replaced": replaced / max(tokens, 1.0),
            **self.proposer.aside(sums),
        }

    def flops(self, rows: Batch) -> int:
        """Count the operations of one row in a training step (see `model.flops`)."""
        length = rows["tokens"].shape[-1]
        num_masked = self.masking.num_predictions(length)
        encoders = encoder_flops(self.generator, length) + encoder_flops(self.model, length)
        heads = vocabulary_flops(self.generator, num_masked) + replaced_flops(self.model, length)
        return TRAIN_OVER_FORWARD * (encoders + heads)

    def shown(self, rows: Batch) -> Shown:
        """Return the generator's input and its predicted positions, for display."""
        return self.proposer.shown(rows)


def _joined(discriminator: Any, head: Any, generator: Any, disentangled: bool) -> Any:
    """Join both models into one tree, without poolers and with one copy of shared embeddings."""
    encoder, own = (
        {name: part for name, part in model["encoder"].items() if name != "pooler"}
        for model in (discriminator, generator)
    )
    shared = () if disentangled else SHARED
    own["embeddings"] = {n: part for n, part in own["embeddings"].items() if n not in shared}
    if not own["embeddings"]:
        del own["embeddings"]
    masked = {name: part for name, part in generator.items() if name == "mlm"}
    return {"encoder": encoder, "rtd": head, "generator": {"encoder": own, **masked}}


def draw(
    logits: Float[Array, "B P V"], seeds: UInt32[Array, " B"], positions: Int[Array, "B P"]
) -> Int[Array, "B P"]:
    """Draw from softmax(logits) by Gumbel-max without gradient; seed and position set the noise."""
    tokens = jax.lax.broadcasted_iota(jnp.uint32, (1, 1, logits.shape[-1]), 2)
    bits = jnp.asarray(hash_u32(seeds[:, None, None], positions[..., None], tokens))
    # Values near 0 decide the maximum. There, float32 resolves 2^-33, but near 1 only 2^-24.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    gumbel = -jnp.log(-jnp.log1p(-uniform))
    return jnp.argmax(jax.lax.stop_gradient(logits) + gumbel, axis=-1).astype(jnp.int32)


def replace_tokens(
    rows: Batch, drawn: Int[Array, "B P"]
) -> tuple[Int[Array, "B L"], Bool[Array, "B L"]]:
    """Put drawn tokens at the chosen positions; return the discriminator's input and a mask.

    The mask marks the tokens that differ from the text. A drawn token may equal the original.
    """
    length = rows["tokens"].shape[1]
    used = rows["weights"] > 0
    at = jnp.where(used, rows["positions"], length)  # `set` drops positions beyond the row
    row = jnp.arange(at.shape[0])[:, None]
    tokens = rows["tokens"].at[row, at].set(drawn, mode="drop")
    changed = jnp.zeros(tokens.shape, bool).at[row, at].set(drawn != rows["labels"], mode="drop")
    return tokens, changed


def detection_sums(
    logits: Float[Array, "B L"], is_replaced: Bool[Array, "B L"], is_real: Bool[Array, "B L"]
) -> Scalars:
    """Sum binary cross entropy (nats), correct predictions and counts over the real tokens."""
    loss = jax.nn.softplus(jnp.where(is_replaced, -logits, logits))
    answer = logits > 0
    total = lambda values: jnp.sum(jnp.where(is_real, values, 0).astype(jnp.float32))  # noqa: E731
    return {
        "rtd_loss": total(loss),
        "rtd_correct": total(answer == is_replaced),
        "rtd_count": total(1.0),
        "rtd_replaced": total(is_replaced),
        "rtd_found": total(answer & is_replaced),
    }
