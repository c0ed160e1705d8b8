"""What fine-tuning starts from: each kind of directory, and what is wrong with one that is not."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from bert_names import table_of, to_huggingface
from huggingface_directory import (
    MODEL,
    TOKENIZER,
    pretraining_params,
    random_tree,
    write_huggingface,
    write_safetensors,
)
from small_saved import small_saved

from bert_jax.artefacts.formats.huggingface_files import (
    TaskOutputs,
    head_class,
    head_to_huggingface,
)
from bert_jax.artefacts.saved.reading import read_finetuned, read_model
from bert_jax.artefacts.saved.runs import FinetunedState, read_reports
from bert_jax.config.mapping import to_dict
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig, init_task_params
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.config import TableConfig
from bert_jax.tasks.long_texts import LongTexts
from bert_jax.tasks.opening import restore_task
from bert_jax.tokenization.wordpiece import WordPieceTokenizer
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.saves import prepare_finetune_workdir, saved_content
from bert_jax.training.finetune.setup import set_up
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.sections import PretrainModelConfig
from bert_jax.training.sweep.statistics import Outcome, Trial

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class State(NamedTuple):
    params: Any


def refused(directory):
    with pytest.raises(UserError) as caught:
        read_model(directory)
    return str(caught.value)


def assert_encoder(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture
def directory(tmp_path):
    write_huggingface(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def weights(directory):
    """Of `directory`, in whose place a test writes them as it needs them."""
    weights = write_huggingface(directory)
    (directory / SINGLE).unlink()
    return weights


def write_shards(directory, weights, **index_changes):
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        write_safetensors(directory / file, {name: weights[name] for name in part})
    where = {name: file for file, part in parts.items() for name in part}
    (directory / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": where | index_changes})
    )


def test_a_directory_of_hugging_face(directory, caplog):
    found = read_model(str(directory))
    assert_encoder(found.params["encoder"], pretraining_params()["encoder"])
    assert found.config == ModelConfig(**{**vars(MODEL), "dtype": "auto"})
    assert found.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert found.tokenizer_files == directory
    assert found.name == f"{directory}, BertForPreTraining"
    assert found.has_pooler
    assert not caplog.records


@pytest.mark.parametrize("label", ["good", "0.5"])
def test_a_task_that_reads_the_pooler_says_that_there_is_none(directory, weights, caplog, label):
    weights = {n: a for n, a in weights.items() if "pooler" not in n}
    write_safetensors(directory / SINGLE, weights)
    found = read_model(directory)
    assert not found.has_pooler
    assert "pooler" not in found.params["encoder"]
    tables = {}
    for name in ("train", "dev"):
        tables[name] = str(directory / f"{name}.csv")
        Path(tables[name]).write_text(f"text,label\na,{label}\nb,1.5\nc,2\n")
    task = TableConfig(max_length=16, **tables)
    with caplog.at_level(logging.WARNING):
        set_up(FinetuneConfig(init=str(directory), task=task))
    (record,) = caplog.records
    assert f"{directory}, BertForPreTraining has no pooler" in record.getMessage()


def test_a_model_made_without_a_pooler_gets_one():
    """As the class of its export needs it; a configuration says that it has none."""
    saved = small_saved("mlm", pooler=False)
    assert not saved.has_pooler
    pooler = saved.complete_params()["encoder"]["pooler"]["dense"]
    shapes = {name: leaf.shape for name, leaf in pooler.items()}
    assert shapes == {"kernel": (16, 16), "bias": (16,)}


def test_heads_of_hugging_face(tmp_path):
    """What the configuration says of the head comes back, and may be missing."""
    heads = (
        TaskOutputs(TaskHeadConfig("classification", 3), "single_label", ("a", "b", "c" * 999)),
        TaskOutputs(TaskHeadConfig("classification", 2, 0.3), "multi_label", ("x", "LABEL_1")),
        TaskOutputs(TaskHeadConfig("classification", 1), "multi_label", ("toxic",), (0.25,)),
        TaskOutputs(
            TaskHeadConfig("classification", 1), "regression", long=LongTexts("windows", stride=9)
        ),
        TaskOutputs(TaskHeadConfig("tagging", 2, 0.0), "tags", ("O", "B-PER")),
        TaskOutputs(TaskHeadConfig("span", 2, 0.0), "span"),
    )
    for outputs in heads:
        head = outputs.head
        params = random_tree(lambda head=head: init_task_params(MODEL, head, jax.random.key(0)))
        state_dict = to_huggingface(params, MODEL, table_of((), head))
        fields = {"architectures": [f"Bert{head_class(outputs)}"], **head_to_huggingface(outputs)}
        fields["classifier_dropout"] = head.dropout_rate
        write_huggingface(tmp_path)
        config = read_json_object(tmp_path / "config.json", max_bytes=10**6)
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        write_safetensors(tmp_path / SINGLE, state_dict)
        found = read_model(tmp_path)
        assert found.outputs == outputs
        assert set(found.params) == {"encoder", "head"}
        np.testing.assert_array_equal(found.params["head"]["kernel"], params["head"]["kernel"])
        assert set(read_model(tmp_path, encoder_only=True).params) == {"encoder"}
        if head.kind == "classification":
            for wrong in ({"id2label": {"1": "a"}}, {"problem_type": "x"}):
                (tmp_path / "config.json").write_text(json.dumps(config | fields | wrong))
                if (outputs.objective, *wrong) != ("regression", "id2label"):
                    assert next(iter(wrong)) in refused(tmp_path)
            for wrong in ({"label_thresholds": {"toxic": 2}}, {"long_texts": {"how": "fold"}}):
                (tmp_path / "config.json").write_text(json.dumps(config | fields | wrong))
                if outputs.objective == "multi_label" or "long_texts" in wrong:
                    assert next(iter(wrong)) in refused(tmp_path)


def test_shards(directory, weights):
    write_shards(directory, weights)
    assert_encoder(read_model(directory).params["encoder"], pretraining_params()["encoder"])


def test_shards_that_are_not_those_of_the_index(directory, weights):
    first, second = "bert.embeddings.LayerNorm.bias", "bert.embeddings.LayerNorm.weight"
    write_shards(directory, weights, **{first: "model-2.safetensors"})
    message = refused(directory)
    assert f"{first!r} is not in model-2.safetensors" in message
    assert f"{first!r} is in model-1.safetensors, but the index does not say so" in message
    for outside in ("../model-2.safetensors", "/x.safetensors", "model-2.bin", 3, "..safetensors"):
        write_shards(directory, weights, **{second: outside})
        assert f"the tensor '{second}' is in {outside!r}; a .safetensors" in refused(directory)
    write_shards(directory, weights, **{second: "gone.safetensors"})
    assert "gone.safetensors: no such file" in refused(directory)
    (directory / INDEX).write_text('{"weight_map": []}')
    assert "weight_map must be an object" in refused(directory)


def test_two_sets_of_weights(directory):
    (directory / INDEX).write_text("{}")
    assert f"has both {SINGLE} and {INDEX}" in refused(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_are_not_read(directory, name):
    (directory / SINGLE).rename(directory / name)
    message = refused(directory)
    assert f"only the weights {name}, which are not read" in message
    assert f"BertForPreTraining.from_pretrained({str(directory)!r}).save_pretrained" in message


@pytest.mark.parametrize("made_by", [None, [], "BertModel", ["x"], ["Bert\n(evil)"], [{}]])
def test_a_class_that_is_no_name_becomes_part_of_no_command(directory, made_by):
    config = read_json_object(directory / "config.json", max_bytes=10**6)
    (directory / "config.json").write_text(json.dumps(config | {"architectures": made_by}))
    assert read_model(directory).name == f"{directory}, AutoModel"
    (directory / SINGLE).rename(directory / "pytorch_model.bin")
    assert "AutoModel.from_pretrained(" in refused(directory)


def test_sizes_of_no_model_are_refused_before_any_memory(directory):
    config = read_json_object(directory / "config.json", max_bytes=10**6)
    huge = {"vocab_size": 1 << 24, "hidden_size": 1 << 24, "intermediate_size": 1 << 24,
            "num_hidden_layers": 1024}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config | huge))
    assert "is (20, 16), but the configuration needs (16777216, 16777216)" in refused(directory)


def test_no_weights_no_tokenizer_no_configuration_nothing(directory, tmp_path):
    (directory / SINGLE).unlink()
    assert "has no weights" in refused(directory)
    for file in (*directory.glob("*token*"), *directory.glob("vocab*")):
        file.unlink()
    assert "holds no tokenizer" in refused(directory)
    (directory / "config.json").unlink()
    assert "has no config.json; give the work directory of" in refused(directory)
    assert "does not exist; give the work directory of" in refused(tmp_path / "bert-base-uncased")
    assert "hf download" in refused(tmp_path / "bert-base-uncased")
    (tmp_path / "file").write_text("")
    assert "is a file; give the work directory of" in refused(tmp_path / "file")


def test_weights_and_configuration_of_two_models(directory):
    config = read_json_object(directory / "config.json", max_bytes=10**6)
    (directory / "config.json").write_text(
        json.dumps(config | {"intermediate_size": 48, "num_hidden_layers": 1})
    )
    message = refused(directory)
    assert f"{directory}: the weights do not fit the configuration" in message
    assert "0.intermediate.dense.weight is (32, 16), but the configuration needs (48, 16)" in (
        message
    )
    assert "bert.encoder.layer.1.output.dense.bias is unexpected" in message
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "roberta"}))
    assert "model_type is 'roberta', and this class is not read directly" in refused(directory)


def test_a_tokenizer_with_more_tokens_than_embeddings(directory):
    WordPieceTokenizer([*TOKENIZER.vocab, *"bcdef"]).save(directory)
    message = refused(directory)
    assert "the tokenizer has 22 tokens, but the model has embeddings for 20" in message


def write_run(workdir, **model_changes):
    """A work directory of `bert-jax pretrain` with one checkpoint; returns its parameters."""
    fields = {name: value for name, value in vars(MODEL).items() if name != "dtype"}
    config = PretrainConfig(model=PretrainModelConfig(**{**fields, **model_changes}))
    params = jax.tree.map(jax.numpy.asarray, pretraining_params(seed=3))
    TOKENIZER.save(workdir / "tokenizer")
    checkpoints = Checkpoints(workdir / "checkpoints", Retention(keep=1))
    checkpoints.save_last(7, State(params), read_back=False, config=to_dict(config), extra={})
    checkpoints.close()
    (workdir / "config.json").write_text(
        json.dumps({"bert_jax": "0", "format": 2, "config": to_dict(config)})
    )
    return params


def test_a_pretraining_run(tmp_path):
    params = write_run(tmp_path / "run", attention_impl="splash", norm_eps=1e-6)
    for _ in range(2):
        found = read_model(tmp_path / "run")
        assert_encoder(found.params["encoder"], params["encoder"])
        assert type(found.config) is ModelConfig
        assert found.config.norm_eps == 1e-6
        assert found.config.attention_impl == "auto"  # it was chosen for another machine
        assert found.tokenizer.fingerprint == TOKENIZER.fingerprint
        assert found.tokenizer_files == tmp_path / "run" / "tokenizer"
        assert found.name == f"{tmp_path / 'run'}, step 7"
        assert found.has_pooler
        (tmp_path / "run" / "config.json").unlink(missing_ok=True)  # the checkpoint has it too


def test_a_run_that_has_saved_nothing(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "7").rename(tmp_path / "elsewhere")
    assert "holds no checkpoint" in refused(tmp_path / "run")


def test_a_finetuning_run(tmp_path):
    workdir, head = tmp_path / "run", TaskHeadConfig("classification", 2)
    description = {"task": to_dict(TableConfig()), "learned": {"labels": ["no", "yes"]}}
    task = restore_task(description, TOKENIZER)
    config = FinetuneConfig(init="elsewhere")
    write_huggingface(tmp_path / "bert")
    prepare_finetune_workdir(workdir, config, {}, tmp_path / "bert")
    model = dataclasses.replace(MODEL, attention_impl="cudnn")
    shapes = random_tree(lambda: init_task_params(MODEL, head, jax.random.key(0)), seed=5)
    params = jax.tree.map(jax.numpy.asarray, shapes)
    content = saved_content(
        config,
        TaskObjective(model, head, "single_label"),
        task,
        Outcome(Trial("x", 1e-4, 0), [{"step": 9, "accuracy": 0.5}], 0.5, 9, "", 1.0),
    )
    checkpoints = Checkpoints(workdir / "checkpoints", Retention(keep=1))
    checkpoints.save_last(9, FinetunedState(params), read_back=False, **content)
    checkpoints.close()

    found = read_model(workdir)
    assert_encoder(found.params["encoder"], params["encoder"])
    assert found.config == MODEL
    assert found.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert found.tokenizer_files == workdir / "tokenizer"
    assert found.name == f"{workdir}, fine-tuned, step 9"
    assert found.outputs == TaskOutputs(head, "single_label", ("no", "yes"))
    assert found.max_length == 128
    assert found.origin.metrics == {"accuracy": 0.5}
    assert found.has_pooler
    np.testing.assert_array_equal(found.params["head"]["kernel"], params["head"]["kernel"])

    # A temperature is in the head; `bert-jax evaluate` divides by it itself.
    task = restore_task(
        {
            "task": to_dict(TableConfig(problem_type="multi_label", long="head_tail")),
            "learned": {"labels": ["no", "yes"]},
        },
        TOKENIZER,
    )
    fitted = {"step": 9, "f1": 0.5, "temperature": 2.0, "threshold/no": 0.25, "threshold/yes": 0.75}
    objective = TaskObjective(model, head, "multi_label")
    best = Outcome(Trial("x", 1e-4, 0), [fitted], 0.5, 9, "", 1.0)
    content = saved_content(config, objective, task, best)
    checkpoints = Checkpoints(workdir / "checkpoints", Retention(keep=1))
    checkpoints.save_last(10, FinetunedState(params), read_back=False, **content)
    checkpoints.close()
    found, raw = read_model(workdir), read_finetuned(workdir)
    for name, array in params["head"].items():
        np.testing.assert_array_equal(found.params["head"][name], array / 2)
        np.testing.assert_array_equal(raw.params["head"][name], array)
    meant = TaskOutputs(head, "multi_label", ("no", "yes"), (0.25, 0.75), LongTexts("head_tail"))
    assert found.outputs == raw.outputs == meant


def test_a_report_counts_if_init_has_another_spelling_now(tmp_path):
    member = {"init": "runs/a", "learning_rate": 1e-5, "seed": 0}
    record = {"member": {**member, "init": "/home/ada/runs/a"}, "splits": {"dev": {"rows": 3}}}
    (tmp_path / "report.json").write_text(json.dumps(record))
    assert read_reports(tmp_path, member) == {"dev": {"rows": 3}}
    assert read_reports(tmp_path, {**member, "seed": 1}) == {}
    (tmp_path / "report.json").write_text(json.dumps({**record, "member": 3}))
    with pytest.raises(UserError, match=r"report\.json is not a report of a run"):
        read_reports(tmp_path, member)
