"""Station 4: three scores and two wirings of attention are what the package computes."""

import jax
import numpy as np
import pytest
from chapter import affine, formulas, gru
from packed_pairs import pack, random_pairs

from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.recurrent import RecurrentNetwork
from bert_jax.model.seq2seq.recurrent_layers import RecurrentConfig

VOCAB, WIDTH = 12, 6
MODEL = ModelConfig(
    vocab_size=VOCAB, hidden_dim=WIDTH, num_heads=1, num_layers=1, hidden_dropout_rate=0.0,
    dtype="float32", init_std=0.5,
)  # fmt: skip
formula = formulas("attention")


def score_of(name, params):
    """The function (h, s) -> scores with the weights of an `Alignment`."""
    if name == "dot":
        return formula.dot
    W = np.array(params["key"]["kernel"]).T
    if name == "multiplicative":
        return lambda h, s: formula.multiplicative(h, s, W)
    W2, b = np.array(params["query"]["kernel"]).T, np.array(params["query"]["bias"])
    return lambda h, s: formula.additive(h, s, np.array(params["vector"]), W, W2, b)


@pytest.mark.parametrize("wiring", ["before", "after"])
@pytest.mark.parametrize("score", ["dot", "multiplicative", "additive"])
def test_a_network_with_attention_computes_the_formulas(score, wiring):
    settings = RecurrentConfig(attention=score, wiring=wiring, bidirectional=False)
    network = RecurrentNetwork(MODEL, settings)
    params = jax.jit(network.init)(jax.random.key(0))
    ((words, given),) = random_pairs(1, VOCAB, seed=3)
    source, target = pack([[(words, given)]], len(words) + 4, len(given) + 3)
    logits = jax.jit(network.logits)(params, source, target)
    cross = jax.jit(network.weights)(params, source, target).cross
    encoder, decoder, h = params["encoder"], params["decoder"], [np.zeros(WIDTH)]
    table = np.array(encoder["embeddings"]["token"])
    for x in table[source.tokens[0][source.segment_ids[0] > 0]]:
        h.append(gru(encoder["layer1"])(x, h[-1]))
    y, h = table[target.tokens[0][target.segment_ids[0] > 0]], np.stack(h[1:])
    arguments = (
        y, h, np.tanh(affine(decoder["start"])(h[-1])),
        score_of(score, decoder.get("attention")), gru(decoder["layer1"]),
        lambda x: np.tanh(affine(decoder["readout"])(x)),
    )  # fmt: skip
    if wiring == "before":
        readouts, looked = formula.write_before(*arguments)
    else:
        readouts, looked = formula.write_after(*arguments, WIDTH)
    scores = readouts @ table[:VOCAB].T + np.array(params["output"]["bias"][:VOCAB])
    np.testing.assert_allclose(logits[0, : len(y), :VOCAB], scores, atol=1e-5)
    np.testing.assert_allclose(cross[0, 0, 0, : len(y), : len(h)], looked, atol=1e-5)
    assert np.ptp(looked) > 0.01  # more than a mean
