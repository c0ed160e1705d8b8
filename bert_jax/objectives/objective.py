"""The interface between training objectives and the code that trains and evaluates them.

An objective is a set of pure functions. It does not depend on the mesh, the training loop or files.
The training step, evaluation, telemetry, figures, retention, `plan` and `replay` use an objective
only through this interface and its metrics. They do not refer to metrics by name.

A training step calls `prepare` and then `counts` on the full batch; `counts` returns the
denominators of the loss. For each micro-batch, the step then calls `forward` for the numerators,
and `loss` to divide them by the denominators. Because the denominators count the full batch, the
losses of the micro-batches add up to the loss of the batch, even if the sizes are unequal.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream, Stream
from bert_jax.model.flops import TRAIN_OVER_FORWARD, encoder_flops
from bert_jax.model.heads import Build, encode, init_params, logical_axes
from bert_jax.model.layout import OnMesh
from bert_jax.model.lora import LoraConfig, merged, with_lora, with_lora_axes
from bert_jax.objectives.losses import ratio

Tree = Any
"""Nested dict of arrays."""
Batch = dict[str, Any]
"""Arrays with rows on axis 0: `row_index` (B,), `segment_ids` (B, L), and others."""
Scalars = dict[str, Num[Array, ""]]
"""Sums over rows, by name. The sums of two sets of rows add up to the sums over both sets."""
_STACK = ("encoder", "layers")


@dataclass(frozen=True)
class Metric:
    """Description of a reported value: a ratio of two sums, such as the loss per masked token."""

    name: str
    """Name in metrics.jsonl, after the prefix train/ or eval/."""
    title: str
    """Name in plots and warnings."""
    total: str
    """Key of the numerator in the sums."""
    count: str
    """Key of the denominator in the sums."""
    unit: str = ""
    """Unit of the value. If empty, the value is a fraction from 0 to 1."""
    better: Literal["lower", "higher"] = "lower"
    """Whether lower or higher values are better."""
    short: str = ""
    """Name in printed lines and tables. If empty, lines and plots do not show the metric."""
    floor: str = ""
    """Name of the evaluation result that holds the score of the best constant answer, if any."""
    baseline: str = ""
    """Description of `Objective.baseline`. It is empty for all metrics but the first."""

    def of(self, sums: Mapping[str, float]) -> float:
        """Return the metric's value from sums over all rows of an evaluation."""
        return sums[self.total] / max(sums[self.count], 1.0)


def judged_sums(
    name: str, loss: Array, correct: Array, weights: Array, count: str = ""
) -> dict[str, Array]:
    """Return the weighted sums of losses (nats) and of right answers, and the sum of weights."""
    return {
        f"{name}_loss": jnp.sum(loss * weights),
        f"{name}_correct": jnp.sum(correct * weights),
        count or f"{name}_count": jnp.sum(weights),
    }


class Forward(NamedTuple):
    """Result of a forward pass over some rows."""

    sums: Scalars
    """Numerators and counts, summed over the rows."""
    outputs: Tree = ()
    """Arrays with rows on axis 0, for scores that are not a ratio of sums."""


class Shown(NamedTuple):
    """Rows for display: the model's input and the predicted positions."""

    tokens: Array
    """Token ids (B, L) of the input."""
    predicted: Array
    """Mask (B, L) of the tokens whose labels are predicted."""


@dataclass(frozen=True)
class Objective(ABC):
    """Training objective: a set of pure functions. Subclasses are frozen dataclasses."""

    model: ModelConfig
    """Architecture of the encoder, with the compute type and unrolling of the training step."""
    baseline: float | None = field(default=None, kw_only=True)
    """Value of the first metric for the best model that ignores its input. None if not known."""
    frozen: frozenset[str] = field(default=frozenset(), kw_only=True)
    """Paths, joined by /, of parameters that training does not change (see `trained`)."""
    frozen_layers: int = field(default=0, kw_only=True)
    """Number of bottom layers of `encoder` that training does not change. If it is not 0, `frozen`
    must contain the embeddings, and the backward pass ends above these layers."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics. The first metric is monitored, plotted and compared with `baseline`."""

    def parts(self) -> tuple[Any, ...]:
        """Return the module class and the module's settings; () means `PretrainingModel`."""
        return ()

    def init(self, key: Array) -> Tree:
        """Initialise parameters: a nested dict of float32 arrays."""
        return init_params(self.model, key, *self.parts())

    def axes(self) -> Tree:
        """Name the logical axes of each parameter (see `parallel.sharding.RULES`)."""
        return logical_axes(self.model, *self.parts())

    def prepare(self, batch: Batch, seed: int | Array) -> Batch:
        """Make inputs and labels of the full batch on the device, for example by masking."""
        del seed
        return batch

    @abstractmethod
    def counts(self, rows: Batch) -> Scalars:
        """Compute the denominators of the loss over the full batch."""

    def pace(self, done: Float[Array, ""]) -> Scalars:
        """Return more entries of `counts`, which depend on `done`, the completed share of steps."""
        return {}

    @abstractmethod
    def forward(self, params: Tree, rows: Batch, seed: Array | None, layout: OnMesh) -> Forward:
        """Compute the sums over prepared rows. If `seed` is None, there is no dropout."""

    @abstractmethod
    def loss(self, sums: Scalars, counts: Scalars) -> Float[Array, ""]:
        """Return the loss: `sums` of some rows, divided by `counts` of the full batch."""

    def for_evaluation(self) -> "Objective":
        """Return the objective for evaluation, without the parts that only training needs."""
        return self

    def own(self, params: Tree) -> Tree:
        """Return the entries of `params` that belong to the objective."""
        return {name: params[name] for name in self.axes()}

    def aside(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return evaluation results other than metrics, from `sums` over all evaluated rows."""
        del sums
        return {}

    def gain(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return by how many nats the first metric is below `baseline`; {} without a baseline."""
        loss = self.metrics[0].of(sums)
        return {} if self.baseline is None else {"nats_below_unigram": self.baseline - loss}

    def has_dropout(self) -> bool:
        """Tell whether training uses dropout."""
        return any(rate for name, rate in vars(self.model).items() if name.endswith("dropout_rate"))

    @staticmethod
    def num_tokens(batch: Batch) -> Int[Array, "*trials"]:
        """Count the tokens of a batch, padding excluded."""
        return jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32)

    @abstractmethod
    def flops(self, rows: Batch) -> int:
        """Count the floating-point operations per row in a training step, from array shapes."""

    def shown(self, rows: Batch) -> Shown:
        """Return prepared rows for display. By default, no position is marked as predicted."""
        tokens = jnp.asarray(rows["tokens"])
        return Shown(tokens, jnp.zeros(tokens.shape, bool))

    @staticmethod
    def inputs(rows: Batch, seed: Array | None) -> tuple[Array, Array, Array, Stream]:
        """Return the inputs of `encode`. Groups of rows (B, G, L) become consecutive rows."""
        index = rows["row_index"]
        tokens, types, segments = (rows[name] for name in ("tokens", "type_ids", "segment_ids"))
        if tokens.ndim == 3:
            _, group, length = tokens.shape
            index = (index[:, None] * group + jnp.arange(group, dtype=index.dtype)).reshape(-1)
            tokens, types, segments = (x.reshape(-1, length) for x in (tokens, types, segments))
        return tokens, types, segments, None if seed is None else DropoutStream(seed, index)


@dataclass(frozen=True)
class Teachable(Objective):
    """Objective that can learn from a teacher whose objective has the same class and labels."""

    def forward(self, params: Tree, rows: Batch, seed: Array | None, layout: OnMesh) -> Forward:
        """Run the model, and compute the sums from its last states with `finish`."""
        params, inputs = self.computing(params), self.inputs(rows, seed)
        states = encode(self.model, params, *inputs, layout)
        return self.finish(params, states, rows, inputs[-1])[1]

    def computing(self, params: Tree) -> Tree:
        """Return the parameters for the forward pass, for example with LoRA updates added."""
        return params

    @abstractmethod
    def finish(
        self, params: Tree, states: Array, rows: Batch, stream: Stream
    ) -> tuple[Array, Forward]:
        """Compute the logits from the last states, and the sums of losses against labels."""

    @abstractmethod
    def soft_losses(
        self, logits: Array, wanted: Array, rows: Batch, temperature: float
    ) -> Float[Array, "*predicted"]:
        """Compute the loss of each prediction against a teacher's logits."""

    @abstractmethod
    def soft_weights(self, rows: Batch) -> Float[Array, "*predicted"]:
        """Return the weight of each prediction in the comparison with the teacher."""

    def token_weights(self, rows: Batch) -> Float[Array, "B L"]:
        """Return the weight of each token in the comparison of its states with the teacher's."""
        return (rows["segment_ids"] > 0).astype(jnp.float32)


@dataclass(frozen=True)
class Adapted(Objective):
    """Objective of a pretrained encoder with a new head. LoRA can train the encoder."""

    lora: LoraConfig = field(default=LoraConfig(), kw_only=True)
    """LoRA settings. With LoRA, the parameters have an entry `lora`, and `encoder` is frozen."""

    @abstractmethod
    def parts(self) -> tuple[Build, Any]:
        """Return the module class of encoder and head, and the module's settings."""

    def init(self, key: Array) -> Tree:
        """Initialise parameters: encoder, head and, if configured, LoRA updates."""
        return with_lora(self.lora, key, super().init(key), super().axes())

    def axes(self) -> Tree:
        """Name the logical axes of each parameter."""
        return with_lora_axes(self.lora, super().axes())

    def loss(self, sums: Scalars, counts: Scalars) -> Float[Array, ""]:
        """Return the mean loss over the labels, or 0 if the batch has no labels."""
        return ratio(sums["loss"], counts["count"])

    def computing(self, params: Tree) -> Tree:
        """Return the parameters with the low-rank updates added."""
        return merged(self.lora, params)

    def spared_flops(self, length: int) -> int:
        """Count the operations of one row's backward pass that frozen layers make needless."""
        is_frozen = "encoder/layers" in self.frozen and not self.lora.rank
        count = self.model.num_layers if is_frozen else self.frozen_layers
        backward = (TRAIN_OVER_FORWARD - 1) * encoder_flops(self.model, length)
        return backward * count // self.model.num_layers


@dataclass(frozen=True)
class CoupledObjective(Objective):
    """Objective whose loss compares the rows of a batch with each other.

    The loss depends on each row only through a small array, such as the row's vector. With
    micro-batches, a step therefore computes the arrays of all rows first, then the gradient of the
    loss with respect to the arrays, and then, one micro-batch at a time, the gradient with respect
    to the parameters (Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size).
    """

    @abstractmethod
    def represent(self, params: Tree, rows: Batch, seed: Array | None, layout: OnMesh) -> Array:
        """Compute an array for each prepared row, such as its vector. Rows do not interact."""

    @abstractmethod
    def compare(self, outputs: Array, rows: Batch, layout: OnMesh) -> Scalars:
        """Compute the sums over this device's rows. `layout.all_rows` gathers all rows."""

    def forward(self, params: Tree, rows: Batch, seed: Array | None, layout: OnMesh) -> Forward:
        """Represent the rows and compare them."""
        outputs = self.represent(params, rows, seed, layout)
        return Forward(self.compare(outputs, rows, layout), outputs)


def num_params(objective: Objective) -> int:
    """Count the parameters, except a teacher's parameters and the padding of the vocabulary."""
    objective = objective.for_evaluation()
    model, shapes = objective.model, _shapes(objective)

    def count(shape: Any, axes: tuple[str | None, ...]) -> int:
        padded = axes[:1] == ("vocab",) and shape.shape[0] == model.padded_vocab_size
        return math.prod((model.vocab_size, *shape.shape[1:]) if padded else shape.shape)

    return sum(jax.tree.leaves(jax.tree.map(count, shapes, objective.axes())))


def _shapes(objective: Objective) -> Tree:
    # Creating the key outside of `eval_shape` would start a device.
    return jax.eval_shape(lambda: objective.init(jax.random.key(0)))


def num_frozen(objective: Objective) -> int:
    """Count the parameters in the top-level entries that are frozen."""
    kept = {n: entry for n, entry in _shapes(objective).items() if n in objective.frozen}
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(kept))


# Gradients, moments, saved states and best parameters have the structure of the trainable tree.


def trained(objective: Objective, tree: Tree) -> Tree:
    """Return the trainable part of a tree that has the structure of the parameters of one run.

    Leaves are arrays, `ShapeDtypeStruct`s, or objects without a shape (axes, shardings). The bottom
    `frozen_layers` are cut off the encoder's stacked layers. Dicts that become empty are left out.
    """

    def upper(leaf: Any) -> Any:
        """Cut the frozen layers off a leaf of the stacked layers, if the leaf has a shape."""
        count = objective.frozen_layers
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((leaf.shape[0] - count, *leaf.shape[1:]), leaf.dtype)
        return leaf[count:] if hasattr(leaf, "shape") else leaf

    def part(entry: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(entry, dict):
            return upper(entry) if path[:2] == _STACK and objective.frozen_layers else entry
        parts = {
            name: part(inner, (*path, name))
            for name, inner in entry.items()
            if "/".join((*path, name)) not in objective.frozen
        }
        return {name: p for name, p in parts.items() if not isinstance(p, dict) or p}

    return part(tree, ())


def with_trained(objective: Objective, whole: Tree, part: Tree) -> Tree:
    """Merge the trainable parameters `part` into the full parameters `whole` of one run."""

    def fill(whole: Any, part: Any, path: tuple[str, ...]) -> Any:
        if isinstance(part, dict) and isinstance(whole, dict):
            return {**whole, **{n: fill(whole[n], part[n], (*path, n)) for n in part}}
        if objective.frozen_layers and path[:2] == _STACK:
            return jax.lax.dynamic_update_slice_in_dim(whole, part, objective.frozen_layers, 0)
        return part

    return fill(whole, part, ())


def trains_all(objective: Objective) -> bool:
    """Tell whether training changes all parameters."""
    return not (objective.frozen or objective.frozen_layers)


def measure(metrics: tuple[Metric, ...], sums: Scalars) -> dict[str, Float[Array, ""]]:
    """Compute the value of each metric on the device, by name."""
    return {metric.name: ratio(sums[metric.total], sums[metric.count]) for metric in metrics}


def evaluated(objective: Objective, sums: Mapping[str, float]) -> dict[str, float]:
    """Return evaluation results by name (eval/...), from sums over all evaluated rows."""
    values = {metric.name: metric.of(sums) for metric in objective.metrics}
    return {f"eval/{name}": value for name, value in (values | objective.aside(sums)).items()}
