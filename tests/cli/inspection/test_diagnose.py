"""The tests for causes of a plateau: what they measure, what they find, and what they refuse."""

import json
import math
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from one_shard import StoreWriter
from small_run import TOKENIZER, small_config, write_corpus

from bert_jax.cli.inspection import diagnose
from bert_jax.cli.inspection.diagnose import Evidence, Part, judge, measure
from bert_jax.cli.main import main
from bert_jax.config.mapping import to_dict
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.reading import load_newest
from bert_jax.distributed.checkpoint.record import named_leaves
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.saves import read_config
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.pretrain.train import train
from bert_jax.training.steps.optim_parts import is_decayed
from bert_jax.training.steps.state import abstract_state, jitted_init

HEALTHY = Evidence(
    step=300, loss=6.2, start_loss=8.4, vocab_size=4096, hidden_dim=64, rate=3e-3, full_steps=200.0,
    masked=0.15, kept=0.1,
    parts=(
        Part("embeddings", 0.05, 0.09, 1e-3, 8e-4),
        Part("layer 1", 0.05, 0.06, 5e-4, 8e-4, 0.1, 0.2),
        Part("layer 2", 0.05, 0.06, 5e-4, 8e-4, 0.01, 0.1),
        Part("head", 0.05, 0.06, 8e-3, 8e-4),
    ),
    repeats=0.03, unknown=0.0, padding=0.05, short=0.01,
)  # fmt: skip


def with_parts(**values):
    """Evidence in which each part that has a value has another."""
    parts = (
        part._replace(**{name: values[name] for name in values if getattr(part, name) is not None})
        for part in HEALTHY.parts
    )  # fmt: skip
    return HEALTHY._replace(parts=tuple(parts))


def test_healthy_evidence_has_no_finding():
    assert judge(HEALTHY) == []
    # A run that goes on from a model, or that has not begun, has less to compare.
    assert judge(with_parts(start=None)._replace(start_loss=None)) == []
    first = with_parts(update=0.01)
    assert judge(first._replace(step=0)) == [], "Adam's first updates"
    assert judge(first) != []


@pytest.mark.parametrize(
    ("evidence", "cause", "measured", "remedy"),
    [
        (HEALTHY._replace(repeats=0.9), "data", "90%", "--drop-duplicates near"),
        (HEALTHY._replace(unknown=0.3), "data", "30.0% of the tokens are [UNK]", "tokenizer"),
        (HEALTHY._replace(padding=0.8), "data", "80% of the positions", "data.pairing to none"),
        (HEALTHY._replace(short=0.8), "data", "80% of the tokens", "several sentences"),
        (HEALTHY._replace(masked=0.01), "masking", "1.0%", "masking.rate"),
        (HEALTHY._replace(masked=0.9), "masking", "90.0%", "masking.rate"),
        (HEALTHY._replace(kept=1.0), "masking", "100%", "masking.mask_rate to 0.8"),
        (HEALTHY._replace(start_loss=20.0), "initial scale", "20.00", "model.init_std to 0.069"),
        (with_parts(start=1e-5), "initial scale", "0.00016", "model.init_std to 0.069"),
        (with_parts(update=0.1), "learning rate", "too high", "learning_rate (or a phase's) to"),
        (with_parts(update=2e-6), "learning rate", "too low", "training.num_steps"),
        (with_parts(uneven=1e-8), "attention", "uniform in every layer", "earlier checkpoint"),
        (with_parts(largest=0.99), "attention", "saturated in every layer", "earlier checkpoint"),
    ],
)
def test_each_cause(evidence, cause, measured, remedy):
    (finding,) = judge(evidence)
    assert finding["cause"] == cause
    assert measured in finding["measured"]
    assert remedy in finding["remedy"]


def test_weights_that_grew_until_a_layer_lost_its_gradient():
    parts = [part._replace(weights=0.4) for part in HEALTHY.parts]
    assert judge(HEALTHY._replace(parts=tuple(parts))) == [], "long runs grow their weights, too"
    parts[1] = parts[1]._replace(gradient=1e-8)
    (finding,) = judge(HEALTHY._replace(parts=tuple(parts)))
    assert finding["cause"] == "learning rate"


def test_one_layer_of_dead_attention_is_no_cause():
    first = HEALTHY.parts[1]._replace(uneven=0.0, largest=1.0)
    assert judge(HEALTHY._replace(parts=(HEALTHY.parts[0], first, *HEALTHY.parts[2:]))) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six steps at a constant rate, with checkpoints after the fifth and the last."""
    directory = tmp_path_factory.mktemp("run")
    write_corpus(directory / "corpus")
    config = small_config(
        training__num_steps=6,
        training__phases=[{"length": 32, "batch_size": 16}],
        training__accumulation=1,
        training__eval_every_steps=0,
        optimizer={"learning_rate": 1e-3, "warmup_steps": 0, "schedule": "constant"},
        data={"corpus": str(directory / "corpus"), "pairing": "sop"},
    )
    train(config, directory / "work", echo=lambda _: None)
    return directory


def state_of(workdir):
    """The newest state of a run, and its settings."""
    config = read_config(workdir)
    corpus = open_corpus(config.data.corpus)
    settings = step_config(config.with_vocabulary(corpus.train.vocab_size), corpus)
    mesh = make_mesh(MeshConfig())
    return load_newest(workdir / "checkpoints", abstract_state(settings, mesh)), settings, mesh


def root_mean_square(tree, *names):
    leaves = [
        np.asarray(leaf) for path, leaf in named_leaves(tree).items()
        if is_decayed(path) and all(name in path for name in names)
    ]  # fmt: skip
    return math.sqrt(sum((leaf**2).sum() for leaf in leaves) / sum(leaf.size for leaf in leaves))


def test_the_measured_update_is_the_next_step_of_the_run(run, tmp_path):
    workdir = shutil.copytree(run / "work", tmp_path / "work")
    last, settings, mesh = state_of(workdir)
    shutil.rmtree(workdir / "checkpoints" / "6")
    before, _, _ = state_of(workdir)
    evidence = measure(open_workdir(workdir))
    parts = {part.name: part for part in evidence.parts}
    assert list(parts) == ["embeddings", "layer 1", "layer 2", "head"]
    change = jax.tree.map(
        lambda a, b: np.asarray(a) - np.asarray(b), last.state.params, before.state.params
    )
    # Dropout decides a part of the gradient, so that equality means the same batch and seed, too.
    assert parts["embeddings"].update == pytest.approx(
        root_mean_square(change, "embeddings"), rel=1e-3
    )
    assert parts["head"].update == pytest.approx(root_mean_square(change, "mlm"), rel=1e-3)
    second = jax.tree.map(lambda leaf: leaf[1], change["encoder"]["layers"])
    del second["attention"]["query"], second["attention"]["key"]
    assert parts["layer 2"].update == pytest.approx(root_mean_square(second), rel=1e-3)
    start = jitted_init(settings, mesh)(jax.random.key(7))
    assert parts["head"].start == pytest.approx(root_mean_square(start.params, "mlm"))
    assert parts["head"].weights == pytest.approx(root_mean_square(before.state.params, "mlm"))


def test_measurements_of_a_run(run):
    evidence = measure(open_workdir(run / "work"))
    assert (evidence.step, evidence.vocab_size, evidence.hidden_dim) == (6, 64, 32)
    assert (evidence.rate, evidence.full_steps) == (1e-3, pytest.approx(6))
    assert evidence.start_loss == pytest.approx(math.log(64), abs=0.1)
    assert evidence.loss < evidence.start_loss
    assert evidence.masked == pytest.approx(0.15, abs=0.03)
    assert 0 < evidence.kept < 0.3
    assert (evidence.unknown, evidence.short) == (0, pytest.approx(0.1, abs=0.1))
    for part in evidence.parts[1:3]:
        assert 1e-6 < part.uneven < 0.1
        assert 1 / 32 < part.largest < 0.3


@pytest.mark.parametrize(("scale", "kind"), [(0.0, "uniform"), (3e3, "saturated")])
def test_planted_attention(run, tmp_path, scale, kind, capsys):
    workdir = shutil.copytree(run / "work", tmp_path / "work")
    restored, _, _ = state_of(workdir)

    def scaled(path, leaf):
        name = jax.tree_util.keystr(path)
        return leaf * scale if "'query'" in name or "'key'" in name else leaf

    params = jax.tree_util.tree_map_with_path(scaled, restored.state.params)
    shutil.rmtree(workdir / "checkpoints" / "6")
    config = replace(read_config(workdir).retention, keep=1)
    checkpoints, record = Checkpoints(workdir / "checkpoints", config), restored.record
    state = restored.state._replace(params=params)
    checkpoints.save_last(6, state, read_back=True, config=record.config, extra=record.extra)
    checkpoints.close()
    assert main(["status", str(workdir), "--diagnose", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"{kind} in every layer" in found["diagnosis"]["findings"][-1]["measured"]
    assert found["num_steps"] == 6


def begun(directory, corpus, **changes):
    """A run that has not saved yet."""
    config = small_config(
        training__phases=[{"length": 32, "batch_size": 16}],
        data={"corpus": str(corpus), "pairing": "none"}, **changes,
    )  # fmt: skip
    store = open_corpus(str(corpus)).train
    directory.mkdir()
    record = {"bert_jax": "1", "format": 2, "corpus": store.fingerprint}
    config = to_dict(config.with_vocabulary(store.vocab_size))
    (directory / "config.json").write_text(json.dumps({**record, "config": config}))
    return directory


@pytest.mark.parametrize("std", [1.0, 1e-5])
def test_initial_weights_before_the_first_checkpoint(run, tmp_path, std, capsys):
    workdir = begun(tmp_path / "work", run / "corpus", model__init_std=std)
    assert main(["status", str(workdir), "--diagnose"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "diagnosis of step 0, loss" in text
    assert "initial scale: weights of" in text
    assert "set model.init_std to 0.098" in text


def test_a_corpus_of_one_line_that_is_repeated_and_unknown(tmp_path):
    unknown = TOKENIZER.special_ids.unk
    with StoreWriter(tmp_path / "corpus" / "train", TOKENIZER) as writer:
        for _ in range(500):
            line = np.array([unknown, 7, 8, unknown, 9, 10, 11, 12, 13])
            writer.append(line, np.array([9]), np.array([1]))
        writer.store()
    workdir = begun(tmp_path / "work", tmp_path / "corpus")
    evidence = measure(open_workdir(workdir))
    assert evidence.repeats > 0.9
    assert evidence.unknown == pytest.approx(2 / 11)  # with [CLS] and [SEP]
    assert evidence.short == 1
    assert [each["cause"] for each in judge(evidence)][:3] == ["data"] * 3


def test_runs_that_cannot_be_diagnosed(run, tmp_path):
    other = begun(tmp_path / "a", run / "corpus", objective={"name": "replaced_tokens"})
    with pytest.raises(UserError, match=r"needs objective.name masked_lm .* found replaced_tokens"):
        measure(open_workdir(other))
    grown = begun(tmp_path / "b", run / "corpus", init="work/other")
    with pytest.raises(UserError, match=r"a checkpoint or random weights; .* and 0 checkpoints"):
        measure(open_workdir(grown))


def test_a_finetuning_run_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(diagnose, "measure", lambda work: pytest.fail("measured"))
    record = {"bert_jax": "1", "format": 2, "kind": "finetune", "config": {}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert main(["status", str(tmp_path), "--diagnose"]) == 2
    said = capsys.readouterr().err
    assert "holds a fine-tuning run" in said
    assert "no random weights to compare with" in said
