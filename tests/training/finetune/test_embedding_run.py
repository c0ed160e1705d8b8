"""An embedding model from a file of pairs to vectors that find what belongs together."""

import dataclasses
import functools
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_finetuning import small_config, write_config, write_files
from small_saved import small_saved
from task_examples import opened, put, put_json, read_json_lines

import bert_jax
from bert_jax.artefacts.saved.model import Origin
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.main import main
from bert_jax.config.mapping import build
from bert_jax.data.corpus.overlap.evaluation import text_key
from bert_jax.distributed.parallel.sharding import make_trial_mesh
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.infer.forward import on_device
from bert_jax.infer.search.index import Reranker
from bert_jax.model.embedding import EmbeddingConfig
from bert_jax.objectives.distillation import DistillationConfig
from bert_jax.tasks.config import TaskConfig
from bert_jax.training import loop
from bert_jax.training.finetune import evaluate, report
from bert_jax.training.finetune import start as finetune_start
from bert_jax.training.finetune import train as train_module
from bert_jax.training.finetune.evaluate import evaluate_finetuned, split_outputs
from bert_jax.training.finetune.setup import set_up
from bert_jax.training.progress import Means, Moment, Progress
from bert_jax.training.steps import trials
from bert_jax.training.steps.trials import init_trials

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


def test_other_pooling_and_prefixes_than_those_of_init_are_named(files, caplog):
    embedding = EmbeddingConfig("cls", query_prefix="query: ")
    model = dataclasses.replace(read_model(files["init"]), embedding=embedding)
    set_up(pairs_config(files, embedding__pooling="cls"), lambda *_, **__: model)
    assert "has the query_prefix 'query: ', but this run has ''" in caplog.text
    assert "has the pooling" not in caplog.text
    caplog.clear()
    config = pairs_config(files, embedding__pooling="cls")
    task = dataclasses.replace(config.task, query_prefix="query: ")
    set_up(dataclasses.replace(config, task=task), lambda *_, **__: model)
    assert "query_prefix" not in caplog.text


def test_a_metric_that_every_ranking_reaches_is_refused(files):
    """Each run ended with 8: nothing is better than a random ranking."""
    config = pairs_config(files)
    task = dataclasses.replace(config.task, metric="recall@100")
    with pytest.raises(UserError, match="every ranking scores 1; choose another metric"):
        set_up(dataclasses.replace(config, task=task))


def test_vectors_keep_no_activation_of_a_pooler(files):
    """Transformers has no bare BERT with the activation of a DistilBERT's classifier, relu."""
    before = read_model(files["init"])
    config = dataclasses.replace(before.config, pooler_activation="relu")
    model = dataclasses.replace(before, config=config)
    setup = set_up(pairs_config(files), lambda *_, **__: model)
    assert setup.objective.model.pooler_activation == "tanh"


def test_sparse_vectors_begin_with_weights_of_few_tokens(files, monkeypatch):
    """One number is taken from all logits, so the probabilities of masked tokens stay the same."""
    monkeypatch.setattr("bert_jax.training.finetune.start._WEIGHED", 4)
    setup = set_up(pairs_config(files, embedding__pooling="splade"))
    (start,) = setup.start.inits.values()
    saved = read_model(setup.config.init)
    taken = np.asarray(saved.params["mlm"]["bias"] - start["mlm"]["bias"])
    assert taken[0] > 0.01
    np.testing.assert_allclose(taken, taken[0], rtol=1e-5)
    batch = {name: array[0] for name, array in next(setup.rows_of(0, 0)).items()}  # of a trial
    inputs = jax.tree.map(jnp.asarray, (start, batch))
    vectors = setup.step.objective.represent(*inputs, None, None)
    given = batch["text_ids"] >= 0
    assert 2 < np.count_nonzero(vectors[given], axis=-1).mean() < 6


def test_sparse_vectors_begin_with_a_head_without_parameters(files):
    """Tied, without transform and bias: there is no entry in the checkpoint, an empty one here."""
    model = small_saved("mlm", head_transform=False, decoder_bias=False, pooler=False)
    model = dataclasses.replace(model, params={**model.params, "mlm": {}})
    config = pairs_config(files, embedding__pooling="splade")
    setup = set_up(config, lambda *_, **__: model)
    (start,) = setup.start.inits.values()
    assert start.keys() == {"encoder"}
    batch = {name: array[0] for name, array in next(setup.rows_of(0, 0)).items()}
    represent = partial(setup.step.objective.represent, seed=None, layout=None)
    assert jax.eval_shape(represent, start, batch).shape[-1] == model.config.vocab_size


def nudged(compute):
    """A function that computes the same, with the next larger floats."""
    return lambda *args, **how: jax.tree.map(
        lambda array: np.nextafter(array, np.float32(9)), compute(*args, **how)
    )


def test_another_machine_may_compute_other_last_digits(files, monkeypatch):
    """The digest of init knows the model, not the bias and the weights that a machine computes."""
    config = pairs_config(files, embedding__pooling="splade", embedding__queries="idf")
    here = set_up(config)
    for name in ("with_few_tokens", "token_weights"):
        monkeypatch.setattr(finetune_start, name, nudged(getattr(finetune_start, name)))
    there = set_up(config)
    (ours,), (theirs,) = (setup.start.inits.values() for setup in (here, there))
    assert np.all(ours["mlm"]["bias"] < theirs["mlm"]["bias"])
    assert np.any(ours["queries"] < theirs["queries"])
    assert there.fingerprints == here.fingerprints


def test_from_pairs_to_sparse_vectors(tmp_path, files, capsys):
    """Static queries keep their weights, rarities of the training documents."""
    config = pairs_config(
        files, training__num_epochs=30.0, training__dropout_rate=0.0, embedding__pooling="splade",
        embedding__queries="idf", embedding__document_flops=1e-3,
    )  # fmt: skip
    run, name = str(tmp_path / "run"), write_config(tmp_path / "config.py", config)
    assert main(["finetune", f"--config={name}", f"--workdir={run}"]) == 0
    assert "vectors  sparse, a weight for each token" in capsys.readouterr().out
    outcome = json.loads((tmp_path / "run" / "statistics.json").read_text())["outcomes"][0]
    first, last = (outcome["scores"][n]["ndcg@10"] for n in (0, -1))
    assert last > first + 0.2  # a query that repeats a token is the same query without it
    assert evaluate_finetuned(run).scores["ndcg@10"] == pytest.approx(outcome["best"], abs=1e-5)
    saved = read_model(run)
    token = {word: int(saved.tokenizer.encode(word).ids[0]) for word in ("cat", "the", "mat")}
    weight = saved.params["queries"]
    documents, of_cat = 32, 16  # each sentence, and each with a full stop
    assert weight[token["cat"]] == pytest.approx(np.log1p(documents / (of_cat + 0.5) - 1), abs=0.1)
    assert weight[token["the"]] < weight[token["cat"]] < weight[token["mat"]]
    model = bert_jax.load(run)
    (query,) = model.embed(["the cat the cat"], kind="query")
    assert {n: query[n] for n in np.flatnonzero(query)} == {
        token[word]: weight[token[word]] for word in ("the", "cat")
    }
    assert main(["embed", run, "the cat", "--kind=query", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    listed = json.loads(line)["embedding"]
    assert list(listed) == ["cat", "the"]
    assert listed["cat"] == pytest.approx(weight[token["cat"]])
    with pytest.raises(UserError, match="sparse vectors"):
        model.embed(["the cat"], dimensions=8)
    (tmp_path / "text.txt").write_text("the cat sat")
    assert main(["index", run, str(tmp_path / "text.txt"), f"--out={tmp_path}/i.parquet"]) == 2
    assert "makes sparse vectors, but an index has dense ones" in capsys.readouterr().err


@pytest.mark.parametrize(("loss", "first"), [("contrast", 0.3), ("margin_mse", 1.0)])
def test_a_reranker_and_its_first_stage(tmp_path, files, capsys, loss, first):
    """The score of a pair puts the answer above its negatives, or a warning says that it does not.

    The first stage ranks the document first where `first` is 1, last else.
    """
    rows = [
        {**row, "scores": [first, *(0.5 + n / 9 for n, _ in enumerate(row["negatives"]))]}
        for row in read_json_lines(Path(files["pairs"]))
    ]
    path = put_json(tmp_path / "mined.jsonl", *rows)
    task = {
        "kind": "rerank", "max_length": 16, "train": path, "dev": path, "scores": "scores",
        "loss": loss, "negatives": ["negatives"],
    }  # fmt: skip
    config = pairs_config(files, task=task, training__num_epochs=8.0, training__dropout_rate=0.0)
    run, name = str(tmp_path / "run"), write_config(tmp_path / "config.py", config)
    code = main(["finetune", f"--config={name}", f"--workdir={run}"])
    said = capsys.readouterr()
    best = json.loads((tmp_path / "run" / "statistics.json").read_text())["outcomes"][0]["best"]
    if first == 1:
        assert code == 8
        assert "and the first stage (task.scores) has 1. Try" in said.err
        return
    assert (code, "(the first stage (task.scores) has" in said.out) == (0, True)
    assert best > 0.8
    assert evaluate_finetuned(run).scores["ndcg@10"] == pytest.approx(best, abs=1e-5)
    model = read_model(run)
    assert (model.outputs.objective, model.verbs) == ("regression", ("classify", "embed"))
    row = rows[-1]
    texts = [row["document"], *row["negatives"]]
    scores = Reranker(on_device(model)).scores([row["query"]] * 3, texts)
    assert main(["predict", run, "--data", path, "--out", f"{tmp_path}/out"]) == 0
    predicted = read_json_lines(tmp_path / "out" / "predictions.jsonl")
    np.testing.assert_allclose(predicted[-1]["scores"], scores, atol=1e-5)
    # The next run goes on from its head; there are no lists of a teacher to learn from.
    again = set_up(dataclasses.replace(config, init=run, head="keep"))
    jax.tree.map(np.testing.assert_array_equal, again.start.parts[0], model.params)
    distil = DistillationConfig(run)
    with pytest.raises(UserError, match=r"task\.kind is 'rerank'; only classes, scores, tags"):
        set_up(dataclasses.replace(config, init=run, distil=distil))


def scores_of(config, workdir, monkeypatch):
    """Dev and test scores of a run's first parameters, as the run and as `evaluate` get them."""
    monkeypatch.setattr(report, "write_reports", lambda *_, **named: None)
    setup = set_up(config)
    mesh = make_trial_mesh(setup.config.mesh, 1, jax.devices()[:1])
    state = init_trials(setup.step, mesh, np.array([6]), setup.start.parts, np.array([0]))
    scorer = report.TaskScorer(setup.config, setup, mesh, open_workdir(workdir))
    progress = Progress(setup.schedule.waves[0][0])
    at = Moment(0, 1, state.train, [progress], Means(1), best=state.best)
    ((dev, *_),) = scorer.score(state.params, at, lambda _: None)
    progress.take(1, 1.0, dev, setup.task.metric)
    (test,) = scorer.conclude(at, lambda _: None)
    params = jax.tree.map(lambda leaf: leaf[0], state.params)
    model = dataclasses.replace(
        setup.initial, params=params, embedding=setup.objective.config,
        origin=Origin("finetune", task=setup.task),
    )  # fmt: skip
    return [dev, test], [each.score(split_outputs(model, each)) for each in setup.splits[1:]]


@pytest.mark.parametrize(
    ("dev", "more"),
    [
        ({"negatives": ["the dog ran here"]}, {"rows": "pairs"}),
        ({"negatives": []}, {"dev_rows": "scores", "loss": "kl"}),
    ],
)
def test_groups_of_dev_and_test_may_be_smaller_than_those_of_training(
    tmp_path, files, dev, more, monkeypatch
):
    rows = enumerate(read_json_lines(Path(files["pairs"]))[:13])
    dev = put_json(tmp_path / "dev.jsonl", *({**row, **dev, "score": n} for n, row in rows))
    task = {"kind": "embedding", "max_length": 16, "train": files["pairs"], "dev": dev} | more
    task |= {"test": dev, "negatives": ["negatives"]}
    found, expected = scores_of(pairs_config(files, task=task), tmp_path, monkeypatch)
    for each, own in zip(found, expected, strict=True):
        assert each == pytest.approx(own, abs=1e-5)


def test_queries_of_test_data_may_be_longer_than_all_others(tmp_path, files, monkeypatch):
    rows = read_json_lines(Path(files["pairs"]))
    longer = [{**row, "query": f"{'. ' * 7}{row['query']}"} for row in rows]
    test = put_json(tmp_path / "test.jsonl", *longer)
    task = {"kind": "embedding", "max_length": 16, "train": files["pairs"], "test": test}
    config = pairs_config(files, task={**task, "dev": files["pairs"]})
    (_, found), (_, expected) = scores_of(config, tmp_path, monkeypatch)
    assert found == pytest.approx(expected, abs=1e-5)


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
        ({"embedding__pooling": "splade", "embedding__dimensions": [8]}, "splade has no dim"),
        ({"embedding__queries": "ones"}, "the others have no queries without an encoder"),
        ({"training__freeze": "encoder"}, "these vectors have no other part to train"),
    ],
)
def test_what_does_not_fit(files, changes, message):
    if "task" in changes:
        table = {"train": files["train"], "dev": files["dev"]}
        changes = {**changes, "task": {"kind": "table", "max_length": 16, **table}}
    with pytest.raises(UserError, match=message):
        set_up(pairs_config(files, **changes))


@pytest.mark.parametrize(
    ("kind", "rows", "apart"),
    [
        ("embedding", "pairs", False), ("embedding", "classes", False),
        ("embedding", "scores", True), ("rerank", "pairs", True),
    ],
)  # fmt: skip
def test_seen_texts_are_scored_apart_unless_all_texts_are_ranked(tmp_path, kind, rows, apart):
    """Among fewer texts, the answer is found more easily, so clean and seen do not compare."""
    row = {"query": "a b", "document": "c d", "no": ["e"], "score": 1, "text": "a b", "label": "x"}
    path = put_json(tmp_path / "a.jsonl", row, {**row, "query": "f g", "text": "f g", "label": "y"})
    negatives = ("no",) if rows == "pairs" else ()
    section = {"train": path, "dev": path, "rows": rows, "negatives": negatives}
    task = opened(build(TaskConfig, {"kind": kind, **section}))
    [split], known = task.dev_splits(), {text_key("a b"): (3, 1), text_key("f g"): (3, 0)}
    parts = evaluate.divide(split, known, needed=False)
    assert parts == ({"clean": [1], "seen": [0], "unjudged": []} if apart else {})
    if apart:
        assert evaluate.divide(split, known, needed=True) == parts
    else:
        with pytest.raises(UserError, match=r"ranked among all others.*leave out --contamination"):
            evaluate.divide(split, known, needed=True)


def test_texts_alone_need_dropout(files, tmp_path):
    path = put(tmp_path / "a.csv", "text", *[f"the cat sat on a mat {'.' * n}" for n in range(6)])
    section = {"rows": "texts", "train": path, "dev": path}
    task = {"kind": "embedding", "max_length": 16, **section}
    assert set_up(small_config(files, task=task)).objective.comparison == "ranking"
    with pytest.raises(UserError, match=r"set training\.dropout_rate above 0"):
        set_up(small_config(files, task=task, training__dropout_rate=0.0))
