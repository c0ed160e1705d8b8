"""Losses and gradients of embedding models, equal to those of sentence-transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.config import ModelConfig
from bert_jax.objectives.embedding import ContrastConfig, EmbeddingObjective

pytestmark = pytest.mark.parity

B, D = 12, 16
MODEL = ModelConfig(num_layers=1, hidden_dim=D, num_heads=2, mlp_dim=8, vocab_size=9)
CASES = {
    "pairs": ("ranking", 2, ContrastConfig()),
    "negatives": ("ranking", 4, ContrastConfig(temperature=0.1)),
    "symmetric": ("ranking", 2, ContrastConfig(symmetric=True)),
    "scores": ("scores", 2, ContrastConfig(temperature=0.1)),
    "dimensions": (
        "ranking", 3, ContrastConfig(dimensions=(8, 4), dimension_weights=(0.5, 0.25)),
    ),
    "dimensions of scores": ("scores", 2, ContrastConfig(dimensions=(8,))),
}  # fmt: skip


def make_vectors(group):
    return np.random.default_rng(group).normal(size=(B, group, D)).astype(np.float32)


def make_scores():
    return np.random.default_rng(9).integers(0, 6, B).astype(np.float32)


def ours(comparison, group, contrast):
    """Loss and its gradient by the vectors; all texts differ."""
    objective = EmbeddingObjective(MODEL, contrast.of_model(), comparison, group, contrast)
    rows = {
        "segment_ids": np.ones((B, group, 3), np.int32),
        "weights": np.ones(B, np.float32),
        "row_index": np.arange(B, dtype=np.uint32),
        "text_ids": np.arange(B * group, dtype=np.int32).reshape(B, group),
        **({"labels": make_scores()} if comparison == "scores" else {}),
    }

    rows = jax.tree.map(jnp.asarray, rows)

    def loss(vectors):
        return objective.loss(objective.compare(vectors, rows, None), objective.counts(rows))

    return jax.jit(jax.value_and_grad(loss))(jnp.asarray(make_vectors(group)))


def theirs(comparison, group, contrast):
    """The same by their classes, on a model that returns the vectors it is given."""
    import torch
    from sentence_transformers.sentence_transformer import losses

    class Given(torch.nn.Module):
        def forward(self, features):
            return dict(features)

        def get_embedding_dimension(self):
            return D

    given = Given()
    scale = 1 / (contrast.temperature or 0.05)
    if comparison == "scores":
        loss = losses.CoSENTLoss(given, scale=scale)
    else:
        both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        options = both if contrast.symmetric else {}
        loss = losses.MultipleNegativesRankingLoss(given, scale=scale, **options)
    if contrast.dimensions:
        weights = contrast.dimension_weights or (1,) * len(contrast.dimensions)
        sizes = [D, *contrast.dimensions]
        loss = losses.MatryoshkaLoss(given, loss, sizes, matryoshka_weights=[1, *weights])
    vectors = torch.tensor(make_vectors(group), requires_grad=True)
    columns = [{"sentence_embedding": vectors[:, n]} for n in range(group)]
    value = loss(columns, torch.tensor(make_scores()))
    value.backward()
    return value.item(), vectors.grad.numpy()


@pytest.mark.filterwarnings("ignore")  # of their imports
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_sentence_transformers(case):
    value, gradient = ours(*CASES[case])
    expected, wanted = theirs(*CASES[case])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted, atol=1e-5 * np.abs(wanted).max())
