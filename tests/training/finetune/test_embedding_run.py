"""An embedding model from a file of pairs to vectors that find what belongs together."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from small_finetuning import small_config, write_config, write_files
from task_examples import put, put_json, read_json_lines

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.main import main
from bert_jax.distributed.parallel.sharding import make_trial_mesh
from bert_jax.errors import UserError
from bert_jax.model.embedding import EmbeddingConfig
from bert_jax.training import loop
from bert_jax.training.finetune import evaluate, report
from bert_jax.training.finetune import train as train_module
from bert_jax.training.finetune.evaluate import evaluate_finetuned
from bert_jax.training.finetune.setup import set_up
from bert_jax.training.steps import trials

PLACES, ANIMALS = ("mat", "hill", "under", "on"), ("cat", "dog")


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
    """Questions that name an animal and a place, sentences of both; another place is no answer."""
    home = tmp_path_factory.mktemp("files")
    found = write_files(home)
    rows = [
        {
            "query": f"{animal} {place}" + " ." * times,
            "document": f"the {animal} sat {place}" + " ." * (times % 2),
            "negatives": [f"the {animal} ran {other}" for other in PLACES if other != place][
                :times
            ],
        }
        for times in range(3)
        for animal in ANIMALS
        for place in PLACES
    ]
    return {**found, "pairs": put_json(home / "pairs.jsonl", *rows)}


def pairs_config(files, **changes):
    section = {"train": files["pairs"], "dev": files["pairs"], "negatives": ["negatives"]}
    task = {"kind": "embedding", "max_length": 16, **section}
    return small_config(files, **({"task": task, "training__batch_size": 8} | changes))


def test_from_pairs_to_vectors(tmp_path, files, capsys):
    """Micro-batches and a sweep: what is saved finds the documents, before it did not."""
    config = pairs_config(
        files, sweep__seeds=2, training__accumulation=2, training__num_epochs=6.0,
        embedding__pooling="weighted", embedding__dimensions=[8], training__dropout_rate=0.0,
    )  # fmt: skip
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    name = write_config(tmp_path / "config.py", config)
    assert main(["finetune", f"--config={name}", f"--workdir={run}"]) == 0
    assert (
        "vectors  the mean of the tokens' states, with learned weights" in capsys.readouterr().out
    )
    outcomes = json.loads((tmp_path / "run" / "statistics.json").read_text())["outcomes"]
    first, last = (outcomes[0]["scores"][n]["ndcg@10"] for n in (0, -1))
    assert last > max(0.8, first)
    assert [outcome["failed"] for outcome in outcomes] == ["", ""]
    model = read_model(tmp_path / "run")
    assert (model.embedding.pooling, model.embedding.dimensions) == ("weighted", (8,))
    assert model.verbs == ("embed",)
    assert model.params["pooling"]["score"].any()
    assert "pooler" not in model.params["encoder"]
    best = max(outcome["best"] for outcome in outcomes)
    assert evaluate_finetuned(tmp_path / "run").scores["ndcg@10"] == pytest.approx(best, abs=1e-5)
    assert main(["predict", run, "--data", files["pairs"], "--out", out]) == 0
    cosines = [each["cosine"] for each in read_json_lines(tmp_path / "out" / "predictions.jsonl")]
    assert np.mean(cosines) > 0.5
    # Vectors are where the next run begins.
    again = set_up(pairs_config(files, init=run, embedding__pooling="weighted"))
    jax.tree.map(np.testing.assert_array_equal, again.start.parts[0], model.params)
    assert set(set_up(pairs_config(files, init=run)).start.parts[0]) == {"encoder"}


def test_linear_maps_of_init_are_left_out_with_a_warning(files, caplog):
    before = read_model(files["init"])
    maps = {"0_tanh": {"kernel": np.ones((16, 8), np.float32)}}
    model = dataclasses.replace(before, params={**before.params, "pooling": {"maps": maps}})
    config = pairs_config(files, embedding__pooling="max")
    setup = set_up(config, lambda *_, **__: model)
    assert "training leaves out the Dense modules after the pooling" in caplog.text
    assert set(setup.start.parts[0]) == {"encoder"}
    assert setup.objective.config == EmbeddingConfig("max")


def test_low_rank_updates_of_vectors(tmp_path, files, capsys):
    """The encoder stays as it was but for the updates, which the saved model has merged."""
    lora = {"rank": 2, "targets": ("query", "value", "down")}
    config = pairs_config(files, lora=lora, training__dropout_rate=0.0)
    name = write_config(tmp_path / "config.py", config)
    run = str(tmp_path / "run")
    assert main(["finetune", f"--config={name}", f"--workdir={run}"]) == 0
    capsys.readouterr()
    outcome = json.loads((tmp_path / "run" / "statistics.json").read_text())["outcomes"][0]
    saved, before = read_model(run), read_model(files["init"])
    assert evaluate_finetuned(run).scores["ndcg@10"] == pytest.approx(outcome["best"], abs=1e-5)
    same = jax.tree.map(
        np.array_equal, saved.params["encoder"]["layers"], before.params["encoder"]["layers"]
    )
    differ = {path[-2].key for path, equal in jax.tree.leaves_with_path(same) if not equal}
    assert differ == set(lora["targets"])
    assert main(["export", run, "--to", "peft", "--out", str(tmp_path / "out")]) == 2
    assert "needs a task head" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "fresh"}, "vectors have no head"),
        ({"pooling": "mean"}, "which is for classification; leave pooling"),
        ({"embedding__dimensions": [32]}, "vectors have 16 numbers"),
        ({"task": {"kind": "table"}, "embedding__symmetric": True}, "the section embedding is set"),
    ],
)
def test_what_does_not_fit(files, changes, message):
    if "task" in changes:
        table = {"train": files["train"], "dev": files["dev"]}
        changes = {**changes, "task": {"kind": "table", "max_length": 16, **table}}
    with pytest.raises(UserError, match=message):
        set_up(pairs_config(files, **changes))


def test_texts_alone_need_dropout(files, tmp_path):
    path = put(tmp_path / "a.csv", "text", *[f"the cat sat on a mat {'.' * n}" for n in range(6)])
    section = {"rows": "texts", "train": path, "dev": path}
    task = {"kind": "embedding", "max_length": 16, **section}
    assert set_up(small_config(files, task=task)).objective.comparison == "ranking"
    with pytest.raises(UserError, match=r"set training\.dropout_rate above 0"):
        set_up(small_config(files, task=task, training__dropout_rate=0.0))
