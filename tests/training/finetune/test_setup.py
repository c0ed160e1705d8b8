"""What a fine-tuning run is made of: its length, its evaluations, its head."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_finetuning import small_config, write_files
from small_saved import small_saved
from squad_files import entry, put_squad

from bert_jax.artefacts.saved.model import digest_of
from bert_jax.config.mapping import build
from bert_jax.distributed.checkpoint import storage
from bert_jax.distributed.parallel.sharding import MeshConfig, make_trial_mesh
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.tasks.config import SquadConfig
from bert_jax.tokenization.wordpiece import WordPieceOptions, WordPieceTokenizer
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.saves import FinetuneSaves
from bert_jax.training.finetune.setup import Schedule, encoder_of, set_up
from bert_jax.training.finetune.start import read_inits
from bert_jax.training.finetune.train import finetune


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 9))
@settings(max_examples=80)
def test_evaluations_are_spread_over_an_epoch(num_steps, per_epoch, evals):
    """As often as was asked for, and after the last step."""
    every = per_epoch / evals
    expected = {max(1, round(every * n)) for n in range(1, int(num_steps / every) + 1)}
    schedule = Schedule((), num_steps, per_epoch, max(1.0, every))
    found = {n for n in range(1, num_steps + 1) if schedule.evaluates_after(n)}
    assert found == {n for n in expected if n < num_steps} | {num_steps}


def test_a_run_of_many_steps_is_set_up_at_once(files):
    """Nothing is as large as the number of steps, of evaluations or of rows in a batch."""
    setup = set_up(
        small_config(
            files, training__num_epochs=3e8, training__evals_per_epoch=10**15, sweep__at_once=10**12
        )
    )
    assert setup.step.num_steps == 18 * 10**8
    assert setup.schedule.evaluates_after(10**9 + 7)


def test_a_run_of_too_many_steps_is_refused(files, tmp_path):
    for epochs, said in ((1e12, r"1e\+12; .* 6e\+12 steps"), (1e308, r"1e\+308; .* inf steps")):
        with pytest.raises(UserError, match=f"num_epochs is {said}.*epochs to 357,913,941 or less"):
            finetune(small_config(files, training__num_epochs=epochs), tmp_path / "work")
    with pytest.raises(UserError, match=r"sweep.seeds is 1000000000; it must be in \[1, 1000\]"):
        small_config(files, sweep__seeds=10**9)
    assert not list(tmp_path.iterdir())


def test_distillation_without_a_teacher_is_refused(files):
    with pytest.raises(UserError, match=r"section distil is set, but distil\.teacher is empty"):
        set_up(small_config(files, distil__temperature=3.0))


def test_class_weights_of_other_labels_are_refused(files):
    task = {"kind": "table", "train": files["train"], "class_weights": "bird=2"}
    with pytest.raises(UserError, match=r"^task\.class_weights: the label 'bird' is not known"):
        set_up(small_config(files, task=task))


def test_a_baseline_has_the_tokenizer_of_init(files):
    saved = small_saved("mlm")
    models = {files["init"]: saved, "other": saved}
    config = small_config(files, sweep__baseline="other")

    def read(name, encoder_only):
        return models[name]

    assert list(read_inits(config, read)[1]) == list(models)
    for same in (files["init"], f"{files['init']}/"):
        with pytest.raises(UserError, match="the same as init"):
            read_inits(small_config(files, sweep__baseline=same), read)
    cased = WordPieceTokenizer(saved.tokenizer.vocab, WordPieceOptions(lowercase=False))
    models["other"] = dataclasses.replace(saved, tokenizer=cased)
    with pytest.raises(UserError, match=r"baseline other differs from init \(the tokenizers\)"):
        read_inits(config, read)


def test_the_length_of_a_model_of_few_positions_is_said_once(tmp_path):
    class Said(BaseException):
        """Ends the run before its first step."""

    files = write_files(tmp_path / "short", num_positions=8)
    config = small_config(files, task__max_length=0)
    lines: list[str] = []

    def echo(line: str) -> None:
        lines.append(line)
        if line.startswith("goal"):
            raise Said

    with pytest.raises(Said):
        finetune(config, tmp_path / "work", echo=echo)
    (said,) = [line for line in lines if line.startswith("length")]
    assert said.startswith("length   8 tokens a row: the model has no more positions; task.max_len")
    task = dataclasses.replace(config.task, max_length=16)
    with pytest.raises(UserError, match="max_length is 16, but the model has 8 positions"):
        set_up(dataclasses.replace(config, task=task))


def test_the_head_of_spans_has_no_dropout(files, tmp_path):
    path = put_squad(tmp_path / "a.json", entry("1", "cat"))
    task = SquadConfig(train=path, dev=path)
    setup = set_up(FinetuneConfig(init=files["init"], task=task))
    assert setup.objective.config.dropout_rate == 0.0
    assert setup.objective.model.hidden_dropout_rate == 0.1
    assert set_up(small_config(files)).objective.config.dropout_rate == np.float64(0.1)
    given = set_up(small_config(files, training__dropout_rate=0.3)).objective
    assert given.config.dropout_rate == given.model.hidden_dropout_rate == 0.3


@pytest.mark.parametrize(
    ("positions", "before", "rate", "after"),
    [
        ("learned", 0.0, 0.2, 0.2),
        ("rope", 0.0, 0.2, 0.0),  # kernels of long rows have no dropout of probabilities
        ("rope", 0.1, 0.2, 0.2),
        ("rope", 0.1, None, 0.1),
    ],
)
def test_probabilities_are_dropped_where_the_model_was_trained_so(positions, before, rate, after):
    saved = small_saved(
        "mlm", positions=positions, num_types=0, pooler=False, attention_dropout_rate=before
    )
    config = build(FinetuneConfig, {"training": {"dropout_rate": rate}, "task": {"max_length": 8}})
    found = encoder_of(saved, config)
    assert found.attention_dropout_rate == after
    assert found.hidden_dropout_rate == (saved.config.hidden_dropout_rate if rate is None else rate)
    own = dataclasses.replace(
        saved.config, embedding_dropout_rate=0.0, mlp_dropout_rate=0.3, hidden_dropout_rate=0.4
    )
    found = encoder_of(dataclasses.replace(saved, config=own), config)
    assert found.rate_of("embedding") == 0
    assert found.rate_of("mlp") == (0.3 if rate is None else rate)


def test_a_start_is_told_apart_by_all_that_it_has():
    saved = small_saved("classification")
    start = {"encoder": saved.params["encoder"], "head": saved.params["head"]}
    found = {digest_of(start), digest_of({}), digest_of(start, saved.tokenizer.fingerprint)}
    for part in start:
        other = jax.tree.map(np.copy, start)
        leaf = jax.tree.leaves(other[part])[0]
        leaf.flat[0] += 1
        found.add(digest_of(other))
    assert len(found) == 5


def test_the_newest_save_is_named_if_saves_can_be_listed(files, tmp_path, monkeypatch):
    """The run ends for another reason, which is told even if the bucket is away."""
    mesh = make_trial_mesh(MeshConfig(), 1)
    config, work = small_config(files), open_workdir(tmp_path)
    found = FinetuneSaves(config, set_up(config), mesh, work)
    assert found.newest() == ""
    (tmp_path / "resume" / "4").mkdir(parents=True)
    assert found.newest() == f"{tmp_path}/resume/4"

    def away(_):
        raise ConnectionError

    monkeypatch.setattr(storage, "saved_steps", away)
    assert found.newest() == ""
