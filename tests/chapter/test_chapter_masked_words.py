"""Station 8: corruption, losses and heads are what the package computes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chapter import formulas, normal
from packed_pairs import SPECIAL

from bert_jax.model.config import ModelConfig
from bert_jax.model.counter_hash import hash_u32
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.objectives import masking
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.masking import MaskingConfig, mask_tokens
from bert_jax.objectives.task import TaskObjective

VOCAB, LENGTH, WIDTH = 40, 20, 8
MODEL = ModelConfig(
    vocab_size=VOCAB, num_positions=LENGTH, hidden_dim=WIDTH, num_heads=2, num_layers=1, mlp_dim=8,
    hidden_dropout_rate=0.0, attention_dropout_rate=0.0, activation="gelu_tanh", init_std=0.5,
    dtype="float32",
)  # fmt: skip
SPECIALS = (SPECIAL.pad, SPECIAL.unk, SPECIAL.cls, SPECIAL.sep, SPECIAL.mask)
formula = formulas("masked_words")


def rows(count, length=LENGTH):
    """Rows without padding: [CLS] words [SEP] words [SEP]."""
    tokens = np.random.default_rng(0).integers(5, VOCAB, (count, length)).astype(np.int32)
    tokens[:, 0], tokens[:, 8], tokens[:, -1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
    types = np.broadcast_to(np.arange(length) > 8, tokens.shape).astype(np.int32)
    index = np.arange(count, dtype=np.uint32)
    return {
        "tokens": tokens, "type_ids": types, "segment_ids": np.ones_like(tokens),
        "row_index": index, "pair_labels": (index % 2).astype(np.int8),
    }  # fmt: skip


def test_the_package_hides_the_tokens_of_the_formula():
    """The formula gets the package's random numbers, as numbers from 0 to 1 and as words."""
    batch, seed = rows(300), 5
    found = mask_tokens(
        batch["tokens"], batch["segment_ids"], batch["row_index"], seed=seed,
        config=MaskingConfig(), vocab_size=VOCAB, special_ids=SPECIAL,
    )  # fmt: skip
    at = batch["row_index"][:, None], np.arange(LENGTH)
    chance, action, drawn = (
        hash_u32(seed, word, *at)
        for word in (masking._PRIORITY, masking._ACTION, masking._REPLACEMENT)
    )
    words = 5 + drawn % (VOCAB - 5)  # the special ids are 0 to 4
    kinds = np.zeros(3)
    for row, tokens in enumerate(batch["tokens"]):
        seen, places = formula.corrupt(
            tokens,
            (chance[row] >> 5).astype(float),
            action[row] / 2**32,
            words[row],
            SPECIAL.mask,
            SPECIALS,
        )
        np.testing.assert_array_equal(found.tokens[row], seen)
        used = np.asarray(found.weights[row]) > 0
        np.testing.assert_array_equal(np.asarray(found.positions[row])[used], places)
        same = seen[places] == tokens[places]
        masked = seen[places] == SPECIAL.mask
        kinds += [masked.sum(), (~masked & ~same).sum(), same.sum()]
    np.testing.assert_allclose(kinds / kinds.sum(), [0.8, 0.1, 0.1], atol=0.03)


@pytest.fixture(scope="module")
def states():
    """The objective, its parameters, a prepared batch and the states of the encoder."""
    objective = MaskedLM(MODEL, MaskingConfig(), SPECIAL)
    params = objective.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + 0.1 * normal(*leaf.shape), params)
    batch = jax.jit(objective.prepare)(rows(4), 0)
    return (
        objective,
        params,
        batch,
        *jax.jit(objective.at_places, static_argnums=(2, 3))(params, batch, None, None)[:1],
    )


def test_both_losses_of_the_package_are_the_formulas(states):
    objective, params, batch, hidden = states
    sums = jax.jit(lambda p, b: objective.forward(p, b, None, None).sums)(params, batch)
    head, table = params["mlm"], np.array(params["encoder"]["embeddings"]["token"][:VOCAB])
    dense, scale, shift = head["dense"], *(np.array(head["norm"][n]) for n in ("scale", "bias"))
    norm = partial(formulas("transformer").norm, scale=scale, shift=shift, eps=1e-12)
    masked = pairs = 0.0
    for row, h in enumerate(np.array(hidden)):
        used = np.array(batch["weights"][row]) > 0
        places, labels = (np.array(batch[name][row])[used] for name in ("positions", "labels"))
        scores = formula.word_scores(
            h[places], np.array(dense["kernel"]).T, np.array(dense["bias"]), norm, table,
            np.array(head["bias"][:VOCAB]),
        )  # fmt: skip
        masked += formula.surprise(scores, labels).sum()
        pairs += formula.surprise(row_scores(params, h, "nsp")[None], [row % 2])
    np.testing.assert_allclose(sums["mlm_loss"], masked, rtol=1e-5)
    np.testing.assert_allclose(sums["nsp_loss"], pairs[0], rtol=1e-5)
    total = objective.loss(sums, objective.counts(batch))
    np.testing.assert_allclose(
        total, masked / float(sums["mlm_count"]) + pairs[0] / len(hidden), rtol=1e-5
    )


def row_scores(params, h, head):
    pool = params["encoder"]["pooler"]["dense"]
    return formula.row_scores(
        h, (np.array(pool["kernel"]).T, np.array(pool["bias"])), *weights_of(params[head])
    )


def weights_of(head):
    return np.array(head["kernel"]).T, np.array(head["bias"])


@pytest.mark.parametrize(
    ("kind", "network", "num_labels"),
    [("single_label", "classification", 3), ("tags", "tagging", 3), ("span", "span", 2)],
)
def test_heads_and_their_losses_are_the_formulas(states, kind, network, num_labels):
    _, params, batch, hidden = states
    objective = TaskObjective(MODEL, TaskHeadConfig(network, num_labels, 0.0), kind)
    fresh = objective.init(jax.random.key(1))
    params = {"encoder": params["encoder"], "head": fresh["head"]}
    shape = {"single_label": (4,), "tags": (4, LENGTH), "span": (4, 2)}[kind]
    labels = np.random.default_rng(2).integers(0, num_labels, shape)
    given = {**batch, "labels": jnp.asarray(labels), "weights": jnp.ones(4)}
    found = jax.jit(lambda p, b: objective.forward(p, b, None, None))(params, given)
    losses = 0.0
    for h, label, output in zip(np.array(hidden), labels, found.outputs, strict=True):
        if kind == "single_label":
            scores = row_scores(params, h, "head")
            losses += formula.surprise(scores[None], label[None])[0]
        else:
            scores = formula.tag_scores(h, *weights_of(params["head"]))
            losses += (
                formula.surprise(scores, label).sum()
                if kind == "tags"
                else formula.span_loss(h, *weights_of(params["head"]), *label)
            )
        np.testing.assert_allclose(output, scores, atol=1e-5)
    np.testing.assert_allclose(found.sums["loss"], losses, rtol=1e-5)
