"""Tests for causes of a plateau in pretraining, on the newest checkpoint and its batches.

The limits were set on runs with planted faults and checked on others (benchmarks/diagnose.py).
"""

import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.artefacts.saved.runs import read_record
from bert_jax.cli.inspection.replay import open_batches
from bert_jax.data.pipeline import ExampleStream
from bert_jax.distributed.checkpoint.reading import load_newest
from bert_jax.distributed.checkpoint.record import named_leaves
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.model.attention.xla import visible_keys
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import layer_outputs
from bert_jax.terminal import table_lines
from bert_jax.training.pretrain.saves import read_config
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.steps.optim import learning_rate_schedule
from bert_jax.training.steps.optim_parts import is_decayed
from bert_jax.training.steps.state import abstract_state, jitted_init, optimizer_of
from bert_jax.training.steps.step import dropout_seed, gradients

_ROWS, _TOKENS = 2048, 1 << 15  # rows whose text is compared; tokens of the gradient's batch
_WINDOW, _SHORT = 8, 16  # tokens of a compared text; most tokens of a short text
_SCORES, _SPAN = 1 << 25, 512  # attention probabilities, and tokens of the rows they come from
_PARTS = {"embeddings": "embeddings", "layers": "layer", "mlm": "head"}
_FINDING = ("cause", "measured", "normal", "remedy")


class Part(NamedTuple):
    """Root mean squares over the weight matrices of the embeddings, a layer or the head.

    `start` measures the initial weights (None unless random), `update` the next update at the peak
    learning rate. The last two fields compare a layer's attention heads: `uneven` is the highest
    mean divergence from uniform attention, in nats, `largest` the lowest mean largest weight.
    """

    name: str
    start: float | None
    weights: float
    gradient: float
    update: float
    uneven: float | None = None
    largest: float | None = None


class Evidence(NamedTuple):
    """Measurements of a run. Losses are in nats, and shares from 0 to 1.

    `start_loss` is the loss of the initial weights, if they were random. `full_steps` is the sum of
    all learning rates, divided by the peak. `kept` is the share of predicted tokens that the input
    shows, `repeats` the share of repeated windows of `_WINDOW` tokens, `short` the share of tokens
    in texts of up to `_SHORT` tokens.
    """

    step: int
    loss: float
    start_loss: float | None
    vocab_size: int
    hidden_dim: int
    rate: float
    full_steps: float
    masked: float
    kept: float
    parts: tuple[Part, ...]
    repeats: float
    unknown: float
    padding: float
    short: float


def measure(work: WorkDir) -> Evidence:
    """Measure the newest checkpoint of a masked-LM run, or the initial weights if there is none.

    Raise a UserError if the run has another objective, a teacher, no state, or a missing corpus.
    """
    config, steps = read_config(work.local), saved_steps(work.checkpoints)
    fresh = not config.init and "branch" not in read_record(work.local, "pretrain")
    if config.objective.name != "masked_lm" or config.distil.teacher or not (steps or fresh):
        raise UserError(
            f"{work.name}: --diagnose needs objective.name masked_lm without distil.teacher, and "
            f"a checkpoint or random weights; found {config.objective.name}, "
            f"{config.distil.teacher or 'no teacher'} and {len(steps)} checkpoints"
        )
    at = min(max(steps, default=0), config.training.num_steps - 1)
    config, phase, stores, stream = open_batches(work, at)
    model, rate = config.model_of(phase), config.peak_rate(phase)
    num_steps, own = config.training.num_steps, config.phase_rate(phase)
    rates = learning_rate_schedule(config.optimizer, num_steps, own)(jnp.arange(num_steps))
    peak = replace(config.optimizer, schedule="constant", warmup_steps=0, learning_rate=rate)
    setup = replace(step_config(config, stores, phase), optimizer=peak, rate=None, accumulation=1)
    mesh, objective = make_mesh(MeshConfig(), jax.local_devices()[:1]), setup.objective
    count = max(1, _TOKENS // stream.phases[phase].length)
    batch = {name: jnp.asarray(array[:count]) for name, array in stream.batch(at).items()}
    rows, step = objective.prepare(batch, config.seed), jnp.int32(at)

    @jax.jit
    def differentiated(params: Any) -> tuple[Any, jax.Array]:
        dropout, metric = dropout_seed(setup, config.seed, step), objective.metrics[0]
        grads, sums = gradients(setup, mesh, params, rows, dropout, objective.counts(rows))
        return grads, sums[metric.total] / sums[metric.count]

    begun = jitted_init(setup, mesh)(jax.random.key(config.seed)) if fresh else None
    restored = load_newest(work.checkpoints, abstract_state(setup, mesh))
    state: Any = begun if restored is None else restored.state
    grads, loss = differentiated(state.params)
    updates, _ = jax.jit(optimizer_of(setup).update)(grads, state.opt_state, state.params)
    start = _sizes(begun.params) if begun else {}
    sizes = [_sizes(tree) for tree in (state.params, grads, updates)]
    seen, shown = _attention(model, state.params, rows), objective.shown(rows)
    parts = (Part(n, start.get(n), *(s[n] for s in sizes), *seen.get(n, ())) for n in sizes[0])
    return Evidence(
        restored.step if restored else 0, float(loss),
        float(differentiated(begun.params)[1]) if begun else None, model.vocab_size,
        model.hidden_dim, rate, float(rates.sum()) / rate,
        float(shown.predicted.sum() / (batch["segment_ids"] > 0).sum()),
        float((shown.tokens == batch["tokens"])[shown.predicted].mean()), tuple(parts),
        *_texts(stream, phase, at, stores.train.special_ids.unk),
    )  # fmt: skip


def _sizes(tree: Any) -> dict[str, float]:
    """Return the root mean square of the weights of each part, without queries and keys."""
    found: dict[str, list[tuple[float, int]]] = {}
    for path, leaf in named_leaves(tree).items():
        part = next((part for part in _PARTS if part in path.split("/")), "")
        if part and is_decayed(path) and not {"query", "key"} & {*path.split("/")}:
            stacked = leaf if part == "layers" else leaf[None]
            for number, value in enumerate(jnp.square(stacked.reshape(len(stacked), -1)).sum(1), 1):
                name = f"layer {number}" if part == "layers" else _PARTS[part]
                found.setdefault(name, []).append((float(value), leaf.size // len(stacked)))
    return {name: math.sqrt(np.divide(*np.sum(each, axis=0))) for name, each in found.items()}


def _attention(model: ModelConfig, params: Any, rows: Any) -> dict[str, tuple[float, float]]:
    """Return `uneven` and `largest` of each layer, over the tokens of some rows."""
    span = min(_SPAN, rows["tokens"].shape[1])
    count = max(1, _SCORES // (model.num_layers * model.num_heads * span**2))
    inputs = [rows[name][:count, :span] for name in ("tokens", "type_ids", "segment_ids")]
    weights = jnp.asarray(layer_outputs(model, params, *inputs, with_weights=True).weights)
    segments, found = inputs[2], {}
    for number, layer in enumerate(weights):  # (B, H, L, L)
        window = model.window(model.layer_kind(number).letter)
        keys = visible_keys(segments, segments, window).sum(-1)
        used = (segments > 0)[:, None] & (keys > 1)
        entropy = -jax.scipy.special.xlogy(layer, layer).sum(-1)
        uneven, largest = (
            jnp.where(used, each, 0).sum((0, 2)) / jnp.maximum(used.sum(), 1)
            for each in (jnp.log(keys) - entropy, layer.max(-1))
        )
        found[f"layer {number + 1}"] = float(uneven.max()), float(largest.min())
    return found


def _texts(stream: ExampleStream, phase: int, at: int, unknown: int) -> Iterator[float]:
    """Yield the last four fields of `Evidence`, from the rows up to step `at`."""
    first = max(0, at + 1 - -(-_ROWS // stream.phases[phase].batch_size))
    batches = [stream.batch(n) for n in range(first, at + 1) if stream.phase_of(n) == phase]
    stream.wait_for_checks()
    arrays = ([batch[name] for batch in batches] for name in ("tokens", "segment_ids"))
    tokens, segments = map(np.concatenate, arrays)
    real, width = segments > 0, tokens.shape[1] - _WINDOW + 1
    is_text = real[:, :width] & (segments[:, :width] == segments[:, -width:])
    texts = np.lib.stride_tricks.sliding_window_view(tokens, _WINDOW, axis=1)[is_text]
    _, lengths = np.unique(np.nonzero(real)[0] << 16 | segments[real], return_counts=True)
    yield 1 - len(np.unique(texts, axis=0)) / max(1, len(texts))
    yield from (float((tokens[real] == unknown).mean()), float(1 - real.mean()))
    yield float(lengths[lengths <= _SHORT].sum() / lengths.sum())


def judge(e: Evidence) -> list[dict[str, str]]:
    """Return a finding, with the keys `_FINDING`, for each failed test, causes before effects."""
    uniform, best_std = math.log(e.vocab_size), 0.02 * math.sqrt(768 / e.hidden_dim)
    normal = 0.88 * best_std  # see `ModelConfig.init_std`
    bases = [max(part.start or part.weights, normal) for part in e.parts]
    scale = float(np.median([part.start / normal for part in e.parts if part.start] or [1.0]))
    start_loss = uniform if e.start_loss is None else e.start_loss
    relative = [(p.update / base, p.weights / base) for p, base in zip(e.parts, bases, strict=True)]
    update, growth = (max(1e-9, *each) for each in zip(*relative, strict=True))
    slopes, whole = [part.gradient for part in e.parts], update * e.full_steps
    slope = min(slopes) / max(1e-30, *slopes)
    uneven = max(0.0, *(part.uneven for part in e.parts if part.uneven is not None))
    largest = min(part.largest for part in e.parts if part.largest is not None)
    kind = "uniform" if uneven < 1e-5 else "saturated"
    corpus, rate = "set data.corpus to a corpus", "set optimizer.learning_rate (or a phase's) to"
    tests = (
        (e.unknown > 0.05, "data", f"{e.unknown:.1%} of the tokens are [UNK]",
         "below 1%", f"{corpus} whose tokenizer was trained on its text"),
        (e.repeats > 0.5, "data", f"{e.repeats:.0%} of the texts of {_WINDOW} tokens are repeated",
         "below 20%", f"{corpus} of more text, without duplicates (--drop-duplicates near)"),
        (e.padding > 0.5, "data", f"{e.padding:.0%} of the positions are padding",
         "below 20%", f"{corpus} of longer documents, or data.pairing to none"),
        (e.short > 0.5, "data", f"{e.short:.0%} of the tokens are in texts of up to {_SHORT}",
         "below 10%", f"{corpus} whose documents have several sentences"),
        (not 0.04 <= e.masked <= 0.6, "masking", f"{e.masked:.1%} of the tokens are predicted",
         "10% to 40%", "set masking.rate (or a phase's) to 0.15, max_predictions to None"),
        (e.kept > 0.5, "masking", f"the input shows {e.kept:.0%} of the tokens to be predicted",
         "about 10%", "set masking.mask_rate to 0.8 and masking.random_rate to 0.1"),
        (start_loss > uniform + 1 or not 0.1 <= scale <= 8, "initial scale",
         f"weights of {scale:.2g} times BERT's size at this width; loss {start_loss:.2f} nats",
         f"0.2 to 3 times; {uniform:.2f} nats", f"set model.init_std to {best_std:.2g}"),
        (update > (0.1 if e.step >= 10 else 0.4)  # Adam's first updates are larger
         or (growth > 3 and slope < 1e-3), "learning rate",
         f"too high: at the peak, {e.rate:g}, updates are up to {update:.2g} times the initial "
         f"weights; growth {growth:.2g}; smallest gradient {slope:.2g} times the largest",
         "up to 0.05; 3; above 0.001", f"{rate} {min(e.rate / 3, e.rate / update / 50):.1g}"),
        (whole < 0.3, "learning rate", f"too low: at a peak of {e.rate:g}, the updates of all "
         f"steps are {whole:.2g} times the weights", "above 1",
         f"{rate} {2 * e.rate / whole:.1g}, or raise training.num_steps"),
        (uneven < 1e-5 or largest > 0.9, "attention", f"{kind} in every layer: "
         f"{uneven:.1g} nats from uniform; largest {largest:.2f}", "above 0.0001; below 0.9",
         f"start again, or from an earlier checkpoint, and {rate} {e.rate / 3:.1g}"),
    )  # fmt: skip
    return [dict(zip(_FINDING, texts, strict=True)) for fails, *texts in tests if fails]


def diagnosis(work: WorkDir) -> tuple[dict[str, Any], list[str]]:
    """Diagnose a run. Return JSON values, and lines for people. For errors see `measure`."""
    evidence = measure(work)
    findings, parts = judge(evidence), [part._asdict() for part in evidence.parts]
    texts = ["{cause}: {measured} (normal: {normal}); {remedy}".format(**f) for f in findings]
    healthy = ["healthy: the tests of data, masking, weights, rate and attention pass"]
    wrapped = (textwrap.wrap(text, 98, subsequent_indent="  ") for text in texts or healthy)
    rows = [[p.name, *("-" if x is None else f"{x:.2g}" for x in p[1:])] for p in evidence.parts]
    found = {"findings": findings, **evidence._asdict(), "parts": parts}
    title = ["", f"diagnosis of step {evidence.step:,}, loss {evidence.loss:.3f} nats"]
    return {"diagnosis": found}, sum(wrapped, title) + table_lines([Part._fields, *rows])
