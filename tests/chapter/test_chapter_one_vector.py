"""Station 3: the formulas of two networks joined by one vector are what the package computes."""

import jax
import jax.numpy as jnp
import numpy as np
from chapter import affine, formulas, gru
from packed_pairs import SPECIAL, pack, random_pairs

from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.recurrent import RecurrentNetwork
from bert_jax.model.seq2seq.recurrent_layers import RecurrentConfig
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.translation import next_tokens

VOCAB, WIDTH = 12, 6
MODEL = ModelConfig(
    vocab_size=VOCAB, hidden_dim=WIDTH, num_heads=1, num_layers=1, hidden_dropout_rate=0.0,
    dtype="float32", init_std=0.5,
)  # fmt: skip
formula = formulas("one_vector")


def test_a_network_without_attention_computes_the_formulas():
    network = RecurrentNetwork(MODEL, RecurrentConfig(attention="none", bidirectional=False))
    params = jax.jit(network.init)(jax.random.key(0))
    source, target = pack([[pair] for pair in random_pairs(2, VOCAB)], 8, 7)
    logits = jax.jit(network.logits)(params, source, target)
    tokens, segments = (jnp.asarray(each, jnp.int32) for each in target)
    labels = next_tokens(tokens, segments, SPECIAL.sep)
    losses, _ = cross_entropy(logits, labels)
    encoder, decoder = params["encoder"], params["decoder"]
    table, start, read = encoder["embeddings"]["token"], decoder["start"], decoder["readout"]
    for row in range(2):
        words = table[source.tokens[row][source.segment_ids[row] > 0]]
        c = formula.read(np.array(words), np.zeros(WIDTH), gru(encoder["layer1"]))
        given = np.array(table[target.tokens[row][target.segment_ids[row] > 0]])
        scores = formula.write(
            given, c, lambda c: np.tanh(affine(start)(c)), gru(decoder["layer1"]),
            lambda x: np.tanh(affine(read)(x)), np.array(table[:VOCAB]),
        )  # fmt: skip
        scores = scores + np.array(params["output"]["bias"][:VOCAB])
        np.testing.assert_allclose(logits[row, : len(given), :VOCAB], scores, atol=1e-5)
        found = formula.surprise(scores, np.array(labels[row, : len(given)]))
        np.testing.assert_allclose(losses[row, : len(given)], found, atol=1e-5)
