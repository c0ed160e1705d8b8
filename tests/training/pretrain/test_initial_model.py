"""Pretraining that starts from a model in place of random parameters."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small_run import (
    TOKENIZER,
    small_config,
    write_corpus,
)

from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.artefacts.saved.runs import pretrained_checkpoint
from bert_jax.config.mapping import build
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh
from bert_jax.errors import UserError
from bert_jax.model.heads import init_params
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.settings import step_config, with_architecture
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.start import initial_params
from bert_jax.training.steps.state import jitted_init

pytestmark = pytest.mark.usefixtures("reused_steps")

ONE_PHASE = [{"length": 32, "batch_size": 16}]
CONFIG = small_config(
    training__num_steps=2, training__phases=ONE_PHASE, training__eval_every_steps=0,
    training__log_every_steps=1, optimizer__warmup_steps=1,
)  # fmt: skip
STARTED = dataclasses.replace(
    CONFIG,
    init="elsewhere",
    model=dataclasses.replace(CONFIG.model, num_layers=5, hidden_dropout_rate=0.2),
    # A rate at which nothing moves: what is saved is what it started from.
    optimizer=dataclasses.replace(CONFIG.optimizer, learning_rate=1e-12, weight_decay=0.0),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))._replace(heldout=None)


@pytest.fixture(scope="module")
def initial(corpus) -> SavedModel:
    config = CONFIG.with_vocabulary(corpus.train.vocab_size).model
    params = jax.device_get(init_params(config, jax.random.key(99)))
    return SavedModel(
        config=config, params=params, outputs=None, tokenizer=TOKENIZER, tokenizer_files=Path(),
        max_length=config.num_positions, name="the model of a test", origin=Origin("pretrain"),
    )  # fmt: skip


def assert_close(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), found, expected)


def test_a_run_starts_from_the_model_and_does_not_need_it_again(initial, corpus, tmp_path):
    said: list[str] = []
    workdir = tmp_path / "work"
    workdir.mkdir()  # by a start that evaluated the model and was killed before it saved
    (workdir / "metrics.jsonl").write_text('{"step": 0, "eval/mlm_loss": 9.0}\n')
    train(STARTED, workdir, corpus=corpus, read=lambda _: initial, echo=said.append)
    assert "starts from the model of a test" in said
    loaded = pretrained_checkpoint(workdir)
    assert_close(loaded.state, initial.params)
    config = build(PretrainConfig, loaded.record.config, "here")
    # The architecture is that of the model, the dropout that of the configuration.
    assert config.model.num_layers == 2
    assert config.model.hidden_dropout_rate == 0.2
    assert config.init == "elsewhere"

    def gone(name: str) -> SavedModel:
        raise AssertionError("it is read again")

    said.clear()
    result = train(STARTED, workdir, corpus=corpus, read=gone, echo=said.append)
    assert (result.step, result.finished) == (2, True)
    assert "continues from step 2" in said
    assert [row["step"] for row in read_metrics(workdir / "metrics.jsonl")] == [1, 2]


def test_what_the_model_lacks_begins_at_random(initial, corpus, tmp_path):
    encoder = {name: tree for name, tree in initial.params["encoder"].items() if name != "pooler"}
    less = dataclasses.replace(initial, params={"encoder": encoder, "mlm": initial.params["mlm"]})
    said: list[str] = []
    train(STARTED, tmp_path, corpus=corpus, read=lambda _: less, echo=said.append)
    line = (
        "starts from the model of a test: 26 arrays copied (encoder/embeddings, encoder/layers, "
        "mlm); 4 arrays fresh (encoder/pooler, nsp)"
    )
    assert line in said
    params = pretrained_checkpoint(tmp_path).state
    pooler = params["encoder"].pop("pooler")
    assert_close(params["encoder"], encoder)
    config = with_architecture(STARTED, initial.config).with_vocabulary(corpus.train.vocab_size)
    fresh = init_params(config.model, jax.random.key(STARTED.seed))
    assert_close(pooler, fresh["encoder"]["pooler"])
    assert_close(params["nsp"], fresh["nsp"])


def test_another_tokenizer_is_refused_before_anything_is_written(initial, corpus, tmp_path):
    other = dataclasses.replace(initial, tokenizer=WordPieceTokenizer([*SPECIAL_TOKENS, "other"]))
    there = other.tokenizer.fingerprint[:12]
    with pytest.raises(UserError, match=rf"the tokenizer of the model of a test \({there}\)"):
        train(STARTED, tmp_path / "work", corpus=corpus, read=lambda _: other)
    assert not Path(tmp_path / "work").exists()


def test_lengths_of_rows_are_compared_with_the_positions_of_the_model(initial):
    """Before, they were compared with section `model`, which `init` replaces."""

    def started(length, positions, init_positions):
        config = small_config(
            init="work/old", model__num_positions=positions,
            training__phases=[{"length": length, "batch_size": 16}],
        )  # fmt: skip
        old = dataclasses.replace(initial.config, num_positions=init_positions)
        return with_architecture(config, old)

    assert started(128, positions=64, init_positions=256).model.num_positions == 256
    with pytest.raises(UserError) as refused:
        started(128, positions=256, init_positions=64)
    assert str(refused.value).startswith(
        "training.phases[0].length 128 exceeds num_positions of the model work/old: 64. "
        "Lower training.phases[0].length or start from a model with more"
    )


@pytest.mark.parametrize(("field", "value"), [("pooler", False), ("num_types", 1)])
def test_what_pairs_need_is_asked_of_the_model_of_init(initial, field, value):
    """Section `model`, which `init` replaces, was asked, and was to be set."""
    config = small_config(init="work/old", **{f"model__{field}": value})
    assert getattr(with_architecture(config, initial.config).model, field) != value
    old = dataclasses.replace(initial.config, **{field: value})
    with pytest.raises(UserError, match=r"needs a pooler|have two segment types") as refused:
        with_architecture(small_config(init="work/old"), old)
    assert str(refused.value).startswith(f"the model of init, work/old, has {field} ")
    assert str(refused.value).endswith("; set data.pairing to 'none'")
    assert with_architecture(small_config(init="work/old", data__pairing="none"), old)


@pytest.mark.parametrize("extra", [0, 200])
def test_on_any_mesh_with_any_padding_of_the_vocabulary(initial, corpus, extra):
    """200 rows more than the tokenizer has tokens: the table is padded otherwise."""
    config = CONFIG.with_vocabulary(corpus.train.vocab_size)
    mesh = make_mesh(build(MeshConfig, {"data": 2, "fsdp": 2, "tensor": 2}))
    settings = step_config(config, corpus)
    fresh = jitted_init(settings, mesh)(jax.random.key(0)).params
    padded = jax.tree.map(np.copy, initial.params)
    for tree, name in ((padded["encoder"]["embeddings"], "token"), (padded["mlm"], "bias")):
        rows = np.full((extra, *tree[name].shape[1:]), 7.0, np.float32)
        tree[name] = np.concatenate([tree[name], rows])
    found = initial_params(
        dataclasses.replace(initial, params=padded), fresh, settings.objective.axes()
    )
    assert_close(jax.device_get(found), initial.params)
    jax.tree.map(lambda a, b: assert_same_layout(a, b), found, fresh)


def test_a_parameter_of_another_shape_is_named_with_both_shapes(initial, corpus):
    """On a mesh, slices of a longer array would fit, and be wrong."""
    settings = step_config(CONFIG.with_vocabulary(corpus.train.vocab_size), corpus)
    fresh = jitted_init(settings, make_mesh(build(MeshConfig, {"fsdp": 2})))(jax.random.key(0))
    params = jax.tree.map(np.copy, initial.params)
    longer = np.zeros((2 * len(params["mlm"]["norm"]["scale"])), np.float32)
    params["mlm"]["norm"]["scale"] = longer
    said = rf"mlm/norm/scale has the shape \({len(longer)},\); expected \({len(longer) // 2},\)"
    with pytest.raises(UserError, match=said):
        initial_params(
            dataclasses.replace(initial, params=params), fresh.params, settings.objective.axes()
        )


def assert_same_layout(found: jax.Array, fresh: jax.Array) -> None:
    assert found.sharding == fresh.sharding
    assert found.dtype == fresh.dtype
