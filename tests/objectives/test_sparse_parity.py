"""Losses and gradients of sparse vectors and of rerankers, equal to sentence-transformers' own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.config import ModelConfig
from bert_jax.objectives.embedding import ContrastConfig, EmbeddingObjective
from bert_jax.objectives.losses import list_losses

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

B, G, V = 8, 4, 40
MODEL = ModelConfig(num_layers=1, hidden_dim=8, num_heads=2, mlp_dim=8, vocab_size=V)
RANDOM = np.random.default_rng(3)
VECTORS = np.maximum(RANDOM.normal(size=(B, G, V)), 0).astype(np.float32)
TEACHER = RANDOM.normal(size=(B, G - 1)).astype(np.float32)
SCORES = RANDOM.normal(size=(B, G - 1)).astype(np.float32)
CONTRAST = ContrastConfig("splade", query_flops=0.03, document_flops=0.02, flops_warmup=0.5)


def given_vectors():
    import torch

    class Given(torch.nn.Module):
        def forward(self, features):
            return dict(features)

    return Given()


def assert_equal(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5 * np.abs(theirs[1]).max())


@pytest.mark.parametrize("comparison", ["ranking", "margin_mse", "kl"])
def test_loss_of_sparse_vectors_with_flops(comparison):
    import torch
    from sentence_transformers.sparse_encoder import losses

    objective = EmbeddingObjective(MODEL, CONTRAST.of_model(), comparison, G, CONTRAST)
    rows = jax.tree.map(jnp.asarray, {
        "segment_ids": np.ones((B, G, 3), np.int32), "weights": np.ones(B, np.float32),
        "row_index": np.arange(B, dtype=np.uint32),
        "text_ids": np.arange(B * G, dtype=np.int32).reshape(B, G),
        **({} if comparison == "ranking" else {"labels": TEACHER}),
    })  # fmt: skip

    def loss(vectors):
        counts = objective.counts(rows) | objective.pace(jnp.float32(0.75))
        return objective.loss(objective.compare(vectors, rows, None), counts)

    given = given_vectors()
    inner = {
        "ranking": losses.SparseMultipleNegativesRankingLoss,
        "margin_mse": losses.SparseMarginMSELoss,
        "kl": partial(losses.SparseDistillKLDivLoss, temperature=1.0),
    }[comparison](given)
    theirs = losses.SpladeLoss(given, inner, 0.02, query_regularizer_weight=0.03)
    vectors = torch.tensor(VECTORS, requires_grad=True)
    columns = [{"sentence_embedding": vectors[:, n]} for n in range(G)]
    value = sum(theirs(columns, torch.tensor(TEACHER)).values())
    value.backward()
    ours = jax.jit(jax.value_and_grad(loss))(jnp.asarray(VECTORS))
    assert_equal(ours, (value.item(), vectors.grad.numpy()))


@pytest.mark.parametrize("step", [0, 3, 11, 19, 20, 39])
def test_flops_weights_rise_like_theirs(step):
    from types import SimpleNamespace

    from sentence_transformers.sparse_encoder import callbacks, losses

    given = given_vectors()
    inner = losses.SparseMultipleNegativesRankingLoss(given)
    theirs = losses.SpladeLoss(given, inner, 2.0, query_regularizer_weight=3.0)
    schedule = callbacks.SpladeRegularizerWeightSchedulerCallback(theirs, warmup_ratio=0.5)
    state = SimpleNamespace(max_steps=40, global_step=step)
    schedule.on_train_begin(None, state, None)
    schedule.on_step_begin(None, state, None)
    objective = EmbeddingObjective(MODEL, CONTRAST.of_model(), "ranking", G, CONTRAST)
    share = objective.pace(jnp.int32(step) / 40)["flops_share"]
    np.testing.assert_allclose(2 * share, theirs.document_regularizer_weight, rtol=1e-6)
    np.testing.assert_allclose(3 * share, theirs.query_regularizer_weight, rtol=1e-6)


def reranker(scores):
    """A cross-encoder that scores its pairs, (row, column), with given numbers."""
    import torch
    from sentence_transformers.cross_encoder import CrossEncoder

    class Given(CrossEncoder):
        num_labels, device = 1, torch.device("cpu")

        def __init__(self):
            torch.nn.Module.__init__(self)

        def preprocess(self, pairs, **_):
            return {"places": torch.tensor([[int(q), int(d)] for q, d in pairs])}

        def forward(self, features):
            return {"scores": scores[tuple(features["places"].T)][:, None]}

    return Given()


@pytest.mark.parametrize("kind", ["margin_mse", "list_net", "kl"])
def test_losses_of_lists(kind):
    import torch
    from sentence_transformers.cross_encoder import losses

    scores = torch.tensor(SCORES, requires_grad=True)
    teacher, model = torch.tensor(TEACHER), reranker(scores)
    queries = [f"{n}" for n in range(B)]
    if kind == "margin_mse":
        columns = [[f"{n}"] * B for n in range(G - 1)]
        value = losses.MarginMSELoss(model)([queries, *columns], list(teacher))
    elif kind == "list_net":
        documents = [[f"{n}" for n in range(G - 1)]] * B
        value = losses.ListNetLoss(model)([queries, documents], list(teacher))
    else:  # the bi-encoder's class, on products that are these scores
        from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss

        ones = {"sentence_embedding": torch.ones(B, 1)}
        columns = [{"sentence_embedding": scores[:, n : n + 1]} for n in range(G - 1)]
        value = DistillKLDivLoss(given_vectors())([ones, *columns], teacher)
    value.backward()
    present = jnp.ones((B, G - 1), bool)
    ours = jax.jit(jax.value_and_grad(
        lambda x: jnp.mean(list_losses(kind, x, jnp.asarray(TEACHER), present))
    ))(jnp.asarray(SCORES))  # fmt: skip
    assert_equal(ours, (value.item(), scores.grad.numpy()))


def test_a_shorter_list_by_their_listnet():
    """Documents that are not there are like documents that were never listed."""
    import torch
    from sentence_transformers.cross_encoder import losses

    scores = torch.tensor(SCORES, requires_grad=True)
    sizes = [1 + n % (G - 1) for n in range(B)]
    documents = [[f"{n}" for n in range(size)] for size in sizes]
    labels = [torch.tensor(row[:size]) for row, size in zip(TEACHER, sizes, strict=True)]
    value = losses.ListNetLoss(reranker(scores))([[f"{n}" for n in range(B)], documents], labels)
    value.backward()
    present = jnp.arange(G - 1) < jnp.array(sizes)[:, None]
    ours = jax.value_and_grad(
        lambda x: jnp.mean(list_losses("list_net", x, jnp.asarray(TEACHER), present))
    )(jnp.asarray(SCORES))
    assert_equal(ours, (value.item(), scores.grad.numpy()))
    for kind in ("margin_mse", "kl", "contrast"):
        run = jax.value_and_grad(
            lambda x, kind=kind: jnp.sum(list_losses(kind, x, jnp.asarray(TEACHER), present))
        )
        changed = jnp.where(present, SCORES, 77.0)
        for one, other in zip(run(jnp.asarray(SCORES)), run(changed), strict=True):
            np.testing.assert_array_equal(one, other)
