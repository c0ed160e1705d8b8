import json
import re
import shutil
import threading
from functools import partial

import pytest
from small_run import (
    TOKENIZER,
    small_config,
    snapshot,
    write_corpus,
    write_store,
)

from bert_jax.artefacts.exchange.export import refusal_lines
from bert_jax.artefacts.saved.runs import pretrained_checkpoint
from bert_jax.config.mapping import build
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.errors import UserError
from bert_jax.training.pretrain import saves
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, open_corpus
from bert_jax.training.pretrain.saves import read_config
from bert_jax.training.pretrain.settings import objective_of
from bert_jax.training.pretrain.train import train
from bert_jax.training.pretrain.voice import planned_models
from bert_jax.training.run import session, watchdog
from bert_jax.training.run.events import read_events
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.run.watchdog import Watchdog
from bert_jax.training.steps.bad_step import BadStepError

SHORT = {
    "training__num_steps": 2,
    "training__phases": [{"length": 32, "batch_size": 16}],
    "optimizer__warmup_steps": 1,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus):
    """A run of two steps: (work directory, configuration, lines it printed)."""
    workdir = tmp_path_factory.mktemp("finished") / "work"
    config = small_config(
        **SHORT, training__log_every_steps=1, data={"corpus": str(corpus.train.path.parent)}
    )
    said: list[str] = []
    train(config, workdir, echo=said.append)
    return workdir, config, said


def test_what_cannot_be_exported_is_said_before_the_first_step():
    def said(**fields):
        config = small_config(**fields).with_vocabulary(TOKENIZER.vocab_size)
        models = planned_models(config, objective_of(config), TOKENIZER)
        *lines, last = refusal_lines(models)
        assert last.startswith("exports  not to peft: PEFT's format needs a task head")
        return [line for line in lines if not line.startswith("exports  not to cross-encoder: ")]

    assert said() == []
    (line,) = said(model__norm="rms")
    formats = "huggingface, sentence-transformers, cross-encoder"
    assert line.startswith(f"exports  not to {formats}: no class of Transformers computes this")
    pooled = {"model__pooler_activation": "relu", "data__pairing": "nsp"}
    (line,) = said(**pooled)
    assert line.startswith(
        "exports  not to huggingface, sentence-transformers, cross-encoder: its "
    )
    pooled["data__pairing"] = "none"  # its class has no pooler then
    (line,) = said(**pooled)
    assert line.startswith("exports  not to sentence-transformers: its pooler has relu")


def test_work_directory_holds_what_is_promised(finished, corpus):
    workdir, config, _ = finished
    assert sorted(p.name for p in workdir.iterdir()) == [
        "checkpoints", "config.json", "events.jsonl", "goodput.json", "loss.png", "metrics.jsonl",
        "tensorboard", "tokenizer",
    ]  # fmt: skip
    assert read_config(workdir) == config.with_vocabulary(64)
    assert snapshot(workdir / "tokenizer") == snapshot(corpus.train.path / "tokenizer")
    rows = read_metrics(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["event/plateau"] == 2
    assert {name for name in rows[0] if name.startswith("train/")} == {
        f"train/{name}"
        for name in (
            "loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "grad_norm",
            "learning_rate",
        )
    }  # fmt: skip
    assert rows[1]["eval/nats_below_unigram"] == pytest.approx(
        corpus.train.unigram_entropy - rows[1]["eval/mlm_loss"]
    )
    assert 0 < rows[1]["perf/goodput"] < 1
    assert "perf/mfu" not in rows[1]  # no peak is known of this machine
    loaded = pretrained_checkpoint(workdir)
    assert loaded.step == 2
    assert build(PretrainConfig, loaded.record.config, "here") == config.with_vocabulary(64)
    assert loaded.state["encoder"]["embeddings"]["token"].shape == (128, 32)


def test_lines_at_the_start_and_the_end_say_what_runs_and_where_it_lies(finished, corpus):
    workdir, _, said = finished
    text = "\n".join(said)
    for pattern in (
        r"model    [\d,]+ parameters: 2 layers, 32 wide, vocabulary 64",
        rf"corpus   {corpus.train.num_tokens:,} tokens in 150 documents; .* tokens held out",
        r"phase    2 steps of 16 rows of 32 tokens: 0\.08 epochs of \d+ rows; "
        r"[\d.]+% of the tokens in no row, [\d.]+% random pairs",
        rf"below {corpus.train.unigram_entropy:.3f} nats",
        r"devices  8 \(cpu\) of 1 process, as data 8 x fsdp 1 x tensor 1",
        r"held-out text at step 2: mlm loss \d\.\d+ nats, \d\.\d+ above unigram entropy; "
        r"nsp accuracy \d\.\d{3} \(majority label 0\.\d{3}\)",
        r"step 2 of 2 reached",
        rf"checkpoint  {re.escape(str(workdir))}/checkpoints/2",
    ):
        assert re.search(pattern, text), (pattern, text)


def test_another_configuration_is_refused_and_changes_nothing(finished):
    workdir, config, _ = finished
    before = snapshot(workdir)
    other = small_config(
        **SHORT, data={"corpus": config.data.corpus}, seed=8, model__num_layers=1,
        training__log_every_steps=2,
    )  # fmt: skip
    with pytest.raises(UserError, match="contains a run with another configuration") as error:
        train(other, workdir, echo=lambda _: None)
    assert "model.num_layers: 2 there, 1 given" in str(error.value)
    assert "seed: 7 there, 8 given" in str(error.value)
    assert "log_every_steps" not in str(error.value)
    assert snapshot(workdir) == before


def test_another_corpus_is_refused(finished, tmp_path):
    workdir, config, _ = finished
    other = Corpus(write_store(tmp_path / "train", 30, seed=5), None)
    with pytest.raises(UserError, match=r"the training corpus: fingerprint .* there"):
        train(config, workdir, corpus=other, echo=lambda _: None)


def test_fields_that_do_not_change_the_run_may_change(finished, corpus, tmp_path):
    workdir, _, _ = finished
    copy = tmp_path / "work"
    shutil.copytree(workdir, copy)
    moved = small_config(
        **SHORT, checkpoint={"keep": 7, "save_every_steps": 3}, mesh={"fsdp": 2}, data={}
    )
    result = train(moved, copy, corpus=corpus, echo=lambda _: None)
    assert result.step == 2
    assert read_config(copy).checkpoint.keep == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"training__phases": [{"length": 32, "batch_size": 20}]},
            r"phases\[0\]\.batch_size is 20",
        ),
        ({"model__vocab_size": 65}, "vocab_size is 65, but the tokenizer of the corpus has 64"),
        ({"mesh": {"data": 3}}, "do not fill 8 devices"),
        ({"data": {"corpus": ""}}, "data.corpus is not set"),
        ({"data": {"corpus": "/nowhere"}}, "/nowhere"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path, corpus, changes, message):
    config = small_config(**{"data": {"corpus": str(corpus.train.path.parent)}, **changes})
    with pytest.raises(UserError, match=message):
        train(config, tmp_path / "work", echo=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_held_out_text_that_cannot_be_evaluated_is_refused(tmp_path, corpus):
    one = Corpus(corpus.train, write_store(tmp_path / "heldout", 1, seed=2))
    with pytest.raises(UserError, match=r"held-out store .* cannot be evaluated.*--heldout-rate"):
        train(small_config(**SHORT), tmp_path / "work", corpus=one, echo=lambda _: None)


def test_checkpoints_without_a_configuration_are_refused(tmp_path, corpus):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"has checkpoints but no config\.json"):
        train(small_config(**SHORT), tmp_path, corpus=corpus, echo=lambda _: None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not the configuration of a run"):
        train(small_config(**SHORT), tmp_path, corpus=corpus, echo=lambda _: None)


def test_one_store_alone_trains_without_evaluation(tmp_path, corpus):
    alone = open_corpus(str(corpus.train.path))
    assert alone.heldout is None
    config = small_config(**SHORT, data={"pairing": "none"})
    said: list[str] = []
    result = train(config, tmp_path / "work", corpus=alone, echo=said.append)
    assert result.eval_metrics == {}
    assert any("no held-out text" in line for line in said)
    assert not any("nsp" in name for name in result.train_metrics)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, corpus):
    # Two steps at a sane rate would be finite; this one makes infinite parameters in step 2.
    config = small_config(
        training__num_steps=8,
        training__phases=[{"length": 32, "batch_size": 16}],
        optimizer={"learning_rate": 1e38, "warmup_steps": 0},
        checkpoint={"save_every_steps": 1},
    )
    workdir = tmp_path / "work"
    with pytest.raises(BadStepError) as error:
        train(config, workdir, corpus=corpus, echo=lambda _: None)
    batch = error.value.step
    assert 1 <= batch < 7
    message = str(error.value)
    assert f"`bert-jax replay {workdir} --step {batch}`" in message
    assert f"The last good checkpoint: {workdir / 'checkpoints' / str(batch)}." in message
    assert BadStepError.exit_code == 4
    # The checkpoint named is there, and none of a later state.
    assert saved_steps(workdir / "checkpoints")[-1] == batch
    assert json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1]) == {
        "step": batch + 1,
        "event/bad_step": batch,
    }


def test_the_run_ends_when_it_stands_still_for_as_long_as_it_says(tmp_path, corpus, monkeypatch):
    """In the middle of its preparations, so that nothing has to be compiled."""
    codes, ended = [], threading.Event()

    def end(code):
        codes.append(code)
        ended.set()

    class StoppedError(Exception):
        pass

    def hang(*_, **__):
        ended.wait(20)
        raise StoppedError

    monkeypatch.setattr(watchdog, "_arm_backstop", lambda seconds: None)  # would end the tests
    monkeypatch.setattr(session, "Watchdog", partial(Watchdog, exit=end))
    monkeypatch.setattr(saves, "prepare_workdir", hang)
    workdir = tmp_path / "work"
    workdir.mkdir()
    with pytest.raises(StoppedError):
        train(small_config(**SHORT, training__stall_seconds=0.2), workdir, corpus=corpus)
    assert codes == [6]
    (event,) = read_events(workdir / "events.jsonl")
    assert (event["kind"], event["seconds"]) == ("stalled", 0.2)
    assert event["message"] in (workdir / "stacks.0.txt").read_text()


def test_a_record_written_by_an_older_field_set_names_the_field(finished, tmp_path):
    workdir, _, _ = finished
    record = json.loads((workdir / "config.json").read_text())
    record["config"]["seeds"] = 3
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"config\.json: unknown field seeds; did you mean seed"):
        read_config(tmp_path)
    assert build(PretrainConfig, {}) == PretrainConfig()
