"""Candidates for the record: what their layers, objectives and optimizers compute."""

import dataclasses
import importlib
import json
import runpy
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_texts import make_text
from small_run import write_corpus
from task_examples import TOKENIZER, put

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.config.command_line import config_from, load_config
from bert_jax.errors import UserError
from bert_jax.objectives.objective import trained
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.saves import read_config
from bert_jax.training.pretrain.settings import objective_of, step_config
from bert_jax.training.steps.optim import OPTIMIZERS, make_optimizer

RECIPE = Path(__file__).parents[1] / "records" / "recipes" / "candidates" / "recipe.py"
SMALL = {
    "model.hidden_dim": 32, "model.num_heads": 2, "model.mlp_dim": 32, "model.vocab_size": 64,
    "model.dtype": "float32",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def modules():
    """The modules of the recipe, until the end of this file's tests."""
    before, known = [*sys.path], {*OPTIMIZERS}
    sys.path.append(str(RECIPE.parent))
    yield
    sys.path[:] = before
    for name in {*OPTIMIZERS} - known:
        del OPTIMIZERS[name]


def made(names, **changes):
    """The configuration and objective of candidates, at a small size."""
    config = config_from(PretrainConfig, load_config(PretrainConfig, f"{RECIPE}:{names}"), SMALL)
    config = config_from(PretrainConfig, config, changes) if changes else config
    objective = objective_of(config)
    return config, dataclasses.replace(objective, special_ids=SpecialIds(*range(5)))


def rows(count=8, length=24):
    tokens = np.random.default_rng(0).integers(5, 64, (count, length))
    tokens[:, 0] = 2
    segments = np.ones_like(tokens)
    segments[-1, length // 2 :] = 0
    return {
        "tokens": jnp.asarray(tokens, jnp.int32), "segment_ids": jnp.asarray(segments, jnp.int32),
        "type_ids": jnp.zeros(tokens.shape, jnp.int32), "row_index": jnp.arange(count),
    }  # fmt: skip


def loss_of(objective, params, batch):
    sums = objective.forward(params, batch, None, None).sums
    return float(sums["mlm_loss"] / sums["mlm_count"])


def test_the_time_of_a_step_is_the_mean_of_its_phases(monkeypatch):
    """Only the first phase was timed."""
    monkeypatch.syspath_prepend(str(RECIPE.parents[3] / "benchmarks"))
    candidates = importlib.import_module("candidates")

    def stepper(config, corpus, phase=0):
        assert corpus == config.corpus
        took = config.took[phase]
        return lambda number: SimpleNamespace(seconds=took if number > 1 else 100.0)

    monkeypatch.setattr(candidates, "stepper", stepper)
    same = SimpleNamespace(took=[2.0], corpus="text")
    phases = [SimpleNamespace(num_steps=number) for number in (30, 10)]
    changed = SimpleNamespace(took=[4.0, 1.0], phases=phases, corpus="own text")
    assert candidates.relative_time(same, changed, "text", "own text") == (30 * 4 + 10 * 1) / 40 / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grown", "taught", "averaged"])
def test_candidates_of_several_runs_share_the_time(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE.parents[3] / "benchmarks"))
    candidates, staged = map(importlib.import_module, ("candidates", "staged_candidates"))
    monkeypatch.setattr(candidates, "relative_time", lambda same, config, corpus, own: 0.5)
    monkeypatch.setattr(staged, "BETWEEN", 2)
    corpus = write_corpus(tmp_path / "corpus")
    asked = Namespace(corpus=str(tmp_path / "corpus"), seed=0, steps=6, runs=tmp_path)
    row = staged.staged(name, asked, corpus)
    assert row["loss"] > 0
    runs = tmp_path / f"{name}-0"
    configs = {path.stem: read_config(path.with_suffix("")) for path in runs.glob("*.json")}
    steps = {run: config.training.num_steps for run, config in configs.items()}
    if name == "grown":
        assert steps == {"small": 4, "large": 8}
        assert configs["small"].model.num_layers == 1
        assert configs["large"].init == str(runs / "grown")
        assert read_model(runs / "large").config.num_layers == 2
    elif name == "taught":
        assert steps == {"teacher": 3, "student": 9}
        assert configs["student"].distil.teacher == str(runs / "teacher")
    else:
        assert (steps, row["steps"]) == ({"run": 12}, 12)
        assert row["loss"] != row["last"]
        sources = json.loads((runs / "average" / "config.json").read_text())["average"]["sources"]
        assert [source["step"] for source in sources] == [4, 6, 8, 10, 12]


def test_every_candidate_is_a_recipe():
    names = runpy.run_path(str(RECIPE))["CANDIDATES"]
    same = load_config(PretrainConfig, f"{RECIPE}:same")
    configs = {name: load_config(PretrainConfig, f"{RECIPE}:{name}") for name in names}
    assert [name for name, config in configs.items() if config == same] == ["same"]
    both = load_config(PretrainConfig, f"{RECIPE}:qk_norm+rate_6e-3+gates")
    assert both.objective.changes == ("qk_norm", "gates")
    assert both.optimizer.learning_rate == 6e-3
    with pytest.raises(UserError, match="no candidate is named 'qk'; known are same, "):
        load_config(PretrainConfig, f"{RECIPE}:qk")
    with pytest.raises(UserError, match=r"objective.changes has {'gate'}; known are qk_norm, "):
        config_from(PretrainConfig, same, {"objective.changes": ["gate"]})


@pytest.fixture(scope="module")
def same():
    """Objective without changes, parameters that are not at their initial zeros, and a batch."""
    _, objective = made("same")
    params = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
        objective.init(jax.random.key(0)),
    )
    return objective, params, objective.prepare(rows(), 0)


def test_without_changes_it_is_the_masked_lm_of_rows_64(same):
    objective, params, batch = same
    recipe = RECIPE.parents[1] / "rows_64" / "recipe.py"
    other = objective_of(
        config_from(PretrainConfig, load_config(PretrainConfig, str(recipe)), SMALL)
    )
    assert jax.tree.map(jnp.shape, other.init(jax.random.key(0))) == jax.tree.map(jnp.shape, params)
    assert loss_of(objective, params, batch) == pytest.approx(
        loss_of(other, params, batch), rel=1e-6
    )


@pytest.mark.parametrize("change", ["gates", "embedding_shortcut", "qk_norm", "value_residual"])
def test_some_changes_begin_as_identities(same, change):
    objective, params, batch = same
    _, changed = made(change)
    own = changed.init(jax.random.key(0))
    layers = own["encoder"]["layers"] | params["encoder"]["layers"]
    merged = params | {"encoder": params["encoder"] | {"layers": layers}}
    equal = loss_of(changed, merged, batch) == pytest.approx(loss_of(objective, params, batch))
    assert equal == (change in ("gates", "embedding_shortcut"))


@pytest.mark.parametrize(("name", "zero"), [("same", False), ("zero_outputs", True)])
def test_output_projections_begin_at_zero(name, zero):
    params = made(name)[1].init(jax.random.key(0))
    kernels = params["encoder"]["layers"]["mlp"]["down"]["kernel"], params["mlm"]["dense"]["kernel"]
    assert all(np.any(kernel) != zero for kernel in kernels)
    assert np.any(params["encoder"]["layers"]["mlp"]["up"]["kernel"])


def test_squared_relu_is_what_it_says(same):
    _, changed = made("squared_relu", **{"model.mlp_dim": 48})
    params = changed.init(jax.random.key(0))
    layers = params["encoder"]["layers"]
    assert {*layers["mlp"]} == {"up", "down"}

    def loss(part, factor):
        scaled = jax.tree.map(lambda leaf: factor * leaf, layers["mlp"][part])
        encoder = params["encoder"] | {"layers": layers | {"mlp": layers["mlp"] | {part: scaled}}}
        return loss_of(changed, params | {"encoder": encoder}, same[2])

    assert loss("up", 8) == pytest.approx(loss("down", 64))  # 8 times the input of a square
    assert loss("up", 8) != pytest.approx(loss("up", 1))


def test_a_causal_row_predicts_each_token_from_earlier_ones():
    _, objective = made("causal_half")
    params = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
        objective.init(jax.random.key(0)),
    )
    batch = objective.prepare(rows(), 0)
    assert jnp.array_equal(batch["tokens"][:4], rows()["tokens"][:4])
    assert not jnp.array_equal(batch["tokens"][4:], rows()["tokens"][4:])
    _, loss, _ = objective.at_places(params, batch, None, None)
    at = int(batch["positions"][0, 1])
    later = batch | {"tokens": batch["tokens"].at[:, at].set(9)}
    _, changed, _ = objective.at_places(params, later, None, None)
    np.testing.assert_allclose(changed[0, :2], loss[0, :2], rtol=1e-5)
    assert not np.allclose(changed[0, 2:], loss[0, 2:])
    assert not np.allclose(changed[4], loss[4])
    assert jnp.array_equal(objective.for_evaluation().prepare(rows(), 0)["labels"], batch["labels"])


def test_rows_of_a_diffusion_have_rates_and_weights_of_their_own():
    _, objective = made("diffusion")
    batch = objective.prepare(rows(400), 0)
    weights = np.asarray(batch["weights"])
    count = (weights > 0).sum(1)
    rates = 0.6 / weights.max(1)
    assert rates.min() >= 0.05
    assert rates.max() <= 0.6
    assert rates.mean() == pytest.approx(0.325, abs=0.03)
    np.testing.assert_allclose(count[:-1], rates[:-1] * 24, atol=0.51)
    plain = objective.for_evaluation().prepare(rows(400), 0)["weights"]
    assert set(np.unique(plain)) == {0, 1}


def test_spans_are_masked_as_wholes():
    _, objective = made("spans")
    given = rows(200)
    batch = {name: np.asarray(value) for name, value in objective.prepare(given, 0).items()}
    used = batch["weights"] > 0
    tokens = np.asarray(given["tokens"])
    at = np.where(used, batch["positions"], 0)
    assert (np.take_along_axis(tokens, at, 1) == batch["labels"])[used].all()
    assert (used.sum(1)[:-1] == 7).all()  # 30% of 24
    chosen = np.zeros_like(tokens, bool)
    np.put_along_axis(chosen, at, True, 1)
    neighbours = (chosen[:-1, 1:-1] & (chosen[:-1, 2:] | chosen[:-1, :-2])).sum()
    assert neighbours / chosen[:-1, 1:-1].sum() > 0.8  # 0.5 if tokens are chosen one by one
    masked = (batch["tokens"] == objective.special_ids.mask)[chosen & (tokens > 4)]
    assert masked.mean() == pytest.approx(0.8, abs=0.05)
    assert (batch["tokens"] == tokens)[~chosen].all()


def test_rare_tokens_are_masked_more_often():
    _, objective = made("rare")
    given = rows(400)
    batch = objective.prepare(given, 0)
    used = batch["weights"] > 0
    assert (used.sum(1)[:-1] == 7).all()  # 30% of 24
    labels, tokens = np.asarray(batch["labels"])[used], np.asarray(given["tokens"])[:, 1:]

    def rate(low: int, high: int) -> float:
        """Share of the tokens with ids from `low` to `high` that are masked, up to a factor."""
        inside = [(low <= ids) & (ids < high) for ids in (labels, tokens)]
        return np.mean(inside[0]) / np.mean(inside[1])

    assert 2 < rate(50, 64) / rate(5, 10) < 3  # 2.7, if few tokens were masked
    plain = objective.for_evaluation().prepare(given, 0)
    assert np.mean(np.asarray(plain["labels"])[used] < 10) > np.mean(labels < 10) * 1.5


def test_the_first_phase_may_be_causal():
    config, _ = made("causal_first")
    first, second = (objective_of(config, phase) for phase in (0, 1))
    special = SpecialIds(*range(5))
    first, second = (dataclasses.replace(each, special_ids=special) for each in (first, second))
    given = rows()
    assert jnp.array_equal(first.prepare(given, 0)["tokens"], given["tokens"])
    assert not jnp.array_equal(second.prepare(given, 0)["tokens"], given["tokens"])
    params = first.init(jax.random.key(0))
    batch = first.prepare(given, 0)
    losses = [each.at_places(params, batch, None, None)[1] for each in (first, second)]
    assert not np.allclose(*losses)
    scored = first.for_evaluation().prepare(given, 0)
    assert not jnp.array_equal(scored["tokens"], given["tokens"])


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """The batch on which the evaluation of a candidate is computed, by name."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    own = {"model.vocab_size": corpus.train.vocab_size, "masking.eval_rate": 0.31}

    def batch(name):
        objective = step_config(made(name, **own)[0], corpus, evaluates=True).objective
        continues = np.arange(corpus.train.vocab_size) % 2 == 1
        return dataclasses.replace(objective, continues_word=continues).prepare(rows(), 3)

    return batch


@pytest.mark.parametrize(
    "name",
    [
        "masking_40", "all_mask", "whole_words", "spans", "rare", "diffusion", "causal_quarter",
        "causal_half", "causal_first",
    ],
)  # fmt: skip
def test_changes_of_the_objective_do_not_change_the_evaluation(scored, name):
    jax.tree.map(np.testing.assert_array_equal, scored(name), scored("same"))


def steps_of(name):
    """One step of a candidate's optimizer and its Muon, with the gradient that both take."""
    config, objective = made(name)
    params = objective.init(jax.random.key(0))
    gradients = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape), trained(objective, params)
    )
    found = []
    for each in (config.optimizer.name, "muon"):
        how = dataclasses.replace(config.optimizer, name=each, weight_decay=0.0)
        optimizer = make_optimizer(how, 100, objective.axes())
        step, _ = optimizer.update(gradients, optimizer.init(params), params)
        found.append(step)
    return gradients, *found


@pytest.mark.parametrize(
    "name",
    ["polar_express", "adaptive", "cautious", "even_rows", "fast_adam", "slow_table", "adam_head"],
)
def test_each_optimizer_changes_the_step_as_it_says(name):
    gradients, step, muon = steps_of(name)
    table = lambda tree: np.asarray(tree["encoder"]["embeddings"]["token"])  # noqa: E731
    kernel = lambda tree: np.asarray(tree["encoder"]["layers"]["mlp"]["up"]["kernel"])  # noqa: E731
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(step))
    if name in ("fast_adam", "slow_table", "adam_head"):
        factor = {"fast_adam": 3, "slow_table": 1 / 3}.get(name, 1)
        np.testing.assert_allclose(table(step), factor * table(muon), rtol=1e-5)
        np.testing.assert_allclose(kernel(step), kernel(muon), rtol=1e-5)
        bias, before = (np.asarray(tree["mlm"]["bias"]) for tree in (step, muon))
        np.testing.assert_allclose(bias, (3 if name == "fast_adam" else 1) * before, rtol=1e-5)
        heads = [np.asarray(tree["mlm"]["dense"]["kernel"]) for tree in (step, muon)]
        narrow = [np.ptp(np.linalg.svd(head, compute_uv=False)) < head.max() for head in heads]
        assert narrow == [name != "adam_head", True]
        return
    if name != "cautious":
        np.testing.assert_allclose(table(step), table(muon), rtol=1e-5)
    assert not np.allclose(kernel(step), kernel(muon), rtol=0.01)
    if name == "cautious":
        along = kernel(step) * kernel(gradients) > 0  # a step goes against the gradient
        assert not along.any()
        assert 0.5 < (kernel(step) != 0).mean() < 1
    if name == "even_rows":
        lengths = np.sqrt(np.square(kernel(step)).mean(1))
        np.testing.assert_allclose(lengths, lengths[:, :1] * np.ones_like(lengths), rtol=1e-4)
    if name == "polar_express":
        values = np.linalg.svd(kernel(step)[0], compute_uv=False)
        others = np.linalg.svd(kernel(muon)[0], compute_uv=False)
        assert values.max() / values.min() < others.max() / others.min()


@pytest.mark.slow
def test_candidates_of_data_train_on_the_text_that_they_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE.parents[3] / "benchmarks"))
    candidates, data = map(importlib.import_module, ("candidates", "data_candidates"))
    monkeypatch.setattr(candidates, "relative_time", lambda same, config, corpus, own: 0.5)
    monkeypatch.setattr(data, "VOCABULARIES", {"vocab_150": 150})
    monkeypatch.setattr(data, "LINES", 2)
    monkeypatch.setattr(data, "WORDS", range(1, 12))  # tokens are letters
    texts = {name: make_text(60, seed=seed) for seed, name in enumerate(("text", "bulk", "unseen"))}
    files = {name: Path(put(tmp_path / f"{name}.txt", text)) for name, text in texts.items()}
    built = data.built(tmp_path / "corpus", texts["text"], TOKENIZER)
    asked = Namespace(corpus=built, seed=0, steps=6, runs=tmp_path / "runs", **files)
    found = {
        name: data.with_data(name, asked, open_corpus(built))
        for name in ("same", "quarter", "copies", "vocab_150", "bulk_then_text")
    }
    assert {name: row["steps"] for name, row in found.items()} == dict.fromkeys(found, 6) | {
        "vocab_150": 12
    }
    assert len({row["masked"] for row in found.values()}) == len(found)
    corpora = {path.name: open_corpus(str(path)) for path in tmp_path.glob("runs/corpora/*/")}
    documents = {
        name: corpus.train.num_documents + corpus.heldout.num_documents
        for name, corpus in corpora.items()
    }
    assert documents == {"quarter": 15, "copies": 60 + 4 * 12, "vocab_150": 60, "bulk": 60}
    first, last = read_config(tmp_path / "runs" / "bulk_then_text-0").training.phases
    assert (first.corpus, last.corpus) == (str(tmp_path / "runs" / "corpora" / "bulk"), built)
    assert read_model(tmp_path / "runs" / "vocab_150-0").config.vocab_size == 150


def test_nats_per_word_are_divided_by_words_not_tokens(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE.parents[3] / "benchmarks"))
    data = importlib.import_module("data_candidates")
    monkeypatch.setattr(data, "read_model", lambda run: None)
    monkeypatch.setattr(data, "on_device", lambda model: model)
    seen = []

    def scores(model, pairs):
        seen.extend(pair.fields["sentence_good"] for pair in pairs)
        return -np.ones((len(pairs), 2, 2)) * 6.0

    monkeypatch.setattr(data, "pair_scores", scores)
    lines = [f"{number} " + "word " * number for number in range(50)] * 20
    text = Path(put(tmp_path / "unseen.txt", *lines))
    words = [len(line.split()) for line in lines]
    assert data.nats_per_word(tmp_path, text) == pytest.approx(
        6.0 * len(seen) / sum(len(line.split()) for line in seen)
    )
    assert len(seen) == 300
    assert {len(line.split()) for line in seen} == {each for each in words if 8 <= each <= 40}
