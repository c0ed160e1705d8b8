"""Station 10: what the heads of a trained model look at, and what each of them is worth.

    python examples/chapter/heads.py

The small BERT of station 8 is trained again. For each head, the run measures where it looks, then
removes it and measures how much worse hidden words are guessed.
"""

from typing import Any

import counting as task
import jax
import numpy as np
import optax
from formulas.heads import entropy, on_offset, on_same_word
from number_words import words_of
from station import Asked, asked, learn

from bert_jax.files.pictures import new_figure, write_picture
from bert_jax.model.heads import layer_outputs

NUM_UNSEEN, SHOWN = 500, [words_of(2347), words_of(2348)]
MEASURES = ("previous", "itself", "next", "same word", "[CLS]", "[SEP]")


def main(asked: Asked) -> None:
    """Train, measure every head, remove every head, and print and draw what was found."""
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, asked.steps))
    params = task.OBJECTIVE.init(jax.random.key(0))
    params, _ = learn(task.loss, params, task.training_rows(asked.steps), optimizer)
    rows = jax.jit(lambda rows: task.OBJECTIVE.prepare(rows, 0))(task.unseen_rows(NUM_UNSEEN))
    rows = jax.tree.map(np.asarray, rows)
    inputs = (rows[name] for name in ("tokens", "type_ids", "segment_ids"))
    weights = np.asarray(layer_outputs(task.MODEL, params, *inputs, with_weights=True).weights)
    whole, costs = costs_of(params, rows)
    print("share of a head's weight, spread of the weights, and what its removal costs")
    print("layer head", *(f"{name:>9}" for name in MEASURES), " entropy      cost")
    for layer in range(task.MODEL.num_layers):
        for head in range(task.MODEL.num_heads):
            found = line(weights[layer, :, head], rows)
            print(f"{layer + 1:5}{head + 1:5}{found}{costs[layer][head]:+10.2f}")
    segments = rows["segment_ids"].astype(float)
    alike = segments[:, None] / segments.sum(-1)[:, None, None] + 0 * weights[0, :, 0]
    print(f"all alike {line(alike, rows)}")
    print(f"\nloss of hidden words with all heads {whole:.2f} nats")
    everything = removed(params, [(n, h) for n in range(2) for h in range(task.MODEL.num_heads)])
    print(f"without any head                    {lost(everything, rows):.2f} nats")
    draw(params, costs, asked)


def line(weights: np.ndarray, rows: Any) -> str:
    """Write the measures of a head's weights (B, L, L)."""
    shares, spread = measured(weights, rows)
    return "".join(f"{share:10.0%}" for share in shares) + f"{spread:9.2f}"


def measured(weights: np.ndarray, rows: Any) -> tuple[list[float], float]:
    """Measure a head's weights (B, L, L); each row counts by its own length."""
    found, spreads = [], []
    for looks, tokens, segments in zip(weights, rows["tokens"], rows["segment_ids"], strict=True):
        length = int(segments.sum())
        looks, tokens = looks[:length, :length], tokens[:length]
        words = tokens > task.SPECIAL.mask  # a hidden word or a special token is no repetition
        repeated = len(set(tokens[words].tolist())) < words.sum()
        found.append([
            on_offset(looks, -1),
            on_offset(looks, 0),
            on_offset(looks, 1),
            on_same_word(looks[np.ix_(words, words)], tokens[words]) if repeated else np.nan,
            looks[:, 0].mean(),
            looks[:, tokens == task.SPECIAL.sep].sum(1).mean(),
        ])  # fmt: skip
        spreads.append(entropy(looks))
    return np.nanmean(found, axis=0).tolist(), float(np.mean(spreads))


def removed(params: Any, heads: list[tuple[int, int]]) -> Any:
    """Replace the outputs of heads (layer, head) by zeros."""
    layers = params["encoder"]["layers"]
    kernel = layers["attention"]["output"]["kernel"]  # (layers, heads, K, D)
    for layer, head in heads:
        kernel = kernel.at[layer, head].set(0.0)
    output = {**layers["attention"]["output"], "kernel": kernel}
    layers = {**layers, "attention": {**layers["attention"], "output": output}}
    return {**params, "encoder": {**params["encoder"], "layers": layers}}


@jax.jit
def _sums(params: Any, rows: Any) -> Any:
    return task.OBJECTIVE.forward(params, rows, None, None).sums


def lost(params: Any, rows: Any) -> float:
    """Compute the loss of hidden words in nats."""
    sums = _sums(params, rows)
    return float(sums["mlm_loss"] / sums["mlm_count"])


def costs_of(params: Any, rows: Any) -> tuple[float, list[list[float]]]:
    """Compute the loss with all heads, and by how much it grows without each head."""
    whole = lost(params, rows)
    return whole, [
        [
            lost(removed(params, [(layer, head)]), rows) - whole
            for head in range(task.MODEL.num_heads)
        ]
        for layer in range(task.MODEL.num_layers)
    ]


def draw(params: Any, costs: list[list[float]], asked: Asked) -> None:
    """Draw the weights of all heads for two numbers."""
    rows = task.rows_of([SHOWN])
    inputs = (rows[name] for name in ("tokens", "type_ids", "segment_ids"))
    weights = np.asarray(layer_outputs(task.MODEL, params, *inputs, with_weights=True).weights)
    words = [task.TOKENS[id] for id in rows["tokens"][0] if id]
    figure = new_figure((9.5, 6))
    axes = figure.subplots(task.MODEL.num_layers, task.MODEL.num_heads)
    for layer, line in enumerate(axes):
        for head, axis in enumerate(line):
            shown = weights[layer, 0, head, : len(words), : len(words)]
            axis.imshow(shown, cmap="Blues", vmin=0, vmax=1, aspect="auto")
            title = f"layer {layer + 1}, head {head + 1}: {costs[layer][head]:+.2f}"
            axis.set_title(title, fontsize=8)
            axis.set_xticks(range(len(words)), words, rotation=90, fontsize=6)
            axis.set_yticks(range(len(words)), words if head == 0 else [], fontsize=6)
    write_picture(figure, asked.pictures / "heads.png")


if __name__ == "__main__":
    main(asked(__doc__, steps=1500))
