"""Station 7: the Transformer and the searches are what the package computes."""

import jax
import numpy as np
import pytest
from chapter import formulas, heads_of
from packed_pairs import pack, random_pairs
from toy_networks import TableNetwork, toy_config

from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.network import Side
from bert_jax.model.seq2seq.search import SearchConfig, search
from bert_jax.model.seq2seq.transformer import TransformerNetwork

VOCAB, WIDTH, LAYERS = 12, 8, 2
formula, attention = formulas("transformer"), formulas("self_attention")


def test_a_transformer_of_the_package_computes_the_formulas():
    model = ModelConfig(
        vocab_size=VOCAB, num_positions=16, num_types=0, hidden_dim=WIDTH, num_layers=LAYERS,
        num_heads=2, mlp_dim=10, hidden_dropout_rate=0.0, positions="sinusoidal",
        scale_embeddings=True, embedding_norm=False, norm_eps=1e-6, activation="relu", pooler=False,
        head_transform=False, init_std=0.5, dtype="float32",
    )  # fmt: skip
    network = TransformerNetwork(model)
    params = jax.tree.map(np.array, jax.jit(network.init)(jax.random.key(0)))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + random.normal(0, 0.1, leaf.shape), params)
    params = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
    ((words, given),) = random_pairs(1, VOCAB, seed=3)
    source, target = pack([[(words, given)]], len(words) + 2, len(given) + 1)
    table = params["encoder"]["embeddings"]["token"][:VOCAB]

    def embedded(side):
        vectors = table[side.tokens[0]] * np.sqrt(WIDTH)
        return vectors + attention.sinusoids(*vectors.shape)

    def layers(part, seen):
        return [layer(jax.tree.map(lambda leaf, n=n: leaf[n], params[part]["layers"]), seen)
                for n in range(LAYERS)]  # fmt: skip

    x, y = embedded(source), embedded(target)
    both = [attention.visible(np.ones(len(side)), causal) for side, causal in ((x, 0), (y, 1))]
    read = formula.encode(x, layers("encoder", both[0]))
    states = formula.decode(y, read, layers("decoder", both[1]))
    logits = jax.jit(network.logits)(params, source, target)[0, :, :VOCAB]
    scores = states @ table.T + params["output"]["bias"][:VOCAB]
    np.testing.assert_allclose(logits, scores, atol=1e-5 * np.abs(scores).max())


def layer(params, seen):
    """The functions of a layer with these parameters."""
    heads, mlp = heads_of(params["attention"]), params["mlp"]
    maps = [part[name].T for part in (mlp["up"], mlp["down"]) for name in ("kernel", "bias")]
    functions = {
        "look": lambda x: attention.self_attention(x, *heads, seen),
        "feed": lambda x: formula.feed_forward(x, *maps),
    }
    if "cross" in params:
        functions["read"] = lambda y, source: formula.read(y, source, *heads_of(params["cross"]))
    names = {"look": "attention", "feed": "mlp", "read": "cross"}
    for name in list(functions):
        norm = params[f"{names[name]}_norm"]
        functions[f"{name}_norm"] = lambda x, norm=norm: formula.norm(
            x, norm["scale"], norm["bias"]
        )
    return functions


@pytest.mark.parametrize("num_beams", [1, 2, 3, 40])
def test_searches_of_the_package_find_what_the_formulas_find(num_beams):
    models, vocab, most, begin, end = 25, 4, 4, 0, 1
    network = TableNetwork(toy_config(vocab))
    prefixes = sum(vocab**n for n in range(most))
    table = np.random.default_rng(0).normal(0, 1.5, (models, prefixes, vocab)).astype(np.float32)
    source = Side(np.arange(models)[:, None], np.ones((models, 1), np.int32))
    found = search(
        network, {"table": table}, source, np.full(models, most),
        settings=SearchConfig(num_beams=num_beams), max_length=most, begin=begin, end=end,
    )  # fmt: skip
    for model in range(models):

        def log_p(words, model=model):
            prefix = 0
            for word in words:
                prefix = prefix * vocab + word + 1
            scores = table[model, prefix].astype(float)
            scores = scores - np.log(np.exp(scores).sum())
            return np.where(np.arange(vocab) == begin, -np.inf, scores)

        if num_beams == 1:
            words, score = formula.greedy(log_p, end, most)
        else:
            words, score = formula.beam_search(log_p, end, most, num_beams)
        length = int(found.lengths[model, 0])
        assert tuple(np.asarray(found.tokens)[model, 0, :length].tolist()) == words
        np.testing.assert_allclose(found.scores[model, 0], score, atol=1e-5)
        if num_beams == 40:  # more than there are texts
            assert formula.exhaustive(log_p, end, most) == (words, pytest.approx(score))
