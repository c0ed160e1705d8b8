"""Fine-tuning heads: shapes, dropout, and logits equal to Hugging Face's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from applied_task import apply_task
from bert_names import from_huggingface, table_of, to_huggingface

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream
from bert_jax.model.heads import init_params, logical_axes
from bert_jax.model.task_heads import TaskHeadConfig, TaskModel, init_task_params

MODEL = ModelConfig(
    vocab_size=99, num_positions=24, hidden_dim=32, num_layers=2, num_heads=4, mlp_dim=64,
    dtype="float32", hidden_dropout_rate=0.0, attention_dropout_rate=0.0,
)  # fmt: skip
HEADS = {
    "classification": TaskHeadConfig("classification", 3),
    "tagging": TaskHeadConfig("tagging", 5),
    "span": TaskHeadConfig("span", dropout_rate=0.0),
}


def make_inputs(rows=4, length=12):
    random = np.random.default_rng(0)
    lengths = random.integers(4, length + 1, rows)
    return {
        "tokens": random.integers(5, 99, (rows, length)).astype(np.int32),
        "type_ids": (np.arange(length) > 5).astype(np.int32)[None].repeat(rows, 0),
        "segment_ids": (np.arange(length) < lengths[:, None]).astype(np.int32),
    }


apply = jax.jit(apply_task, static_argnums=(0, 1))


def logits_of(kind, params, inputs, **options):
    arrays = [inputs[name] for name in ("tokens", "type_ids", "segment_ids")]
    return np.asarray(apply(MODEL, HEADS[kind], params, *arrays, **options))


@pytest.mark.parametrize("kind", HEADS)
def test_shapes_axes_and_an_encoder_that_is_kept(kind):
    head, key = HEADS[kind], jax.random.key(1)
    params = init_task_params(MODEL, head, key)
    axes = logical_axes(MODEL, TaskModel, head)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = axes
        for entry in path:
            names = names[entry.key]
        assert len(names) == leaf.ndim, path
    pretrained = init_params(MODEL, jax.random.key(2))
    kept = init_task_params(MODEL, head, key, encoder=pretrained["encoder"])
    assert kept["encoder"]["layers"] is pretrained["encoder"]["layers"]
    del pretrained["encoder"]["pooler"]
    completed = init_task_params(MODEL, head, key, encoder=pretrained["encoder"])["encoder"]
    np.testing.assert_array_equal(
        completed["pooler"]["dense"]["kernel"], params["encoder"]["pooler"]["dense"]["kernel"]
    )
    np.testing.assert_array_equal(kept["head"]["kernel"], params["head"]["kernel"])
    logits = logits_of(kind, params, make_inputs())
    assert logits.shape == ((4, 3) if kind == "classification" else (4, 12, head.num_labels))
    assert logits.dtype == jnp.float32


def test_dropout_is_the_heads_own_and_named_by_rows():
    params, inputs = init_task_params(MODEL, HEADS["classification"], jax.random.key(1)), {}
    inputs = make_inputs()
    rows = np.arange(4, dtype=np.uint32)

    def run(seed, rows):
        stream = DropoutStream(np.uint32(seed), rows)
        return logits_of("classification", params, inputs, stream=stream)

    assert (run(1, rows) != logits_of("classification", params, inputs)).any()
    assert (run(1, rows) != run(2, rows)).any()
    np.testing.assert_array_equal(run(1, rows), run(1, rows))
    assert (run(1, rows)[0] != run(1, rows + np.uint32(1))[0]).any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "tagging", "num_labels": 0}, "num_labels is 0; it must be at least 1"),
        ({"kind": "span", "num_labels": 3}, "num_labels is 3, but a span head has 2"),
        ({"kind": "tagging", "dropout_rate": 1.0}, "dropout_rate is 1.0"),
    ],
)
def test_heads_that_cannot_be(fields, message):
    with pytest.raises(UserError, match=message):
        TaskHeadConfig(**fields)


@pytest.mark.parity
@pytest.mark.parametrize("kind", HEADS)
def test_logits_equal_transformers(kind):
    import torch
    import transformers

    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=24, num_labels=HEADS[kind].num_labels,
        layer_norm_eps=1e-12, attn_implementation="eager",
    )  # fmt: skip
    names = {
        "classification": "BertForSequenceClassification",
        "tagging": "BertForTokenClassification",
        "span": "BertForQuestionAnswering",
    }
    torch.manual_seed(0)
    theirs = getattr(transformers, names[kind])(config).eval()
    state = {name: value.detach().numpy() for name, value in theirs.state_dict().items()}
    params = from_huggingface(state, MODEL, HEADS[kind])
    complete = init_task_params(MODEL, HEADS[kind], jax.random.key(0), encoder=params["encoder"])
    params = jax.tree.map(jnp.asarray, {**params, "encoder": complete["encoder"]})
    inputs = make_inputs()
    with torch.no_grad():
        out = theirs(
            input_ids=torch.tensor(inputs["tokens"]).long(),
            token_type_ids=torch.tensor(inputs["type_ids"]).long(),
            attention_mask=torch.tensor(inputs["segment_ids"]).long(),
        )
    expected = (
        torch.stack([out.start_logits, out.end_logits], -1) if kind == "span" else out.logits
    ).numpy()
    ours = np.asarray(logits_of(kind, params, inputs))
    if kind != "classification":  # at padding the two differ
        real = inputs["segment_ids"] > 0
        ours, expected = ours[real], expected[real]
    np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=1e-5)
    table = table_of((), HEADS[kind], pooler=kind == "classification")
    back = to_huggingface(params, MODEL, table)
    other = getattr(transformers, names[kind])(config)
    other.load_state_dict({name: torch.tensor(array) for name, array in back.items()})
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name


@pytest.mark.parametrize("pooling", ["cls", "mean", "late"])
@pytest.mark.parametrize("head_transform", [True, False])
def test_a_head_without_a_pooler_reads_no_padding(pooling, head_transform):
    model = dataclasses.replace(
        MODEL, pooler=False, head_transform=head_transform, norm_order="pre", positions="rope"
    )
    head = TaskHeadConfig("classification", 3, 0.0, pooling)
    params = init_task_params(model, head, jax.random.key(1))
    assert "pooler" not in params["encoder"]
    assert ("norm" in params["transform"]) == head_transform
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 5, model.vocab_size)
    segment_ids = (jnp.arange(9) < jnp.array([[9], [6]])).astype(jnp.int32)
    logits = apply_task(model, head, params, tokens, tokens * 0, segment_ids)
    alone = apply_task(model, head, params, tokens[1:, :6], tokens[1:, :6] * 0, segment_ids[1:, :6])
    np.testing.assert_allclose(logits[1:], alone, atol=2e-6)
    changed = tokens.at[0, 8].set(tokens[0, 8] % 5 + 5)
    params["encoder"]["layers"]["attention"]["value"]["kernel"] *= 0  # tokens see themselves alone
    pair = [apply_task(model, head, params, t, t * 0, segment_ids) for t in (tokens, changed)]
    assert bool(jnp.array_equal(*pair)) == (pooling == "cls")


def test_heads_for_tokens_have_the_map_of_the_masked_lm_head():
    model = dataclasses.replace(MODEL, pooler=False)
    for head_transform in (True, False):
        model = dataclasses.replace(model, head_transform=head_transform)
        params = init_task_params(model, HEADS["tagging"], jax.random.key(1))
        assert ("transform" in params) == head_transform
