"""Parameter counts against the published ones; refused shapes."""

import dataclasses
from pathlib import Path

import pytest

from bert_jax.errors import UserError
from bert_jax.model.config import SIZES, ModelConfig
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.objectives.objective import num_params
from bert_jax.tokenization.special_ids import SpecialIds

# tests/model/test_huggingface_parity.py checks the same numbers against transformers.
PUBLISHED = {
    "tiny": 4_433_468,
    "mini": 11_267_900,
    "small": 29_058_876,
    "medium": 41_668_412,
    "base": 110_106_428,
    "large": 336_226_108,
}


def count(size):
    return num_params(MaskedLM(SIZES[size], MaskingConfig(), SpecialIds(*range(5))))


@pytest.mark.parametrize("size", SIZES)
def test_published_parameter_counts(size):
    assert count(size) == PUBLISHED[size]


@pytest.mark.parametrize("size", SIZES)
def test_the_readme_has_the_counts(size):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (row,) = (line for line in readme.splitlines() if line.startswith(f"| `bert_{size}`"))
    assert row.endswith(f"| {count(size):,} |")


def test_every_size_has_its_count():
    assert SIZES.keys() == PUBLISHED.keys()
    assert SIZES["base"] == ModelConfig()


@pytest.mark.parametrize(("vocab_size", "padded"), [(1, 128), (128, 128), (30522, 30592)])
def test_vocabulary_is_padded_to_lanes(vocab_size, padded):
    assert ModelConfig(vocab_size=vocab_size).padded_vocab_size == padded


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("embedding_dim", -1),
        ("num_heads", 7),
        ("hidden_dropout_rate", 1.0),
        ("attention_dropout_rate", -0.1),
    ],
)
def test_impossible_shapes_are_refused(field, value):
    with pytest.raises(UserError, match=f"{field}.* {value}"):
        dataclasses.replace(SIZES["tiny"], **{field: value})
