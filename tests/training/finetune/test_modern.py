"""Fine-tuning of encoders without a pooler: how it begins, what it reads, how long rows may be."""

import dataclasses
import json
import logging
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from modern_files import write_modern
from small_finetuning import write_table
from small_saved import FAMILIES, OUTPUTS, small_saved

from bert_jax.artefacts.exchange.exported_files import class_of, write_huggingface
from bert_jax.artefacts.formats.model_config import (
    kind_of,
    unlike_head,
    with_own_pooler,
)
from bert_jax.artefacts.saved.model import Origin
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.config.command_line import load_config
from bert_jax.distributed.parallel.sharding import MeshConfig, make_trial_mesh
from bert_jax.errors import UserError
from bert_jax.infer.loaded import LoadedModel
from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig, init_task_params
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.config import TableConfig, TaggingConfig
from bert_jax.tasks.rows import Rows, TrainBatches
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.finetune.config import FinetuneConfig, FinetuneTrainingConfig
from bert_jax.training.finetune.setup import set_up
from bert_jax.training.finetune.train import finetune
from bert_jax.training.finetune.voice import summary
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig
from bert_jax.training.steps.step import make_train_step
from bert_jax.training.steps.trials import init_trials, place_rows, place_settings


def write_model(directory, family, kind="mlm", tokenizer=None, **changes):
    """A random model of a family in Hugging Face's format; return the model."""
    if tokenizer is not None:
        changes["vocab_size"] = tokenizer.vocab_size
    saved = small_saved(kind, **{**FAMILIES[family], **changes})
    if tokenizer is not None:
        saved = dataclasses.replace(saved, tokenizer=tokenizer)
    directory.mkdir()
    write_huggingface(saved, directory)
    return saved


def config_for(init, directory, kind="table", **fields):
    """A table of cats and dogs, or sentences with tags."""
    if kind == "table":
        train, dev = (write_table(directory / f"{n}.csv", 8, 0) for n in ("train", "dev"))
        cls = TableConfig
    else:
        path = directory / "words.txt"
        path.write_text("The O\nOdyssey B-X\n  ferry's O\n\nKöln B-X\n42 O\n\n")
        cls, train, dev = TaggingConfig, f"{path}", f"{path}"
    task = cls(max_length=fields.pop("max_length", 16), train=train, dev=dev)
    return FinetuneConfig(init=f"{init}", task=task, **fields)


def test_a_head_begins_with_the_map_of_the_masked_lm_head(tmp_path):
    saved = write_model(tmp_path / "m", "modernbert")
    shared = {part: saved.params["mlm"][part] for part in ("dense", "norm")}
    for kind in ("table", "tagging"):
        setup = set_up(config_for(tmp_path / "m", tmp_path, kind))
        (start,) = setup.start.parts
        assert start.keys() == {"encoder", "transform"}
        jax.tree.map(np.testing.assert_array_equal, start["transform"], shared)
    mesh = make_trial_mesh(MeshConfig(), 1, jax.devices()[:1])
    state = init_trials(setup.step, mesh, np.zeros(1), setup.start.parts, np.zeros(1))
    first = jax.tree.map(lambda leaf: np.asarray(leaf)[0], state.params)
    jax.tree.map(np.testing.assert_array_equal, first["transform"], shared)
    jax.tree.map(np.testing.assert_array_equal, first["encoder"], start["encoder"])
    random = set_up(config_for(tmp_path / "m", tmp_path, reinitialise=True))
    assert random.start.parts == ({},)


def test_a_head_begins_with_the_map_of_another_head(tmp_path):
    saved = write_model(tmp_path / "m", "modernbert", "classification")
    (start,) = set_up(config_for(tmp_path / "m", tmp_path, "tagging")).start.parts
    jax.tree.map(np.testing.assert_array_equal, start["transform"], saved.params["transform"])
    write_model(tmp_path / "e", "eurobert")  # whose masked-LM head has no map
    assert set_up(config_for(tmp_path / "e", tmp_path)).start.parts[0].keys() == {"encoder"}
    saved = write_model(tmp_path / "n", "nomic_bert", "classification")
    encoder = set_up(config_for(tmp_path / "n", tmp_path)).start.parts[0]["encoder"]
    pooler = saved.params["encoder"]["pooler"]
    jax.tree.map(np.testing.assert_array_equal, encoder["pooler"], pooler)


def test_what_a_classification_reads(tmp_path):
    init = tmp_path / "m"
    write_model(init, "modernbert")
    found = json.loads((init / "config.json").read_text())
    assert found["classifier_pooling"] == "mean"  # what a run here begins with

    def head(**fields):
        return set_up(config_for(init, tmp_path, **fields)).objective.config

    assert head().pooling == "mean"
    assert head(pooling="cls").pooling == "cls"
    assert head(kind="tagging").pooling == "cls"  # unread
    with pytest.raises(UserError, match="pooling is 'mean', but this task predicts from each"):
        head(kind="tagging", pooling="mean")
    (init / "config.json").write_text(json.dumps({**found, "classifier_pooling": "cls"}))
    assert head().pooling == "cls"
    assert read_model(init).pooling == "cls"
    write_model(tmp_path / "n", "nomic_bert")
    with pytest.raises(UserError, match=r"has a pooler, which .* leave pooling at 'auto'"):
        set_up(config_for(tmp_path / "n", tmp_path, pooling="mean"))


def test_the_start_says_what_the_head_is(tmp_path):
    write_model(tmp_path / "m", "modernbert")
    write_model(tmp_path / "e", "eurobert")
    said = []
    for name, fields in (("m", {}), ("m", {"kind": "tagging"}), ("e", {"pooling": "late"})):
        config = config_for(tmp_path / name, tmp_path, **fields)
        mesh = make_trial_mesh(MeshConfig(), 1, jax.devices()[:1])
        lines = summary(config, set_up(config), mesh, 0.5)
        said += [line.removeprefix("head     ") for line in lines if line.startswith("head")]
    assert said == [
        "from the mean of the tokens' states; its transform begins with pretrained weights",
        "its transform begins with pretrained weights",
        "from the mean of the tokens' logits; its transform begins at random",
    ]


def test_rows_of_rotations_may_be_longer_than_those_of_pretraining(tmp_path, caplog):
    write_model(tmp_path / "m", "modernbert")
    with caplog.at_level(logging.WARNING):
        setup = set_up(config_for(tmp_path / "m", tmp_path, max_length=40))
    assert "max_length is 40, but " in caplog.text
    assert "was trained on rows of at most 24 tokens" in caplog.text
    assert setup.objective.model.num_positions == 40
    assert set_up(config_for(tmp_path / "m", tmp_path)).objective.model.num_positions == 24


def test_a_run_is_saved_asked_and_written_as_it_was_trained(tmp_path):
    """Rows of 40 tokens, from a model of 24."""
    write_model(tmp_path / "m", "modernbert", num_layers=1, attention_pattern="L")
    config = config_for(tmp_path / "m", tmp_path, max_length=40)
    config = dataclasses.replace(
        config, training=FinetuneTrainingConfig(num_epochs=1.0, batch_size=8, max_buckets=1)
    )
    lines = []
    assert finetune(config, tmp_path / "work", echo=lines.append).finished
    assert any(line.startswith("head     from the mean") for line in lines)
    saved = read_model(tmp_path / "work")
    assert saved.params.keys() == {"encoder", "transform", "head"}
    assert saved.config.num_positions == saved.max_length == 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a text that is cut
        (answer,) = LoadedModel(saved).classify("cat " * 38)
    assert set(answer["probabilities"]) == {"cat", "dog"}
    (tmp_path / "out").mkdir()
    write_huggingface(saved, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (found["classifier_pooling"], found["max_position_embeddings"]) == ("mean", 40)
    again = read_model(tmp_path / "out")
    jax.tree.map(
        np.testing.assert_array_equal, again.params["transform"], saved.params["transform"]
    )


def test_attention_without_dropout_stays_without(tmp_path):
    write_model(tmp_path / "m", "modernbert", attention_dropout_rate=0.0, hidden_dropout_rate=0.0)
    model = set_up(config_for(tmp_path / "m", tmp_path)).objective.model
    assert (model.attention_dropout_rate, model.hidden_dropout_rate) == (0.0, 0.1)


def test_members_of_a_sweep_with_bands_equal_the_runs_alone():
    """Rows are long enough for bands of keys in local layers."""
    fields = {**FAMILIES["modernbert"], "num_layers": 1, "attention_pattern": "L"}
    model = ModelConfig(
        vocab_size=50, num_positions=64, hidden_dim=16, num_heads=2, mlp_dim=32,
        attention_dropout_rate=0.0, **fields,
    )  # fmt: skip
    head = TaskHeadConfig("classification", 3, pooling="mean")
    config = StepConfig(
        TaskObjective(model, head, "single_label"), OptimizerConfig(learning_rate=1.0), num_steps=2
    )
    random = np.random.default_rng(0)
    tokens = [random.integers(5, 50, 60).astype(np.int32) for _ in range(8)]
    rows = Rows(tokens, np.full(8, 60, np.int32), np.arange(8, dtype=np.int32) % 3)
    batches = TrainBatches(rows, (64,), 4, 0)

    def losses(seeds, rates):
        mesh = make_trial_mesh(MeshConfig(), len(seeds), jax.devices()[:1])
        state = init_trials(config, mesh, np.array(seeds), [{}], np.zeros(len(seeds))).train
        step, settings = make_train_step(config, mesh), place_settings(rates, seeds, mesh)
        found = []
        for batch in batches.epoch(0, seeds):
            state, metrics = step(state, place_rows(batch, mesh), settings)
            found.append(np.asarray(metrics["loss"]))
        return np.stack(found)

    together = losses([3, 4], [1e-2, 3e-3])
    np.testing.assert_allclose(together[:, 1:], losses([4], [3e-3]), atol=2e-6)
    assert np.ptp(together) > 1e-3


@pytest.mark.parity
def test_starts_and_rows_are_those_of_transformers(tmp_path):
    """Weights of a classifier made of a masked LM, and ids of given words."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(write_modern(tmp_path / "tokenizer", "modernbert"))
    init = tmp_path / "m"
    write_model(init, "modernbert", tokenizer=tokenizer)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(init)
    assert theirs.config.classifier_pooling == "mean"
    setup = set_up(config_for(init, tmp_path, "tagging", max_length=24))
    start = setup.start.parts[0]["transform"]
    dense, norm = theirs.head.dense.weight, theirs.head.norm.weight
    np.testing.assert_array_equal(dense.detach().numpy().T, start["dense"]["kernel"])
    np.testing.assert_array_equal(norm.detach().numpy(), start["norm"]["scale"])
    # The class that AutoTokenizer takes passes over the option.
    peer = transformers.GPTNeoXTokenizer.from_pretrained(init, add_prefix_space=True)
    words = (["The", "Odyssey", "ferry's"], ["Köln", "42"])
    for row, labels, given in zip(
        setup.train.rows.tokens, setup.train.rows.labels, words, strict=True
    ):
        found = peer(given, is_split_into_words=True, add_special_tokens=False)
        assert row[1:-1].tolist() == found["input_ids"]
        owners = [-1, *found.word_ids(), -1]
        begins = [n for n in range(1, len(owners) - 1) if owners[n] != owners[n - 1]]
        assert np.flatnonzero(np.asarray(labels) >= 0).tolist() == begins


@pytest.mark.parametrize("pooler", [True, False])
def test_a_modern_encoder_with_a_pooler_begins_with_the_head_of_its_family(tmp_path, pooler):
    """The demo's model, which learns pairs, and a BERT that was trained without a pooler."""
    fields = {**FAMILIES["modernbert"], "pooler": True} if pooler else {"pooler": False}
    made = dataclasses.replace(small_saved("pretraining", **fields), origin=Origin("pretrain"))
    classes = {"table": "ForSequenceClassification", "tagging": "ForTokenClassification"}
    for kind, name in classes.items():
        setup = set_up(config_for("run", tmp_path, kind), lambda *_, **__: made)
        assert setup.objective.model.pooler != pooler
        (start,) = setup.start.parts
        assert start.keys() == ({"encoder", "transform"} if pooler else {"encoder"})
        assert "pooler" not in start["encoder"]
        head = setup.objective.config
        params = init_task_params(
            setup.objective.model, head, jax.random.key(0), encoder=start["encoder"]
        )
        assert ("pooler" in params["encoder"]) != pooler
        outputs = dataclasses.replace(
            OUTPUTS["classification" if kind == "table" else "tagging"], head=head
        )
        tuned = dataclasses.replace(
            made, config=setup.objective.model, params=params, outputs=outputs
        )
        assert class_of(tuned) == f"{'ModernBert' if pooler else 'Bert'}{name}"


def test_classifiers_from_every_recipe_have_a_class():
    """But for NeoBERT, which has no classes with heads."""
    without = []
    for path in sorted(Path("configs/pretrain").glob("*.py")):
        config = with_own_pooler(load_config(PretrainConfig, f"{path}").model)
        head = TaskHeadConfig("classification", 2, pooling="mean")
        if config.pooler:
            assert kind_of(config) is not None, path
        elif unlike_head(kind_of(config), config, head):
            without.append(path.stem)
    assert without == ["neobert"]
