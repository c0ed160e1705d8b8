"""A published Marian learns on, on any mesh, and its translations are scored while it learns."""

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest
from marian_files import random_marian, sentences
from small_run import small_config, write_corpus
from translation_run import translation_config, write_translations

from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.data.corpus.build_pairs import build_pairs
from bert_jax.data.corpus.pairs import open_pairs
from bert_jax.errors import UserError
from bert_jax.infer.loaded import LoadedModel
from bert_jax.tasks.translation import decoded, quality
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import read_metrics

pytestmark = pytest.mark.usefixtures("reused_steps")
pytest.importorskip("sacrebleu")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    where = tmp_path_factory.mktemp("marian")
    (where / "model").mkdir()
    write_huggingface(random_marian(where / "tokenizer"), where / "model")
    return where / "model"


@pytest.fixture(scope="module")
def corpus(source, tmp_path_factory):
    where = tmp_path_factory.mktemp("pairs")
    files = []
    for seed, count in enumerate((120, 16)):
        for side, texts in zip(("en", "de"), sentences(count, seed), strict=True):
            files.append(where / f"{seed}.{side}")
            files[-1].write_text("".join(f"{text}\n" for text in texts))
    known, heldout = (open_pairs([str(f) for f in files[n : n + 2]]) for n in (0, 2))
    build_pairs(
        [known], load_tokenizer(source), where / "corpus", heldout=[heldout], num_workers=1,
        progress=False,
    )  # fmt: skip
    return open_corpus(str(where / "corpus"))


def config_of(source, **changes):
    return translation_config(**{
        "init": str(source), "objective": {"name": "translation", "num_decoder_layers": 1},
        "data__target_length": 48, "training__num_steps": 4, "model__hidden_dropout_rate": 0.0,
        "training__phases": [{"length": 48, "batch_size": 16}], "training__eval_every_steps": 2,
        "training__log_every_steps": 1, "training__eval_translations": 8,
        "model__num_positions": 48, **changes,
    })  # fmt: skip


def test_the_corpus_has_each_side_in_its_own_pieces(source, corpus):
    tokenizer, texts = load_tokenizer(source), sentences(16, 1)
    shard = corpus.heldout.shards[0]
    stored = np.split(shard.tokens, shard.sentence_offsets[1:-1])
    wanted = [tokenizer.encode(texts[0][0]).ids, tokenizer.target.encode(texts[1][0]).ids]
    assert [ids.tolist() for ids in stored[:2]] == [ids.tolist() for ids in wanted]


def test_learning_goes_on_and_the_result_is_a_marian_again(source, corpus, tmp_path):
    losses = {}
    for name, mesh in {"data": {"data": 8}, "all": {"fsdp": 2, "tensor": 2}}.items():
        said: list[str] = []
        config = config_of(source, mesh=mesh)
        assert train(config, tmp_path / name, corpus=corpus, echo=said.append).finished
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        losses[name] = [row["train/loss"] for row in rows if "train/loss" in row]
        scored = [row for row in rows if "eval/bleu" in row]
        assert [row["step"] for row in scored] == [0, 2, 4]
        assert f"translations at step 4: BLEU {scored[-1]['eval/bleu']:.1f}, chrF" in "\n".join(
            said
        )
    assert losses["data"] == pytest.approx(losses["all"], rel=1e-4)
    assert losses["data"][-1] < losses["data"][0]

    found = read_model(tmp_path / "data")
    shard = corpus.heldout.shards[0]
    texts = [
        decoded(found.tokenizer, ids)
        for ids in np.split(shard.tokens, shard.sentence_offsets[1:-1])
    ]
    answers = LoadedModel(found).translate(texts[0::4], num_beams=1)
    meant = quality([answer["translation"] for answer in answers], texts[1::4]).values
    assert scored[-1]["eval/chrf"] == pytest.approx(meant["chrf"], abs=2)  # of the other mesh
    (tmp_path / "out").mkdir()
    write_huggingface(found, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["MarianMTModel"]
    for name in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_the_forced_end_of_opus_mt_is_kept(source, corpus, tmp_path):
    """Also after a restart, which reads no initial model, and in a copy of the run's model."""
    shutil.copytree(source, tmp_path / "opus-mt")
    path = tmp_path / "opus-mt" / "generation_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"forced_eos_token_id": settings["eos_token_id"]}))

    def stop(line):
        if line.startswith("step 1/4"):
            os.kill(os.getpid(), signal.SIGTERM)

    config, work = config_of(tmp_path / "opus-mt", training__eval_translations=0), tmp_path / "run"
    assert not train(config, work, corpus=corpus, echo=stop).finished
    shutil.rmtree(tmp_path / "opus-mt")
    assert train(config, work, corpus=corpus, echo=lambda line: None).finished
    found = read_model(work)
    assert found.network.forces_end
    (tmp_path / "out").mkdir()
    write_huggingface(found, tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert written["forced_eos_token_id"] == written["eos_token_id"] == 0
    assert read_model(tmp_path / "out").network.forces_end
    text, asked = sentences(1, seed=2)[0], {"num_beams": 1, "max_length_rate": 0, "length_alpha": 0}
    (ended,) = LoadedModel(found).translate(text, max_length=3, **asked)
    (copied,) = LoadedModel(read_model(tmp_path / "out")).translate(text, max_length=3, **asked)
    assert ended == copied


def test_a_run_ends_where_its_score_no_longer_rises(source, corpus, tmp_path):
    def run(**changes):
        said: list[str] = []
        given = {"checkpoint__best_metric": "eval/bleu", "optimizer__learning_rate": 1e-12}
        config = config_of(source, training__num_steps=40, **(given | changes))
        return train(config, tmp_path / "work", corpus=corpus, echo=said.append), said

    result, said = run(training__patience=2)
    assert (result.finished, result.step) == (True, 4)  # scored at 0, 2 and 4
    assert "stopped early: 2 evaluations in a row were no better than" in "\n".join(said)
    assert any(line.startswith("step 4 of 40 reached") for line in said)
    result, _ = run(training__patience=2)  # the same command again does nothing
    assert (result.finished, result.step) == (True, 4)
    result, _ = run(training__patience=3)
    assert (result.finished, result.step) == (True, 6)
    rows = read_metrics(tmp_path / "work" / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/bleu" in row] == [0, 2, 4, 6]
    # Another metric has no best value yet, so its first evaluation cannot end the run. The same
    # holds for the same metric on other rows.
    another = {"checkpoint__best_metric": "eval/translation_loss"}
    for rows, end in ((4096, 10), (8, 14)):
        result, _ = run(training__patience=1, training__eval_rows=rows, **another)
        assert (result.finished, result.step) == (True, end)


def test_a_loss_is_better_where_it_is_lower(source, corpus, tmp_path):
    config = config_of(
        source, training__patience=1, training__eval_translations=0, training__num_steps=8,
        optimizer__learning_rate=3e-3, training__eval_every_steps=1,
    )  # fmt: skip
    assert train(config, tmp_path / "work", corpus=corpus, echo=lambda line: None).step > 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training__patience": 2, "training__eval_every_steps": 0},
         "training.patience is 2, but training.eval_every_steps is 0"),
        ({"training__patience": 2, "checkpoint__best_metric": "eval/bleu"},
         "best_metric is 'eval/bleu', but the evaluations of this run .*eval/translation_loss"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        translation_config(**changes)


def test_only_a_translator_with_a_tokenizer_is_scored(tmp_path):
    told = (
        "training.eval_translations is 3; it needs a model that translates and its tokenizer, but"
    )
    corpus = write_corpus(tmp_path / "text")
    with pytest.raises(UserError, match=f"{told} objective.name is 'masked_lm'"):
        train(small_config(training__eval_translations=3), tmp_path / "a", corpus=corpus)
    corpus = write_translations(tmp_path / "pairs")
    nowhere = dataclasses.replace(corpus.train, path=None)
    config = translation_config(training__eval_translations=3)
    with pytest.raises(UserError, match=f"{told} the corpus is in memory"):
        train(config, tmp_path / "b", corpus=corpus._replace(train=nowhere))
