"""Low-rank updates in PEFT's format: written, read back, refused."""

import dataclasses
import json
import math
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from adapted_models import adapted
from export_models import model_of
from small_saved import FAMILIES, small_saved

from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.exchange.peft import check, loading, without_adapter, write
from bert_jax.artefacts.exchange.proof import batch_of, logits_of, proof_rows
from bert_jax.artefacts.formats.peft import (
    CONFIG,
    LABELS,
    PREFIX,
    WEIGHTS,
    Adapter,
    read_adapter,
)
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.main import main
from bert_jax.errors import UserError
from bert_jax.training.finetune import evaluate


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A classifier, and the directory of its adapter, whose base is beside it."""
    saved = adapted(model_of("class"), "query", "output", "down")
    directory = tmp_path_factory.mktemp("adapter")
    for name, make in (("base", write_base), ("ours", write)):
        (directory / name).mkdir()
        make(saved, directory / name)
    (directory / "ours" / "base").symlink_to(directory / "base")
    return saved, directory / "ours"


def write_base(saved: SavedModel, directory):
    write_huggingface(without_adapter(saved), directory)


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def outputs(saved):
    rows = proof_rows(saved)[:4]
    return logits_of(saved, batch_of(saved, rows))["head"]


def test_an_adapter_holds_the_updates_and_the_head_alone(written):
    saved, directory = written
    tensors = safetensors.numpy.load_file(directory / WEIGHTS)
    layers, width, mlp = saved.config.num_layers, saved.config.hidden_dim, saved.config.mlp_dim
    shapes = {name.removeprefix("base_model.model."): a.shape for name, a in tensors.items()}
    for name, inputs in (("attention.self.query", width), ("attention.output.dense", width),
                         ("output.dense", mlp)):  # fmt: skip
        for n in range(layers):
            module = f"bert.encoder.layer.{n}.{name}"
            assert shapes.pop(f"{module}.lora_A.weight") == (2, inputs)
            assert shapes.pop(f"{module}.lora_B.weight") == (width, 2)
    assert shapes.keys() == {f"{part}.{leaf}" for part in ("classifier", "bert.pooler.dense")
                             for leaf in ("weight", "bias")}  # fmt: skip
    config = json.loads((directory / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (2, 5.0, "SEQ_CLS")
    assert config["modules_to_save"] == ["bert.pooler", "classifier"]
    assert len(config["target_modules"]) == 3 * layers


def test_an_adapter_is_read_with_its_base(written):
    saved, directory = written
    back = read_model(directory)
    assert back.outputs.labels == saved.outputs.labels
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), saved.params, back.params
    )
    np.testing.assert_allclose(outputs(back), outputs(saved), atol=1e-5)
    assert np.abs(outputs(without_adapter(saved)) - outputs(saved)).max() > 1e-2


def test_a_base_that_names_no_class_keeps_the_head_of_the_adapter(written, tmp_path):
    """The class of the head is that of the base's family."""
    saved, directory = written
    shutil.copytree(directory.parent / "base", tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    config = json.loads(path.read_text())
    del config["architectures"]
    path.write_text(json.dumps(config))
    for name in (CONFIG, WEIGHTS, LABELS):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    assert read_adapter(tmp_path).config["architectures"] == ["BertForSequenceClassification"]
    assert read_model(tmp_path).outputs == saved.outputs


@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        ({}, {2.5}),
        ({"use_rslora": True}, {5 / math.sqrt(2)}),
        ({"alpha_pattern": {"query": 3}}, {1.5, 2.5}),
        ({"alpha_pattern": {"uery": 3}}, {2.5}),  # part of a name is none
    ],
)
def test_the_factor_of_an_update_is_that_of_its_rank(written, tmp_path, fields, scales):
    """Alpha is 5 and the rank 2."""
    directory = written[1]
    for name in (CONFIG, WEIGHTS, LABELS):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    edit(tmp_path / CONFIG, **fields)
    updates = read_adapter(tmp_path, directory.parent / "base").updates
    assert {scale for *_, scale in updates.values()} == scales


def test_biases_beside_updates_are_read(written, tmp_path):
    """PEFT, with the bias "all" or "lora_only", calls the layer below an update `base_layer`."""
    shutil.copytree(written[1], tmp_path / "ours")
    path, bias = tmp_path / "ours" / WEIGHTS, np.arange(16, dtype=np.float32)
    name = f"{PREFIX}bert.encoder.layer.1.attention.self.query.base_layer.bias"
    safetensors.numpy.save_file(safetensors.numpy.load_file(path) | {name: bias}, path)
    query = read_model(tmp_path / "ours").params["encoder"]["layers"]["attention"]["query"]
    np.testing.assert_array_equal(np.ravel(query["bias"][1]), bias)


@pytest.mark.parametrize("adapted_to", ["", "bert."])
@pytest.mark.parametrize("base", ["", "bert."])
def test_a_base_may_have_been_saved_with_or_without_its_head(tmp_path, adapted_to, base):
    """`AutoModel` reads both, and adapters of it have names without the family's prefix."""
    update = {f"{adapted_to}query.weight": (np.ones((1, 2)), np.ones((2, 1)), 1.0)}
    tensors = {f"{adapted_to}query.bias": np.ones(2), "classifier.bias": np.ones(3)}
    found = Adapter(tmp_path, tmp_path, {}, update, tensors).applied(
        {f"{base}query.weight": np.zeros((2, 2)), f"{base}query.bias": np.zeros(2)}
    )
    assert {name: array.sum() for name, array in found.items()} == {
        f"{base}query.weight": 4, f"{base}query.bias": 2, "classifier.bias": 3
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [(1, 150_000, r"has \(16, 16\) for .*\(150000, 150000\)"), (0, 16, "r > 0, are needed")],
)
def test_updates_that_nobody_can_have_made(written, tmp_path, rank, size, message):
    """A megabyte can ask for a product of 84 GiB."""
    for name in (CONFIG, LABELS):
        (tmp_path / name).write_bytes((written[1] / name).read_bytes())
    module = f"{PREFIX}bert.encoder.layer.0.attention.self.query.lora_"
    a, b = np.zeros((rank, size), np.float32), np.zeros((size, rank), np.float32)
    safetensors.numpy.save_file(
        {f"{module}A.weight": a, f"{module}B.weight": b}, tmp_path / WEIGHTS
    )
    base = written[1].parent / "base"
    with pytest.raises(UserError, match=message):
        read_adapter(tmp_path, base).applied(
            safetensors.numpy.load_file(base / "model.safetensors")
        )


def test_updates_of_maps_that_are_one_tensor_there_come_back(tmp_path):
    """ModernBERT's queries, keys and values, and both halves of its feed-forward."""
    source = small_saved("classification", **FAMILIES["modernbert"])
    source.params["encoder"]["layers"]["attention_norm"]["scale"][0] = 1
    saved = adapted(source, "query", "value", "gate", "up")
    write_base(saved, tmp_path)
    (tmp_path / "ours").mkdir()
    write(saved, tmp_path / "ours")
    (tmp_path / "ours" / "base").symlink_to(tmp_path)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        saved.params, read_model(tmp_path / "ours").params,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "length"), [("modernbert", 40), ("bert", 24)])
def test_an_adapter_of_longer_rows_reads_them(tmp_path, kind, length):
    """Rotary positions have no table, which would limit the rows to those of the base."""
    base = adapted(small_saved("classification", **FAMILIES.get(kind, {})), "query")
    longer = dataclasses.replace(base.config, num_positions=40)
    write_base(base, tmp_path)
    (tmp_path / "ours").mkdir()
    write(dataclasses.replace(base, config=longer, max_length=40), tmp_path / "ours")
    (tmp_path / "ours" / "base").symlink_to(tmp_path)
    back = read_model(tmp_path / "ours")
    assert (back.max_length, back.config.num_positions) == (length, length)
    edit(tmp_path / "tokenizer_config.json", model_max_length=40)  # which PEFT writes again
    assert read_model(tmp_path / "ours").max_length == 24


def test_an_adapter_is_scored_on_labelled_data(written, tmp_path, monkeypatch, capsys):
    logits = np.eye(3, dtype=np.float32)[:2]
    monkeypatch.setattr(evaluate, "split_outputs", lambda model, split: logits)
    table = tmp_path / "dev.csv"
    table.write_text("text,label\nthe river froze,yes\nthe ferry,ähm\n", "utf-8")
    assert main(["evaluate", f"{written[1]}", "--data", f"{table}"]) == 0
    assert re.search(r"^accuracy +1$", capsys.readouterr().out, re.MULTILINE)
    assert main(["evaluate", f"{written[1]}"]) == 2
    assert "records no corpus; give --corpus" in capsys.readouterr().err


@pytest.mark.parametrize("labels", [0, 5])
def test_the_labels_of_an_adapter_of_others_are_numbered(written, tmp_path, labels):
    """PEFT writes no labels; a base may have other ones, and may be a pretrained model."""
    saved, directory = written
    base = model_of("pretraining")
    params = {**base.params, "encoder": without_adapter(saved).params["encoder"]}
    (tmp_path / "base").mkdir()
    write_huggingface(type(base)(**{**vars(base), "params": params}), tmp_path / "base")
    if labels:
        names = {f"{n}": f"other {n}" for n in range(labels)}
        edit(tmp_path / "base" / "config.json", id2label=names)
    for name in (CONFIG, WEIGHTS):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "base").rename(tmp_path / "adapted")
    edit(tmp_path / CONFIG, base_model_name_or_path="adapted")
    back = read_model(tmp_path)
    assert back.outputs.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    np.testing.assert_allclose(outputs(back), outputs(saved), atol=1e-5)


def test_an_adapter_ignores_head_settings_of_its_base(written, tmp_path):
    """They were chosen for the base's own head."""
    shutil.copytree(written[1].parent / "base", tmp_path / "base")
    for name in (CONFIG, WEIGHTS, LABELS):
        (tmp_path / name).write_bytes((written[1] / name).read_bytes())
    edit(tmp_path / LABELS, problem_type="multi_label_classification")
    fields = {
        "label_thresholds": dict.fromkeys(written[0].outputs.labels, 0.9),
        "long_texts": {"how": "windows"}, "reading": {"stride": 5},
        "no_better_than_constant": [0.5, 0.6],
    }  # fmt: skip
    edit(tmp_path / "base" / "config.json", **fields)
    assert not fields.keys() & read_adapter(tmp_path).config.keys()
    assert read_model(tmp_path).origin.unlearned is None
    edit(tmp_path / LABELS, label_thresholds=dict.fromkeys(written[0].outputs.labels, 0.7))
    assert read_model(tmp_path).outputs.thresholds == (0.7, 0.7, 0.7)


def test_an_adapter_ignores_the_cross_encoder_of_its_base(written, tmp_path):
    """The activation of its scores was chosen for the base's own head, too."""
    base = tmp_path / "base"
    shutil.copytree(written[1].parent / "base", base)
    for name in (CONFIG, WEIGHTS, LABELS):
        (tmp_path / name).write_bytes((written[1] / name).read_bytes())
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    modules = [{"idx": 0, "name": "0", "path": "", "type": kind}]
    (base / "modules.json").write_text(json.dumps(modules))
    settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.Sigmoid"}
    (base / "config_sentence_transformers.json").write_text(json.dumps(settings))
    assert read_model(base).outputs.objective == "multi_label"
    assert read_model(tmp_path).outputs == written[0].outputs


@pytest.mark.parametrize(
    ("kind", "pooling", "arguments"),
    [
        ("bert", "cls", "num_labels=3"),
        ("modernbert", "cls", 'num_labels=3, classifier_pooling="cls"'),
        ("modernbert", "mean", 'num_labels=3, classifier_pooling="mean"'),
        ("eurobert", "cls", 'num_labels=3, classifier_pooling="bos"'),
    ],
)
def test_the_card_loads_the_base_with_the_pooling_of_the_head(kind, pooling, arguments):
    """The config.json of a base says how another head pools, or nothing."""
    saved = small_saved("classification", pooling=pooling, **FAMILIES.get(kind, {}))
    assert f'.from_pretrained("BASE", {arguments})' in loading(adapted(saved, "query"))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA is read"),
        ({"use_dora": True}, "use_dora is True; only plain LoRA is read"),
        ({"alora_invocation_tokens": [5]}, r"alora_invocation_tokens is \[5\]; only plain LoRA"),
        ({"trainable_token_indices": [5]}, r"trainable_token_indices is \[5\]; only plain LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', with which PEFT also changes"),
        ({"lora_alpha": "many"}, "lora_alpha of .* is 'many'; a number above 0"),
        ({"alpha_pattern": {"(a+)+": 1}}, r"alpha_pattern has the key .* a regular expression"),
    ],
)
def test_other_adapters_are_refused(written, tmp_path, fields, why):
    directory = written[1]
    for name in (CONFIG, WEIGHTS, LABELS):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "base").symlink_to(directory.parent / "base")
    edit(tmp_path / CONFIG, **fields)
    with pytest.raises(UserError, match=why):
        read_model(tmp_path)


@pytest.mark.parametrize("named", ["absolute", "../base", "google/bert", None])
def test_a_base_elsewhere_is_read_where_a_link_says_so(written, tmp_path, monkeypatch, named):
    """No file makes another one be read outside its directory; the message has the command."""
    directory = written[1]
    for name in (CONFIG, WEIGHTS, LABELS):
        (tmp_path / "ours").mkdir(exist_ok=True)
        (tmp_path / "ours" / name).write_bytes((directory / name).read_bytes())
    shutil.copytree(directory.parent / "base", tmp_path / "base")
    monkeypatch.chdir(tmp_path / "base")
    place = f"{tmp_path / 'base'}" if named == "absolute" else named
    edit(tmp_path / "ours" / CONFIG, base_model_name_or_path=place)
    link = tmp_path / "ours" / "base"
    with pytest.raises(UserError, match=rf"ln -s MODEL {link}$"):
        read_model(tmp_path / "ours")
    link.symlink_to(tmp_path / "base")
    assert read_model(tmp_path / "ours").outputs.labels == written[0].outputs.labels


def test_an_adapter_of_another_model_is_refused(written, tmp_path):
    directory = written[1]
    tensors = safetensors.numpy.load_file(directory / WEIGHTS)
    tensors = {name.replace("layer.0", "layer.9"): array for name, array in tensors.items()}
    safetensors.numpy.save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_bytes((directory / CONFIG).read_bytes())
    (tmp_path / "base").symlink_to(directory.parent / "base")
    with pytest.raises(UserError, match=r"lacks bert.encoder.layer.9.attention"):
        read_model(tmp_path)


def test_a_model_without_updates_has_no_adapter():
    with pytest.raises(UserError, match=r"only `bert-jax finetune` with lora\.rank above 0"):
        check(model_of("class"))
