"""Probes: the task of a recipe is fine-tuned from a pretraining run's encoder, and scored."""

import json

import numpy as np
import pytest
from small_finetuning import write_config
from small_run import small_config, write_corpus

from bert_jax.artefacts.saved.runs import RUN_FORMAT
from bert_jax.config.mapping import build, to_dict
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.training.finetune.config import FinetuneConfig, FinetuneOptimizerConfig
from bert_jax.training.finetune.setup import with_rates
from bert_jax.training.pretrain import probes
from bert_jax.training.pretrain.probes import Probe, _recipe
from bert_jax.training.pretrain.train import resolve_pretraining, train
from bert_jax.training.run.telemetry import read_metrics

pytestmark = pytest.mark.usefixtures("reused_steps")

SHORT = {
    "training__num_steps": 4,
    "training__phases": [{"length": 32, "batch_size": 16}],
    "training__eval_every_steps": 0,
    "training__log_every_steps": 1,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def recipe(directory, name, **sections) -> str:
    """A recipe for rows of low or high numbers, which one pass learns."""
    random = np.random.default_rng(3)
    for part, count in (("train", 64), ("dev", 32)):
        rows = ["text,label"]
        for number in range(count):
            low = number % 2
            words = random.integers(5 if low else 34, 34 if low else 64, 6)
            rows.append(f"{' '.join(map(str, words))},{'low' if low else 'high'}")
        (directory / f"{part}.csv").write_text("\n".join(rows) + "\n")
    task = {"train": str(directory / "train.csv"), "dev": str(directory / "dev.csv")}
    values = {"task": task, "optimizer": {"learning_rate": 1e-2}, **sections}
    return write_config(directory / f"{name}.py", build(FinetuneConfig, values))


def test_probes_score_the_encoder_and_change_nothing(corpus, tmp_path):
    """Each when it is due and after the last step, in rows, lines and, by name, the picture."""
    probes = [
        {"recipe": recipe(tmp_path, "numbers"), "every_steps": 2, "num_steps": 12},
        {"recipe": recipe(tmp_path, "head", training={"freeze": "encoder"}), "every_steps": 3,
         "num_steps": 3},
    ]  # fmt: skip
    said: dict[str, list[str]] = {"without": [], "with": []}
    for name, lines in said.items():
        given = {"training__probes": probes} if name == "with" else {}
        config = small_config(**SHORT, **given)
        assert train(config, tmp_path / name, corpus=corpus, echo=lines.append).finished
    rows, plain = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("with", "without"))
    numbers, head = "eval/probe/numbers/accuracy", "eval/probe/head/accuracy"
    assert [row["step"] for row in rows if numbers in row] == [2, 4]
    assert [row["step"] for row in rows if head in row] == [3, 4]
    assert rows[-1][numbers] > 0.9
    assert 0 <= rows[-1][head] <= 1
    for row, expected in zip(rows, plain, strict=True):
        kept = {name: value for name, value in row.items() if "probe/" not in name}
        same = [name for name in kept if not name.startswith("perf/")]
        assert [kept[name] for name in same] == [expected[name] for name in same]
    line = f"probe numbers/accuracy at step 4: {rows[-1][numbers]:.4g}"
    assert line in said["with"]
    assert not (tmp_path / "with" / "resume").exists()
    record = json.loads((tmp_path / "with" / "config.json").read_text())
    assert [probe["num_steps"] for probe in record["config"]["training"]["probes"]] == [12, 3]


def test_a_recipe_without_a_rate_is_one_run_with_the_rate_of_the_width(corpus, tmp_path):
    """Few rows make a sweep in fine-tuning, but a probe is a single run."""
    given = {"recipe": recipe(tmp_path, "numbers", optimizer={}), "num_steps": 2}
    config = small_config(**SHORT, training__probes=[given])
    plan = resolve_pretraining(config, open_workdir(tmp_path / "work"), corpus)
    (probe,) = (scorer for scorer in plan.scorers if isinstance(scorer, Probe))
    setup, _, _ = probe._of_stages[0]
    rate = FinetuneOptimizerConfig.rate_of(config.model.hidden_dim)
    assert [trial.learning_rate for trial in setup.schedule.waves[0]] == [rate]
    assert setup.config.optimizer.head_learning_rate == max(rate, 1e-3)  # as in fine-tuning


def test_the_work_directory_of_a_run_is_a_recipe(tmp_path):
    """Although fine-tuning has filled in a sweep for its few rows."""
    table = {"train": str(tmp_path / "train.csv")}
    config = with_rates(build(FinetuneConfig, {"task": table}), 16, num_rows=64)
    assert len(config.sweep.learning_rates) == 3
    record = {"bert_jax": "0", "format": RUN_FORMAT, "kind": "finetune", "config": to_dict(config)}
    (tmp_path / "config.json").write_text(json.dumps(record))
    found = _recipe(str(tmp_path), "here")
    assert found.learning_rates == (config.optimizer.learning_rate,)


def test_static_queries_of_a_probe_have_the_weights_of_fine_tuning(corpus, tmp_path, monkeypatch):
    """All tokens of queries weighed 1, although embedding.queries was idf."""
    rows = ["query,document", *(f"{5 + n} 60,{5 + n} 60 {6 + n} {7 + n}" for n in range(20))]
    for part in ("train", "dev"):
        (tmp_path / f"{part}.csv").write_text("\n".join(rows) + "\n")
    task = {"kind": "embedding"} | {n: str(tmp_path / f"{n}.csv") for n in ("train", "dev")}
    vectors = {"pooling": "splade", "queries": "idf"}
    values = {"task": task, "embedding": vectors, "optimizer": {"learning_rate": 1e-3}}
    name = write_config(tmp_path / "search.py", build(FinetuneConfig, values))
    config = small_config(**SHORT, training__probes=[{"recipe": name, "num_steps": 1}])
    plan = resolve_pretraining(config, open_workdir(tmp_path / "work"), corpus)
    (probe,) = (scorer for scorer in plan.scorers if isinstance(scorer, Probe))
    found = []

    def stop(_config, setup, *_):
        found.append(setup.start.inits["the run"])
        raise InterruptedError

    monkeypatch.setattr(probes, "FinetuneSaves", stop)
    now = plan.saves.begin(0, plan.stages[0])
    with pytest.raises(InterruptedError):
        probe.score(now.state.params, now, lambda _: None)
    weights = found[0]["queries"]
    assert 0 < weights[60] < weights[10]  # a token of every document, a token of three


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sweep": {"seeds": 2}}, "which sets sweep; a probe is a single run"),
        ({"reinitialise": True}, "which sets reinitialise; a probe is a single run"),
        ({"head": "keep"}, "the run has no task head"),
    ],
)
def test_what_a_probe_cannot_be_is_refused_before_the_first_step(
    corpus, tmp_path, sections, message
):
    probe = {"recipe": recipe(tmp_path, "numbers", **sections)}
    config = small_config(**SHORT, training__probes=[probe])
    with pytest.raises(UserError, match=message):
        train(config, tmp_path / "work", corpus=corpus, echo=lambda _: None)
    assert not list((tmp_path / "work").glob("*.json*"))


def test_names_of_probes_differ():
    with pytest.raises(UserError, match="each recipe a different name"):
        small_config(training__probes=[{"recipe": "a/topics.py"}, {"recipe": "b/topics.py"}])
    with pytest.raises(UserError, match="give each probe a recipe"):
        small_config(training__probes=[{"every_steps": 3}])
