"""Copying and reversing, learned from scratch: each place must find its source place."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from packed_pairs import SPECIAL, pack

from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.network import Network
from bert_jax.model.seq2seq.recurrent import RecurrentNetwork
from bert_jax.model.seq2seq.recurrent_layers import RecurrentConfig
from bert_jax.model.seq2seq.transformer import TransformerNetwork
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.translation import next_tokens

VOCAB_SIZE, LONGEST = 16, 8
NUM_ROWS, NUM_STEPS = 64, 600
MODEL = ModelConfig(
    vocab_size=VOCAB_SIZE, num_positions=16, num_types=0, hidden_dim=32, num_layers=1, num_heads=2,
    mlp_dim=64, hidden_dropout_rate=0.0, attention_dropout_rate=0.0, norm_order="pre",
    embedding_norm=False, positions="rope", pooler=False, init_std=0.1,
)  # fmt: skip


@lru_cache
def compiled(network: Network):
    """A step of Adam, and which rows are exact; one program for all tasks."""
    adam = optax.adam(optax.cosine_decay_schedule(5e-3, NUM_STEPS))

    def sums(params, source, target):
        labels = next_tokens(jnp.asarray(target.tokens), target.segment_ids, SPECIAL.sep)
        loss, right = cross_entropy(network.logits(params, source, target), labels)
        real = target.segment_ids > 0
        return jnp.sum(loss * real) / jnp.sum(real), jnp.all((right > 0) | ~real, axis=1)

    @jax.jit
    def step(params, state, source, target):
        grads, exact = jax.grad(sums, has_aux=True)(params, source, target)
        changes, state = adam.update(grads, state)
        return optax.apply_updates(params, changes), state, exact

    return jax.jit(network.init), jax.jit(adam.init), step


def rows(random: np.random.Generator, task):
    """Rows of one pair each, of 1 to LONGEST random tokens."""
    texts = [
        random.integers(5, VOCAB_SIZE, random.integers(1, LONGEST + 1)).tolist()
        for _ in range(NUM_ROWS)
    ]
    return pack([[(text, task(text))] for text in texts], LONGEST + 2, LONGEST + 1)


def share_of_exact_rows(network: Network, task, num_steps: int = NUM_STEPS) -> float:
    """Share of unseen rows that greedy search translates without a mistake, after training.

    Where the most probable token is right at every place behind right tokens, greedy search finds
    the target.
    """
    init, init_optimizer, step = compiled(network)
    params = init(jax.random.key(0))
    state, random = init_optimizer(params), np.random.default_rng(0)
    for _ in range(num_steps):
        params, state, _ = step(params, state, *rows(random, task))
    unseen = np.random.default_rng(1)
    exact = [step(params, state, *rows(unseen, task))[2] for _ in range(4)]
    return float(np.mean(exact))


def copied(text: list[int]) -> list[int]:
    return text


def reversed_(text: list[int]) -> list[int]:
    return text[::-1]


def test_a_transformer_learns_to_reverse():
    network = TransformerNetwork(MODEL)
    assert share_of_exact_rows(network, reversed_, num_steps=0) < 0.1
    assert share_of_exact_rows(network, reversed_) >= 0.98


@pytest.mark.slow
def test_a_transformer_learns_to_copy():
    assert share_of_exact_rows(TransformerNetwork(MODEL), copied) >= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("task", [copied, reversed_])
def test_recurrent_networks_learn_to_copy_and_to_reverse_by_attention(task):
    share = {
        attention: share_of_exact_rows(
            RecurrentNetwork(MODEL, RecurrentConfig(attention=attention)), task
        )
        for attention in ("dot", "multiplicative", "additive", "none")
    }
    bottleneck = share.pop("none")  # 32 numbers for a whole source
    assert min(share.values()) >= 0.98
    assert bottleneck < 0.7
