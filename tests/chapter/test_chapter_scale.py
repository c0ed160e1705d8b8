"""Station 9: shares of languages and layers cut over chips are what the package computes."""

import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from chapter import EXAMPLES, PAGES, formulas, normal
from flax import nnx

from bert_jax.data.mixture import Mixing, weights_of
from bert_jax.data.store import TokenStore
from bert_jax.model.config import ModelConfig
from bert_jax.model.encoder import Mlp

PAGE = PAGES / "scale.md"
SIZES = np.array([300_800, 66_600, 20_200, 1_600, 100])
formula = formulas("scale")


def sized(num_tokens):
    """A store of which nothing but its size is known."""
    store = object.__new__(TokenStore)
    vars(store)["num_tokens"] = num_tokens
    return store


@pytest.mark.parametrize("alpha", [1.0, 0.7, 0.3, 0.0])
def test_the_package_draws_languages_with_the_shares_of_the_formula(alpha):
    weights = weights_of([sized(size) for size in SIZES], [1.0] * len(SIZES), alpha)
    shares = formula.shares(SIZES, alpha)
    np.testing.assert_allclose(np.array(weights) / sum(weights), shares, atol=1e-12)
    drawn = np.array(Mixing(weights, key=1).counts(10**7)) / 10**7
    np.testing.assert_allclose(drawn, shares, atol=1e-5)


@pytest.mark.parametrize("num_chips", [1, 2, 4])
def test_a_layer_cut_over_chips_computes_what_one_chip_computes(num_chips):
    config = ModelConfig(
        hidden_dim=6, mlp_dim=8, num_heads=1, activation="relu", init_std=0.5, dtype="float32"
    )
    mlp = Mlp(config, nnx.Rngs(params=0))
    mlp.up.bias[...], mlp.down.bias[...] = normal(8), normal(6, seed=1)
    x = normal(5, 6)
    maps = [np.array(part[...]).T for map in (mlp.up, mlp.down) for part in (map.kernel, map.bias)]
    found = jax.jit(lambda x: mlp(x[None]))(x)[0]
    np.testing.assert_allclose(found, formula.feed_forward(np.array(x), *maps), atol=1e-5)
    cut = formula.cut_feed_forward(np.array(x), *maps, num_chips)
    np.testing.assert_allclose(found, cut, atol=1e-5)


def test_the_page_shows_the_sizes_that_the_station_prints(tmp_path):
    command = [sys.executable, str(EXAMPLES / "scale.py"), "--steps=1", f"--pictures={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes = done.stdout[done.stdout.index("megatron_8_3b: 72 layers") :]
    count = re.search(r"parameters +([\d,]+)$", sizes, re.MULTILINE)
    assert count
    assert 8.25e9 < int(count[1].replace(",", "")) < 8.3e9
    assert sizes in PAGE.read_text()
