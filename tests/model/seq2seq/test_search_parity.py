"""The search against Transformers' `generate`, over one network with random weights."""

import jax
import numpy as np
import pytest
from toy_networks import MemoryNetwork, toy_config

from bert_jax.model.seq2seq.network import Side
from bert_jax.model.seq2seq.search import SearchConfig, search

pytestmark = pytest.mark.parity
BEGIN, END, PAD, VOCAB, LIMIT, ROWS = 0, 1, 2, 11, 9, 40


@pytest.fixture(scope="module")
def theirs():
    """The network as a class of theirs: without a cache, the source's mean as `source`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    class Toy(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class = transformers.PretrainedConfig

        def __init__(self, config, params):
            super().__init__(config)
            self.weights = {name: torch.tensor(np.asarray(a)) for name, a in params.items()}
            self.anchor = torch.nn.Parameter(torch.zeros(1))  # `generate` asks for the device

        def forward(self, input_ids, source=None, **_):
            state, logits = source, []
            for place in range(input_ids.shape[1]):
                mixed = self.weights["read"][input_ids[:, place]] + state @ self.weights["keep"] / 2
                state = torch.tanh(mixed + source)
                logits.append(state @ self.weights["write"])
            return transformers.modeling_outputs.CausalLMOutput(logits=torch.stack(logits, 1))

        def prepare_inputs_for_generation(self, input_ids, source=None, **_):
            return {"input_ids": input_ids, "source": source}

    return torch, transformers, Toy


@pytest.mark.parametrize(
    ("beams", "alpha"), [(1, 1.0), (2, 1.0), (5, 1.0), (5, 0.6), (5, 0.0), (6, 2.0)]
)
def test_ids_and_scores_are_those_of_generate(theirs, beams, alpha):
    torch, transformers, toy = theirs
    network = MemoryNetwork(toy_config(VOCAB))
    params = network.init(jax.random.key(3))
    tokens = np.random.default_rng(0).integers(2, VOCAB, (ROWS, 4)).astype(np.int32)
    settings = SearchConfig(num_beams=beams, length_alpha=alpha)
    found = search(
        network, params, Side(tokens, np.ones_like(tokens)), np.full(ROWS, LIMIT),
        settings=settings, max_length=LIMIT, begin=BEGIN, end=END,
    )  # fmt: skip
    config = transformers.PretrainedConfig(
        vocab_size=VOCAB, bos_token_id=BEGIN, eos_token_id=END, pad_token_id=PAD,
        num_hidden_layers=1, hidden_size=8, num_attention_heads=1,
    )  # fmt: skip
    model = toy(config, params).eval()
    mean = torch.tensor(np.asarray(params["read"])[tokens].mean(1))
    many = {} if beams == 1 else {"length_penalty": alpha, "early_stopping": "never"}
    answer = model.generate(
        torch.full((ROWS, 1), BEGIN), source=mean, num_beams=beams, num_return_sequences=beams,
        max_new_tokens=LIMIT, do_sample=False, use_cache=False, return_dict_in_generate=True,
        output_scores=True, bad_words_ids=[[BEGIN]], **many,
    )  # fmt: skip
    ids = answer.sequences[:, 1:].numpy().reshape(ROWS, beams, -1)
    ends = np.asarray(found.ended)
    assert ends.any()
    assert not ends.all()
    for row in range(ROWS):
        for beam in range(beams):
            length = int(found.lengths[row, beam])
            ours = np.asarray(found.tokens[row, beam, :length])
            np.testing.assert_array_equal(ours, ids[row, beam, :length])
            assert (ids[row, beam, length:] == PAD).all()
    if beams > 1:
        scores = answer.sequences_scores.numpy().reshape(ROWS, beams)
        np.testing.assert_allclose(found.scores, scores, atol=1e-5)
