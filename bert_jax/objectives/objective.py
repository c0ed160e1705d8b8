"""The interface between what a run learns and everything that trains it.

An objective holds pure functions of their arguments. It knows no mesh, no loop and no file. The
training step, evaluation, telemetry, pictures, retention, `plan` and `replay` use an objective
only through this interface and its metrics, and know no metric by name.

A step works in this order: `prepare` the whole batch; `counts`, the denominators of the whole
batch; per micro-batch `forward`, the numerators; `loss`, a scalar of both. Losses of parts of a
batch add up to the loss of the whole, however unequal the parts are, because the denominators are
known before the first part.
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
from bert_jax.model.heads import Build, encode, init_params, logical_axes
from bert_jax.model.layout import OnMesh
from bert_jax.model.lora import LoraConfig, merged, with_lora, with_lora_axes
from bert_jax.objectives.losses import ratio

Tree = Any
"""Nested dict of arrays."""
Batch = dict[str, Any]
"""Arrays with rows on axis 0: `row_index` (B,), `segment_ids` (B, L), the objective's own."""
Scalars = dict[str, Num[Array, ""]]
"""Sums over rows: two of them added entry by entry are the sums over both sets of rows."""
_STACK = ("encoder", "layers")


@dataclass(frozen=True)
class Metric:
    """One ratio of sums that a run reports, such as a loss per masked token."""

    name: str
    """Name in metrics.jsonl, behind train/ and eval/."""
    title: str
    """Words for pictures and warnings."""
    total: str
    """Entry of the sums that is divided."""
    count: str
    """Entry of the sums that divides."""
    unit: str = ""
    """Unit of the value; empty: a share of 1."""
    better: Literal["lower", "higher"] = "lower"
    short: str = ""
    """Words for lines and tables; empty: neither lines nor pictures show the metric."""
    floor: str = ""
    """Name of the evaluated value that the best constant answer reaches; empty: none."""
    baseline: str = ""
    """Words for the value that `Objective.baseline` gives, of the first metric."""

    def of(self, sums: Mapping[str, float]) -> float:
        """Return the value of an evaluation, from sums over all its rows."""
        return sums[self.total] / max(sums[self.count], 1.0)


def judged_sums(
    name: str, loss: Array, correct: Array, weights: Array, count: str = ""
) -> dict[str, Array]:
    """Sum losses (nats), right answers and the weights of both."""
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
    """Arrays with rows on axis 0, for scores that are no ratio of sums."""


class Shown(NamedTuple):
    """Rows for display: the model's input and the predicted places."""

    tokens: Array
    """(B, L) token ids of the input."""
    predicted: Array
    """(B, L) bool."""


@dataclass(frozen=True)
class Objective(ABC):
    """Goal of a run, as pure functions; an objective is a frozen dataclass below this one."""

    model: ModelConfig
    """Encoder of the objective, with the step's compute type and unrolling."""
    baseline: float | None = field(default=None, kw_only=True)
    """Value of the first metric that a model reaches which ignores its input, if known."""
    frozen: frozenset[str] = field(default=frozenset(), kw_only=True)
    """Entries of the parameters that no step changes, by /-joined paths (see `trained`)."""
    frozen_layers: int = field(default=0, kw_only=True)
    """Number of lower layers of `encoder` that no step changes. Where it is not 0, `frozen` has
    the embeddings, and the backward pass ends above these layers."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of the objective; the first is watched, drawn and compared with `baseline`."""

    @abstractmethod
    def init(self, key: Array) -> Tree:
        """Make fresh parameters: a nested dict of float32 arrays."""

    @abstractmethod
    def axes(self) -> Tree:
        """Name the logical axes of each parameter (see `parallel.sharding.RULES`)."""

    def prepare(self, batch: Batch, seed: int | Array) -> Batch:
        """Make model inputs and labels of the whole batch, on the device: masking, corruption."""
        del seed
        return batch

    @abstractmethod
    def counts(self, rows: Batch) -> Scalars:
        """Count the denominators of the loss, of the whole batch."""

    @abstractmethod
    def forward(self, params: Tree, rows: Batch, seed: Array | None, layout: OnMesh) -> Forward:
        """Compute the sums of some prepared rows; `seed` None switches dropout off."""

    @abstractmethod
    def loss(self, sums: Scalars, counts: Scalars) -> Float[Array, ""]:
        """Return the loss of these sums over the counts of the whole batch."""

    def for_evaluation(self) -> "Objective":
        """Return the objective of evaluations, without the parts that only training needs."""
        return self

    def own(self, params: Tree) -> Tree:
        """Return the entries of parameters that the objective has."""
        return {name: params[name] for name in self.axes()}

    def aside(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return an evaluation's further results, beside the metrics, from its sums."""
        del sums
        return {}

    def gain(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the known unigram entropy less the first metric, a loss in nats."""
        loss = self.metrics[0].of(sums)
        return {} if self.baseline is None else {"nats_below_unigram": self.baseline - loss}

    def has_dropout(self) -> bool:
        """Say whether training draws random numbers for dropout."""
        return bool(self.model.hidden_dropout_rate or self.model.attention_dropout_rate)

    @staticmethod
    def num_tokens(batch: Batch) -> Int[Array, "*trials"]:
        """Count the tokens of a batch, padding excluded."""
        return jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32)

    @abstractmethod
    def flops(self, rows: Batch) -> int:
        """Count the floating-point operations of a row of these shapes in a training step."""

    @abstractmethod
    def shown(self, rows: Batch) -> Shown:
        """Show prepared rows to people."""

    @staticmethod
    def inputs(rows: Batch, seed: Array | None) -> tuple[Array, Array, Array, Stream]:
        """Return the inputs of `encode` from rows, those that belong together one after another."""
        index = rows["row_index"]
        tokens, types, segments = (rows[name] for name in ("tokens", "type_ids", "segment_ids"))
        if tokens.ndim == 3:
            _, group, length = tokens.shape
            index = (index[:, None] * group + jnp.arange(group, dtype=index.dtype)).reshape(-1)
            tokens, types, segments = (x.reshape(-1, length) for x in (tokens, types, segments))
        return tokens, types, segments, None if seed is None else DropoutStream(seed, index)


@dataclass(frozen=True)
class Teachable(Objective):
    """Objective whose predictions a teacher, an objective of the same class, can make too."""

    def forward(self, params: Tree, rows: Batch, seed: Array | None, layout: OnMesh) -> Forward:
        """Run the model, and finish with its last states."""
        params, inputs = self.computing(params), self.inputs(rows, seed)
        states = encode(self.model, params, *inputs, layout)
        return self.finish(params, states, rows, inputs[-1])[1]

    def computing(self, params: Tree) -> Tree:
        """Return the parameters that the model computes with."""
        return params

    @abstractmethod
    def finish(
        self, params: Tree, states: Array, rows: Batch, stream: Stream
    ) -> tuple[Array, Forward]:
        """Compute logits from the last states, and compare them with the labels."""

    @abstractmethod
    def soft_losses(
        self, logits: Array, wanted: Array, rows: Batch, temperature: float
    ) -> Float[Array, "*predicted"]:
        """Compute the loss of each prediction against a teacher's logits."""

    @abstractmethod
    def soft_weights(self, rows: Batch) -> Float[Array, "*predicted"]:
        """Return the weight of each prediction that is compared with the teacher's."""

    def token_weights(self, rows: Batch) -> Float[Array, "B L"]:
        """Return the weight of each token whose states are compared with the teacher's."""
        return (rows["segment_ids"] > 0).astype(jnp.float32)


@dataclass(frozen=True)
class Adapted(Objective):
    """Objective of a head on a pretrained encoder, which may be trained by low-rank updates."""

    lora: LoraConfig = field(default=LoraConfig(), kw_only=True)
    """Low-rank updates, an entry `lora` of the parameters, to which `encoder` is frozen."""

    @abstractmethod
    def parts(self) -> tuple[Build, Any]:
        """Return the module of encoder and head, and its settings."""

    def init(self, key: Array) -> Tree:
        """Make fresh parameters: encoder, head, updates."""
        params = init_params(self.model, key, *self.parts())
        return with_lora(self.lora, key, params, logical_axes(self.model, *self.parts()))

    def axes(self) -> Tree:
        """Name the logical axes of each parameter."""
        return with_lora_axes(self.lora, logical_axes(self.model, *self.parts()))

    def computing(self, params: Tree) -> Tree:
        """Return the parameters with the low-rank updates added."""
        return merged(self.lora, params)


@dataclass(frozen=True)
class CoupledObjective(Objective):
    """Objective whose loss compares the rows of a batch with each other.

    The loss of some rows depends on all rows, through arrays that are far smaller than what makes
    them. Micro-batches therefore make these arrays first, then their gradient, and then the
    parameters' gradient, in parts (Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size).
    """

    @abstractmethod
    def represent(self, params: Tree, rows: Batch, seed: Array | None, layout: OnMesh) -> Array:
        """Make an array of prepared rows, rows on axis 0; each entry depends only on its row."""

    @abstractmethod
    def compare(self, outputs: Array, rows: Batch, layout: OnMesh) -> Scalars:
        """Compute the sums of the device's rows; `layout.all_rows` gives all rows of the batch."""

    def forward(self, params: Tree, rows: Batch, seed: Array | None, layout: OnMesh) -> Forward:
        """Represent the rows and compare them."""
        outputs = self.represent(params, rows, seed, layout)
        return Forward(self.compare(outputs, rows, layout), outputs)


def num_params(objective: Objective) -> int:
    """Count the parameters, without a teacher and the rows that pad the vocabulary."""
    objective = objective.for_evaluation()
    model, shapes = objective.model, _shapes(objective)

    def count(shape: Any, axes: tuple[str | None, ...]) -> int:
        padded = axes[:1] == ("vocab",) and shape.shape[0] == model.padded_vocab_size
        rows = (model.vocab_size, *shape.shape[1:]) if padded else shape.shape
        return math.prod(rows)

    return sum(jax.tree.leaves(jax.tree.map(count, shapes, objective.axes())))


def _shapes(objective: Objective) -> Tree:
    # The key is made in the function: outside it would open a device.
    return jax.eval_shape(lambda: objective.init(jax.random.key(0)))


def num_frozen(objective: Objective) -> int:
    """Count the parameters below the frozen entries at the top of an objective's parameters."""
    kept = {n: entry for n, entry in _shapes(objective).items() if n in objective.frozen}
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(kept))


# What a step changes of the parameters is a tree of its own. Gradients, moments, saves of a run and
# the best parameters have its shape.


def trained(objective: Objective, tree: Tree) -> Tree:
    """Return the part that a step changes, of a tree shaped like one run's parameters.

    Leaves are arrays, shapes, or anything that knows no shape (axes, shardings). The lower
    `frozen_layers` of the encoder's stack are cut off; dicts that become empty are left out.
    """

    def upper(leaf: Any) -> Any:
        """Cut the lower layers off a stack, if the leaf has a shape."""
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
    """Merge `part`, updated trainable parameters, into one run's full parameters `whole`."""

    def fill(whole: Any, part: Any, path: tuple[str, ...]) -> Any:
        if isinstance(part, dict) and isinstance(whole, dict):
            return {**whole, **{n: fill(whole[n], part[n], (*path, n)) for n in part}}
        if objective.frozen_layers and path[:2] == _STACK:
            return jax.lax.dynamic_update_slice_in_dim(whole, part, objective.frozen_layers, 0)
        return part

    return fill(whole, part, ())


def trains_all(objective: Objective) -> bool:
    """Say whether a step changes all parameters."""
    return not (objective.frozen or objective.frozen_layers)


def measure(metrics: tuple[Metric, ...], sums: Scalars) -> dict[str, Float[Array, ""]]:
    """Return the value of each metric on the device."""
    return {metric.name: ratio(sums[metric.total], sums[metric.count]) for metric in metrics}


def evaluated(objective: Objective, sums: Mapping[str, float]) -> dict[str, float]:
    """Return the values that an evaluation reports, from sums over all its rows."""
    values = {metric.name: metric.of(sums) for metric in objective.metrics}
    return {f"eval/{name}": value for name, value in (values | objective.aside(sums)).items()}
