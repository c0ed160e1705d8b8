"""Runs with early stopping, low-rank updates, kept heads and other metrics, as wholes."""

import functools
import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from small_finetuning import fingerprint, small_config, write_files
from small_saved import small_saved
from task_examples import opened, put

from bert_jax.artefacts.exchange import theirs
from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.distributed.checkpoint.reading import load_newest
from bert_jax.distributed.parallel.sharding import make_trial_mesh
from bert_jax.errors import UserError
from bert_jax.tasks.config import TableConfig
from bert_jax.training import loop
from bert_jax.training.finetune import evaluate, report
from bert_jax.training.finetune import train as train_module
from bert_jax.training.finetune.evaluate import evaluate_finetuned
from bert_jax.training.finetune.setup import set_up
from bert_jax.training.finetune.start import kept_head
from bert_jax.training.finetune.train import finetune
from bert_jax.training.run.events import read_events
from bert_jax.training.steps import trials

LORA = {"rank": 2, "targets": ("query", "down")}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """One device, and each step traced and compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (train_module, evaluate):
            patch.setattr(
                module, "make_trial_mesh", lambda c, n: make_trial_mesh(c, n, jax.devices()[:1])
            )
        for module, name in (
            (loop, "make_train_step"), (report, "make_eval_step"), (trials, "make_keep_best"),
            (evaluate, "make_eval_step"),
        ):  # fmt: skip
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


def done(config, workdir, echo=lambda line: None):
    assert finetune(config, workdir, echo=echo).finished
    return fingerprint(workdir)


def patient(files, **changes):
    """At most 8 evaluations, of low-rank updates with rates that differ between layers."""
    rates = {"learning_rate": 3e-2, "head_learning_rate": 5e-2, "layer_decay": 0.8}
    training = {"num_epochs": 4.0, "evals_per_epoch": 2, "patience": 2, "batch_size": 8,
                "eval_batch_size": 24, "max_buckets": 1}  # fmt: skip
    given = {"training": training, "optimizer": rates, "lora": LORA} | changes
    return small_config(files, **given)


SWEEP = {"seeds": 3, "learning_rates": (3e-2, 1e-2), "at_once": 4}


def evaluations(scores, patience=2, most=8):
    """The number of evaluations after which a run with these scores ends, by the definition."""
    best = 0
    for number in range(len(scores)):
        best = number if scores[number] > scores[best] else best
        if number - best >= patience:
            return number + 1
    return most


@pytest.fixture(scope="module")
def sweep(files, tmp_path_factory):
    """Work directory and fingerprint of a sweep whose runs stop at different evaluations."""
    workdir = tmp_path_factory.mktemp("sweep") / "work"
    return workdir, done(patient(files, sweep=SWEEP), workdir)


def test_each_run_stops_alone_and_the_wave_with_the_last(files, sweep, tmp_path):
    workdir, found = sweep
    counts = [len(outcome["scores"]) for outcome in found["outcomes"]]
    assert len(set(counts)) > 1, counts
    assert min(counts) < 8
    for outcome in found["outcomes"]:
        scores = [each["accuracy"] for each in outcome["scores"]]
        assert len(scores) == evaluations(scores)
    waves = [[row["step"] for row in found["metrics"] if row["wave"] == wave] for wave in (0, 1)]
    assert [len(steps) for steps in waves] == [max(counts[:4]), max(counts[4:])]
    events = read_events(workdir / "events.jsonl")
    events = [event for event in events if event["kind"] == "early_stop"]
    assert len(events) == sum(count < 8 for count in counts)
    assert "no better than" in events[0]["message"]
    alone = done(patient(files, seed=7), tmp_path / "work")
    assert alone["outcomes"] == [found["outcomes"][1]]


def test_stopped_and_continued_is_uninterrupted(files, sweep, tmp_path):
    """A signal comes when a run has stopped early and others go on."""
    workdir, seen = tmp_path / "work", []

    def echo(line):
        seen.append(line)
        if "stopped early" in line and sum("stopped early" in each for each in seen) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    config = patient(files, sweep=SWEEP)
    assert not finetune(config, workdir, echo=echo).finished
    assert any(line.startswith("trained  ") for line in seen)
    assert done(config, workdir) == sweep[1]


def test_rows_have_the_learning_rate_and_the_loss_on_dev_data(sweep):
    row = sweep[1]["metrics"][0]
    assert len(row["train/learning_rate"]) == len(row["eval/loss"]) == 4
    assert row["train/learning_rate"][0] > 0
    last = sweep[1]["metrics"][-1]
    stopped = [value is None for value in last["eval/accuracy"]]
    assert any(stopped)
    assert [value is None for value in last["eval/loss"]] == stopped


def test_low_rank_updates_are_merged_into_the_model(sweep, files):
    workdir, found = sweep
    restored = load_newest(workdir / "checkpoints")
    assert restored.record.extra["lora"]["rank"] == 2
    saved, before = read_model(workdir), read_model(files["init"])
    assert saved.adapter.config.targets == ("query", "down")
    assert "lora" not in saved.params
    for part, name, differs in (("attention", "query", True), ("attention", "key", False)):
        kernels = (np.asarray(model.params["encoder"]["layers"][part][name]["kernel"])
                   for model in (saved, before))  # fmt: skip
        assert np.any(next(kernels) != next(kernels)) == differs
    assert (
        evaluate_finetuned(workdir, files["dev"]).scores["accuracy"] == found["scores"]["accuracy"]
    )


def test_the_updates_are_exported_alone_and_read_with_the_base(sweep, tmp_path, monkeypatch):
    """The base is `init`, which has no head and no labels."""
    monkeypatch.setattr(theirs, "find_spec", lambda name: None)  # Transformers takes seconds
    parity = export(sweep[0], "peft", tmp_path / "adapter")
    assert max(parity["differences"].values()) < 1e-5
    assert not parity["proofs"]["peft"]["ran"]
    assert "PeftModel.from_pretrained" in (tmp_path / "adapter/README.md").read_text()
    saved = read_model(sweep[0])
    with pytest.raises(UserError, match="ln -s MODEL"):
        read_model(tmp_path / "adapter")
    (tmp_path / "adapter" / "base").symlink_to(saved.origin.config["init"])
    back = read_model(tmp_path / "adapter")
    assert back.outputs.labels == saved.outputs.labels == ("cat", "dog")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), back.params, saved.params
    )
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    whole = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(saved.params))
    assert weights.stat().st_size < whole / 4


def test_a_resumable_state_has_what_is_trained_alone(files, tmp_path):
    workdir = tmp_path / "work"

    def echo(line):
        if line.startswith("epoch "):
            os.kill(os.getpid(), signal.SIGTERM)

    assert not finetune(patient(files), workdir, echo=echo).finished
    params = load_newest(workdir / "resume").state
    assert params.keys() == {"encoder", "head", "lora"}
    assert params["encoder"].keys() == {"pooler"}


# Heads that go on.


def started(files, **changes):
    return set_up(small_config(files, **changes)).start.parts[0]


def test_a_head_with_the_same_labels_goes_on(sweep, files, tmp_path):
    """From a work directory and from an export, the labels in another order."""
    workdir, saved = sweep[0], read_model(sweep[0])
    assert "head" not in started(files)
    init = {**files, "init": str(workdir)}
    kept = started(init)["head"]
    jax.tree.map(np.testing.assert_array_equal, kept, saved.params["head"])
    assert "head" not in started(init, head="fresh")
    (tmp_path / "export").mkdir()
    write_huggingface(saved, tmp_path / "export")
    tables = {"train": files["train"], "dev": files["dev"], "labels": ("dog", "cat")}
    turned = started({**files, "init": str(tmp_path / "export")}, head="keep", table=tables)
    np.testing.assert_allclose(turned["head"]["kernel"], kept["kernel"][:, ::-1], atol=1e-6)
    np.testing.assert_allclose(turned["head"]["bias"], kept["bias"][::-1], atol=1e-6)


def test_a_kept_head_has_its_columns_where_the_labels_are_now(tmp_path):
    """Three labels: of two, an order and its inverse are the same."""
    saved = small_saved("classification")  # of a, b and c
    path = put(tmp_path / "a.csv", "text,label", *(f"text,{label}" for label in "abc"))
    task = opened(TableConfig(train=path, dev=path, labels=("b", "c", "a")))
    kept = kept_head(saved, saved.outputs.head, task)
    for name, array in saved.params["head"].items():
        columns = dict(zip("abc", np.moveaxis(array, -1, 0), strict=True))
        np.testing.assert_array_equal(np.moveaxis(kept[name], -1, 0), [columns[c] for c in "bca"])


def test_a_head_with_other_labels_does_not(sweep, files, tmp_path):
    other = Path(files["train"]).read_text().replace(",dog", ",hound")
    (tmp_path / "other.csv").write_text(other)
    tables = {"train": str(tmp_path / "other.csv"), "dev": str(tmp_path / "other.csv")}
    init = {**files, "init": str(sweep[0])}
    assert "head" not in started(init, table=tables)
    for given, why in (
        (init, "the labels of .* lack hound and have dog; set head to 'fresh' or 'auto'"),
        (files, "head is 'keep', but .* has no task head"),
    ):
        with pytest.raises(UserError, match=why):
            started(given, head="keep", table=tables)
    with pytest.raises(UserError, match="head is 'keep', but reinitialise"):
        small_config(files, head="keep", reinitialise=True)


def test_a_head_of_scores_goes_on_in_their_units(files, tmp_path):
    """What the new run predicts first, with its own mean and deviation, is what the old one did."""
    tables = []
    for name, scale in (("one", 1.0), ("two", 3.0)):
        lines = ["text,label", *(f"the cat sat {'. ' * n},{scale * n}" for n in range(8))]
        tables.append(tmp_path / f"{name}.csv")
        tables[-1].write_text("\n".join(lines))
    number = {"problem_type": "regression"}
    config = [
        small_config(files, table={"train": str(path), "dev": str(path), **number},
                     training__num_epochs=1.0)
        for path in tables
    ]  # fmt: skip
    done(config[0], tmp_path / "work")
    saved = read_model(tmp_path / "work").params["head"]
    given = json.loads(json.dumps(files)) | {"init": str(tmp_path / "work")}
    table = {"train": str(tables[1]), "dev": str(tables[1]), **number}
    setup = set_up(small_config(given, table=table))
    spec, head = setup.task.spec, setup.start.parts[0]["head"]
    np.testing.assert_allclose(head["kernel"] * spec.deviation, saved["kernel"], rtol=1e-5)
    np.testing.assert_allclose(
        head["bias"] * spec.deviation + spec.mean, saved["bias"], rtol=1e-5, atol=1e-5
    )


# Values that do not fit.


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"training__freeze": "3"}, "training.freeze is 3, but the model has 2 layers"),
        ({"training__freeze": "half"}, "training.freeze is 'half'; it must be 'embeddings'"),
        ({"training__freeze": "1", "lora": LORA}, "lora.rank 2 trains low-rank updates"),
        (
            {"lora": {"rank": 2, "targets": ("gate",)}},
            "the layers of this model have no such matrix",
        ),
        ({"lora": {"rank": 2, "targets": ("queries",)}}, "it must be one of .query., .key."),
        ({"lora": {"alpha": 8.0}}, "lora.rank is 0, so lora.alpha 8 and lora.targets .* no effect"),
        ({"lora": {"targets": ("key",)}}, r"lora.rank is 0, .* and lora.targets \('key',\) have"),
        ({"optimizer__layer_decay": 1.5}, "optimizer.layer_decay is 1.5"),
        ({"optimizer__head_learning_rate": 0.0}, "optimizer.head_learning_rate is 0.0"),
        ({"training__patience": -1}, "training.patience is -1"),
    ],
)
def test_values_that_do_not_fit_are_refused(files, changes, why):
    with pytest.raises(UserError, match=why):
        set_up(small_config(files, **changes)).step.objective.init(jax.random.key(0))


@pytest.mark.parametrize(
    ("freeze", "entries", "layers"),
    [
        ("embeddings", {"encoder/embeddings"}, 0),
        ("1", {"encoder/embeddings"}, 1),
        ("2", {"encoder/embeddings", "encoder/layers"}, 0),
        ("encoder", {"encoder/embeddings", "encoder/layers", "encoder/final_norm"}, 0),
    ],
)
def test_what_a_configuration_freezes(files, freeze, entries, layers):
    objective = set_up(small_config(files, training__freeze=freeze)).objective
    assert (objective.frozen, objective.frozen_layers) == (entries, layers)


def test_the_metric_that_chooses(files):
    def metric(**changes):
        return set_up(small_config(files, **changes)).task.metric

    table = {"train": files["train"], "dev": files["dev"]}
    of_task = {"kind": "table", "max_length": 16, **table}
    assert metric() == "accuracy"
    assert metric(task={**of_task, "metric": "matthews"}) == "matthews"
    assert metric(table={**table, "metric": "f1"}) == "f1"
    with pytest.raises(UserError, match=r"task.metric is 'pearson'; the metrics of this task are"):
        metric(task={**of_task, "metric": "pearson"})
