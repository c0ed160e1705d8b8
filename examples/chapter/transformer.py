"""Station 7: a translator made of attention alone, and the search for the best translation.

    python examples/chapter/transformer.py

The Transformer does the task of stations 3 to 5: lists of numbers in French words, to be written in
digits. Then greedy search and beam search look for the best text of small random models, for
which all texts can be tried.
"""

from typing import Any

import number_words as task
import numpy as np
from formulas.transformer import beam_search, exhaustive, greedy
from station import Asked, asked

from bert_jax.files.pictures import dress, new_figure, write_picture
from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.transformer import TransformerNetwork

SHOWN = [97, 805]
NETWORK = TransformerNetwork(
    ModelConfig(
        vocab_size=len(task.TOKENS), num_positions=task.MOST_WORDS + 2, num_types=0, hidden_dim=64,
        num_layers=2, num_heads=4, mlp_dim=128, hidden_dropout_rate=0.0, init_std=0.1,
        attention_dropout_rate=0.0, positions="sinusoidal", scale_embeddings=True,
        activation="relu", norm_order="pre", norm_eps=1e-6, embedding_norm=False, pooler=False,
        head_transform=False, dtype="float32",
    )
)  # fmt: skip
WORDS, MOST, END, NUM_MODELS = 4, 5, 0, 200
"""Words of a random model, among them the end; longest text; number of models."""
BEAMS = (2, 3, 5, 10, WORDS**MOST)


def main(asked: Asked) -> None:
    """Train the Transformer, print what it gets right and what searches find, and draw both."""
    task.print_header("the Transformer")
    params, _ = task.trained(NETWORK, asked.steps, rate=3e-3)
    for num_beams in (1, 4):
        name = "greedy search" if num_beams == 1 else f"{num_beams} beams"
        task.print_shares(name, task.exact(NETWORK, params, num_beams))
    print(f"\nbest text of {NUM_MODELS} random models of {WORDS} words: found by")
    found = found_by_search()
    for name, share in found.items():
        print(f"  {name:12}{share:7.1%}")
    draw(looked(params), found, asked)


def random_model(seed: int) -> Any:
    """Make a random model: the words so far -> log of the probability of each next word."""
    table = np.random.default_rng(seed).normal(0, 1.5, (WORDS + 1, WORDS + 1, WORDS))

    def log_p(words: tuple[int, ...]) -> np.ndarray:
        one, two = (WORDS, WORDS, *words)[-2:]
        return table[one, two] - np.log(np.exp(table[one, two]).sum())

    return log_p


def found_by_search() -> dict[str, float]:
    """Return the share of random models whose best text each search finds."""
    models = [random_model(seed) for seed in range(NUM_MODELS)]
    best = [exhaustive(log_p, END, MOST)[0] for log_p in models]
    found = {"greedy": [greedy(log_p, END, MOST)[0] for log_p in models]}
    for num_beams in BEAMS:
        found[f"{num_beams} beams"] = [
            beam_search(log_p, END, MOST, num_beams)[0] for log_p in models
        ]
    return {name: float(np.mean([a == b for a, b in zip(each, best, strict=True)]))
            for name, each in found.items()}  # fmt: skip


def looked(params: Any) -> np.ndarray:
    """Compute the weight of each word for each sign of `SHOWN` (layers, heads, signs, words)."""
    pairs = task.pairs_of([SHOWN])
    cross = NETWORK.weights(params, pairs.source, pairs.target).cross
    words, signs = len(task.spelled(SHOWN)) + 2, len(task.in_digits(SHOWN)) + 1
    return np.asarray(cross[:, 0, :, :signs, :words])


def draw(looks: np.ndarray, found: dict[str, float], asked: Asked) -> None:
    """Draw where the last layer's heads look in the source and, below, what searches find."""
    figure = new_figure((9.5, 6))
    above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
    words, signs = ["[CLS]", *task.spelled(SHOWN), "[SEP]"], [*task.in_digits(SHOWN), "[SEP]"]
    axes = above.subplots(1, len(looks[-1]))
    for number, (axis, look) in enumerate(zip(axes, looks[-1], strict=True)):
        axis.imshow(look, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axis.set_title(f"layer {len(looks)}, head {number + 1}", fontsize=9)
        axis.set_xticks(range(len(words)), words, rotation=90, fontsize=7)
        axis.set_yticks(range(len(signs)), signs, fontsize=7)
    axis = below.subplots()
    bars = axis.bar(list(found), list(found.values()), color="#3182ce", width=0.6)
    axis.bar_label(bars, fmt="{:.0%}", fontsize=8)
    axis.set(ylabel="best text found", ylim=(0, 1.15))
    dress(axis)
    write_picture(figure, asked.pictures / "transformer.png")


if __name__ == "__main__":
    main(asked(__doc__, steps=500))
