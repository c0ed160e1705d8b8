"""Station 9: a hundred languages in one model, and a model too large for one chip.

    python examples/chapter/scale.py

How often each language is read, with three exponents; a layer cut over four chips; and how much
memory the recipe of the largest Megatron needs. Nothing is trained.
"""

import math
from pathlib import Path

import jax
import numpy as np
from formulas.scale import bytes_of, cut_feed_forward, feed_forward, shares
from station import Asked, asked

from bert_jax.chips import CHIPS
from bert_jax.config.command_line import load_config
from bert_jax.data.mixture import Mixing
from bert_jax.files.pictures import MARK, dress, new_figure, write_picture
from bert_jax.model.flops import train_flops
from bert_jax.model.heads import param_shapes
from bert_jax.training.pretrain.config import PretrainConfig

SIZES = {
    "English": 300.8, "Russian": 278.0, "German": 66.6, "French": 56.8, "Hindi": 20.2, "Urdu": 5.7,
    "Swahili": 1.6,
}  # fmt: skip
"""GiB of text of some languages (Conneau et al. 2020, XLM-R, appendix A)."""
ALPHAS = (1.0, 0.7, 0.3)
RECIPE = Path(__file__).parents[2] / "configs" / "pretrain" / "megatron_8_3b.py"
GIB = 2**30
CHIP_GIB = CHIPS["v5p"].hbm_bytes // GIB


def main(asked: Asked) -> None:
    """Print the shares, the two ways to compute a layer and the sizes of the recipe; draw them."""
    sizes = np.array(list(SIZES.values()))
    columns = [shares(sizes, alpha) for alpha in ALPHAS]
    num_rows = 1000 * asked.steps
    drawn = np.array(Mixing(columns[-1].tolist(), key=0).counts(num_rows)) / num_rows
    print("share of rows     GiB", *(f"  alpha {alpha}" for alpha in ALPHAS), "  the package, 0.3")
    for n, (name, size) in enumerate(SIZES.items()):
        cells = "".join(f"{column[n]:11.2%}" for column in columns)
        print(f"{name:14}{size:7}{cells}{drawn[n]:18.2%}")
    cut_layer()
    draw(columns, sized(), asked)


def cut_layer() -> None:
    """Compute a layer on one chip and, as parts, on four; print how far they differ."""
    random = np.random.default_rng(0)
    x, W_1, W_2 = (random.normal(size=shape) for shape in ((8, 64), (256, 64), (64, 256)))
    maps = W_1, random.normal(size=256), W_2, random.normal(size=64)
    whole, parts = feed_forward(x, *maps), cut_feed_forward(x, *maps, 4)
    print(f"\na layer on one chip and on four: numbers up to {abs(whole).max():.0f}")
    print(f"  largest difference {abs(whole - parts).max():.0e}")


def sized() -> int:
    """Print the sizes of the recipe; return the number of its parameters."""
    config = load_config(PretrainConfig, str(RECIPE), ["--config.model.vocab_size=30522"])
    model, phase = config.model, config.training.phases[0]
    leaves = jax.tree.leaves(param_shapes(model))
    count = sum(math.prod(leaf.shape) for leaf in leaves)
    chips = config.mesh.fsdp * config.mesh.tensor
    operations = phase.batch_size * train_flops(
        model, phase.length, config.masking.num_predictions(phase.length)
    )
    print(f"\n{RECIPE.stem}: {model.num_layers} layers, vectors of {model.hidden_dim} numbers")
    lines = {
        "parameters": f"{count:,}",
        f"on one chip of {CHIP_GIB} GiB": f"{bytes_of(count, 1) / GIB:.0f} GiB",
        f"cut over {config.mesh.fsdp} x {config.mesh.tensor} = {chips} chips": (
            f"{bytes_of(count, chips) / GIB:.2f} GiB on each"
        ),
        f"a step of {phase.batch_size} rows of {phase.length}": f"{operations:.1e} operations",
    }
    for name, value in lines.items():
        print(f"  {name:31}{value}")
    return count


def draw(columns: list[np.ndarray], count: int, asked: Asked) -> None:
    """Draw the shares of the languages and, beside them, the memory of each chip."""
    figure = new_figure((9.5, 3.8))
    left, right = figure.subplots(1, 2)
    for alpha, column, style in zip(ALPHAS, columns, ("o:", "s--", "D-"), strict=True):
        left.semilogy(list(SIZES), column, style, label=f"alpha {alpha}")
    left.set(ylabel="share of the rows")
    left.tick_params(axis="x", labelsize=8)
    left.legend(fontsize=8, frameon=False)
    chips = 2 ** np.arange(11)
    right.loglog(chips, [bytes_of(count, n) / GIB for n in chips], "o-", color="#3182ce")
    right.axhline(CHIP_GIB, color=MARK, linewidth=0.8)
    right.annotate("memory of a TPU v5p", (chips[-1], CHIP_GIB * 1.15), fontsize=8, ha="right")
    right.set(xlabel="chips over which a parameter is cut", ylabel="GiB on each chip")
    ticks = {right.xaxis: chips[::2].tolist(), right.yaxis: [0.1, 1, 10, 100]}
    ticks[left.yaxis] = [0.003, 0.01, 0.03, 0.1, 0.3]
    for axis, values in ticks.items():
        name = "{:.1%}" if axis is left.yaxis else "{:g}"
        axis.set_ticks(values, [name.format(value) for value in values])
        axis.set_ticks([], minor=True)
    for axis in (left, right):
        dress(axis)
        axis.tick_params(axis="both", labelsize=8)
    write_picture(figure, asked.pictures / "scale.png")


if __name__ == "__main__":
    main(asked(__doc__, steps=1000))
