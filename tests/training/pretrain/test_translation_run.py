"""A run of translation: what it reports, resumes, shows and starts from."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from one_shard import StoreWriter
from small_run import TOKENIZER, fingerprint, small_config
from translation_run import translation_config, write_translations

from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.cli import main as cli
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.errors import UserError
from bert_jax.model.heads import init_params
from bert_jax.model.seq2seq.transformer import TransformerNetwork
from bert_jax.objectives.config import TranslationConfig
from bert_jax.planning.compile import compile_step, row_flops
from bert_jax.planning.topology import parse_topology
from bert_jax.training.pretrain import probes
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.pretrain.start import resolve_start
from bert_jax.training.pretrain.train import train
from bert_jax.training.progress import Moment
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.run_plan import Scorer
from bert_jax.training.steps.state import jitted_init

pytestmark = pytest.mark.usefixtures("reused_steps")
CONFIG = translation_config()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_translations(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    workdir = tmp_path_factory.mktemp("whole") / "work"
    said: list[str] = []
    assert train(CONFIG, workdir, corpus=corpus, echo=said.append).finished
    return workdir, said


def test_a_run_reports_both_metrics_and_its_goal(whole, corpus):
    workdir, said = whole
    entropy = corpus.train.target_entropy
    assert any(f"below {entropy:.3f} nats, the unigram entropy of the targets" in s for s in said)
    rows = read_metrics(workdir / "metrics.jsonl")
    last = [row for row in rows if "eval/translation_loss" in row][-1]
    assert last["eval/nats_below_unigram"] == pytest.approx(entropy - last["eval/translation_loss"])
    assert last["eval/perplexity"] == pytest.approx(np.exp(last["eval/translation_loss"]))
    # Smoothed in training, so above the metric while labels are not learnt by heart.
    trained = [row for row in rows if "train/loss" in row][-1]
    assert trained["train/loss"] != trained["train/translation_loss"]
    # All targets of the held-out pairs, an end each.
    store = corpus.heldout
    targets = np.diff(store.shards[0].sentence_offsets)[1::2]
    assert last["eval/num_targets"] == (targets + 1).sum()


def test_stopped_and_continued_equals_uninterrupted(tmp_path, corpus, whole):
    def stop(line):
        if line.startswith("step 3/8"):
            os.kill(os.getpid(), signal.SIGTERM)

    workdir = tmp_path / "work"
    assert not train(CONFIG, workdir, corpus=corpus, echo=stop).finished
    assert train(CONFIG, workdir, corpus=corpus, echo=lambda line: None).finished
    assert fingerprint(workdir, CONFIG, corpus) == fingerprint(whole[0], CONFIG, corpus)


def test_verbs_take_the_run(whole, corpus, capsys):
    workdir, where = whole[0], str(corpus.train.path.parent)
    assert cli.main(["status", str(workdir)]) == 0
    assert "translation loss" in capsys.readouterr().out
    assert cli.main(["replay", str(workdir), "--step", "2", "--corpus", where]) == 0
    assert "16 rows of 32 + 24" in capsys.readouterr().out
    assert cli.main(["evaluate", str(workdir), "--corpus", where]) == 0
    assert "translation_loss" in capsys.readouterr().out


def test_the_model_that_was_saved_translates_and_is_evaluated(whole, corpus, tmp_path, capsys):
    workdir, store = str(whole[0]), corpus.heldout
    cuts = np.split(np.asarray(store.shards[0].tokens), store.shards[0].sentence_offsets[1:-1])
    files = [tmp_path / "sources", tmp_path / "targets"]
    for side, file in enumerate(files):
        file.write_text("".join(f"{TOKENIZER.decode(ids)}\n" for ids in cuts[side::2]))
    where = str(corpus.train.path.parent)
    argv = ["evaluate", workdir, "--pairs", *map(str, files), "--num-beams=2", "--corpus", where]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["pairs"]) == (8, 60)
    # A pair a row gives the loss that the run reported of packed rows.
    rows = [row for row in read_metrics(whole[0] / "metrics.jsonl") if "eval/num_targets" in row]
    assert found["loss"] == pytest.approx(rows[-1]["eval/translation_loss"], rel=1e-5)
    assert found["floors"]["constant"] > 0
    assert found["ceiling"] == pytest.approx(100)
    assert cli.main(["translate", workdir, "--input", str(files[0]), "--num-beams=2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 60
    assert cli.main(["fill-mask", workdir, "5 [MASK]"]) == 2
    assert "no masked-LM head; it supports translate" in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch):
    """Models and sources that a `Translations` translates; each source is its own translation."""
    pytest.importorskip("sacrebleu")
    calls = []

    def translated(saved, source, settings, steps):
        calls.append((saved, source))
        return [row[row > 0].tolist() for row in source.tokens]

    monkeypatch.setattr(probes, "translated", translated)
    monkeypatch.setattr(probes.Translations, "_current", probes.Translations._saved)
    return calls


def test_sources_longer_than_the_model_takes_are_cut_for_scores(asked, tmp_path):
    """The first evaluation ended the run."""
    with StoreWriter(tmp_path, TOKENIZER) as writer:
        for count in (4, 200):
            writer.append(np.full(2 * count, 9), np.full(2, count), np.array([2]))
        pairs = writer.store(pairs=True).shards[0]
    config = translation_config(training__eval_translations=2).with_vocabulary(64)
    scorer = probes.Translations(config, pairs, tmp_path / "tokenizer", Mock(Scorer))
    scorer.score({}, Mock(Moment, stage=0), lambda _: None)
    special = TOKENIZER.special_ids
    ((_, source),) = asked
    assert source.tokens.shape[1] == config.model.num_positions == 64
    assert source.tokens[0, :7].tolist() == [special.cls, *[9] * 4, special.sep, special.pad]
    assert source.tokens[1].tolist() == [special.cls, *[9] * 62, special.sep]


def test_translations_are_scored_with_the_rotary_base_of_the_phase(asked, corpus):
    """All phases were scored with the base of section `model`."""
    phase = {"length": 32, "batch_size": 16}
    config = translation_config(
        model__positions="rope", training__eval_translations=2,
        training__phases=[{**phase, "share": 0.5}, {**phase, "share": 0.5, "rope_theta": 7e4}],
    ).with_vocabulary(64)  # fmt: skip
    pairs, files = corpus.heldout.shards[0], corpus.train.path / "tokenizer"
    scorer = probes.Translations(config, pairs, files, Mock(Scorer))
    for stage in (0, 1):
        scorer.score({}, Mock(Moment, stage=stage), lambda _: None)
    models = [model for saved, _ in asked for model in (saved.config, saved.network.model)]
    assert [model.rope_theta for model in models] == [1e4, 1e4, 7e4, 7e4]


def test_a_pairing_that_the_objective_does_not_read_is_refused():
    with pytest.raises(UserError, match=r"pairing is 'nsp'.*'translation' needs.* 'translation'$"):
        translation_config(data={"pairing": "nsp"})
    with pytest.raises(UserError, match=r"pairing is 'translation'.*'masked_lm' needs.*'none'$"):
        small_config(data__pairing="translation")


@pytest.fixture(scope="module")
def masked_lm() -> SavedModel:
    """A BERT with learned positions, types, pooler and its head, untrained."""
    config = dataclasses.replace(
        small_config().model, vocab_size=TOKENIZER.vocab_size, hidden_dropout_rate=0.0
    )
    params = jax.device_get(init_params(config, jax.random.key(99)))
    return SavedModel(
        config=config, params=params, outputs=None, tokenizer=TOKENIZER, tokenizer_files=Path(),
        max_length=config.num_positions, name="a masked LM", origin=Origin("pretrain"),
    )  # fmt: skip


def started(objective, corpus, masked_lm, workdir):
    """Parameters at the start of a run, and what is said of them."""
    config = translation_config(objective={"name": "translation", **objective}, init="elsewhere")
    config = config.with_vocabulary(corpus.train.vocab_size)
    there = corpus.train.tokenizer_fingerprint
    config, start = resolve_start(config, lambda _: masked_lm, there)
    settings = step_config(config, corpus)
    fresh = jitted_init(settings, make_mesh(config.mesh))(jax.random.key(0)).params
    params = start.first_params(fresh, settings.objective.axes())
    return jax.device_get(params), start.lines(fresh)[0]


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_encoder_of_masked_words_is_taken_to_the_bit(corpus, masked_lm, tmp_path):
    params, line = started({}, corpus, masked_lm, tmp_path)
    expected = {n: entry for n, entry in masked_lm.params["encoder"].items() if n != "pooler"}
    assert_equal(params["encoder"], expected)
    copied, fresh = (
        len(jax.tree.leaves(tree)) for tree in (expected, [params["decoder"], params["output"]])
    )
    assert line == (
        f"starts from a masked LM: {copied} arrays copied (encoder); {fresh} arrays fresh "
        "(decoder, output)"
    )


def test_a_decoder_can_start_from_the_encoder_and_its_head(corpus, masked_lm, tmp_path):
    objective = {"init_decoder": True, "num_decoder_layers": 1, "tying": "output"}
    params, line = started(objective, corpus, masked_lm, tmp_path)
    encoder, head = masked_lm.params["encoder"], masked_lm.params["mlm"]
    assert_equal(params["output"], head)
    layers = params["decoder"]["layers"]
    for name in ("attention", "attention_norm", "mlp", "mlp_norm"):
        assert_equal(layers[name], jax.tree.map(lambda leaf: leaf[:1], encoder["layers"][name]))
    tables = encoder["embeddings"]
    assert_equal(params["decoder"]["embeddings"]["token"], tables["token"])
    position = params["decoder"]["embeddings"]["position"]
    np.testing.assert_array_equal(position, tables["position"] + tables["type"][0])
    assert line.endswith("10 arrays fresh (decoder/layers/cross, decoder/layers/cross_norm)")
    assert "output" in line.split(";")[0]


def test_a_decoder_is_not_initialised_without_init() -> None:
    config = translation_config(objective={"name": "translation", "init_decoder": True})
    with pytest.raises(UserError, match="init_decoder is true, but init is empty; set init to a m"):
        resolve_start(config, Mock())


def test_a_decoder_deeper_than_the_encoder_cannot_start_from_it(masked_lm):
    config = TranslationConfig(init_decoder=True, num_decoder_layers=3)
    said = "num_decoder_layers is 3, .* has 3 layers, but the encoder of init has 2; set .* to 2"
    with pytest.raises(UserError, match=said):
        config.laid_out(masked_lm.config, masked_lm.params)


@pytest.mark.parametrize(
    ("given", "said"),
    [(0, "is 0, so the decoder has 2 layers, but the decoder of init has 1; set .* to 1"),
     (3, "is 3, so the decoder has 3 layers, but the decoder of init has 1; set .* to 1")],
)  # fmt: skip
def test_a_decoder_of_another_depth_is_no_start(given, said):
    network = TransformerNetwork(CONFIG.with_vocabulary(64).model, 1)
    params = jax.eval_shape(network.init, jax.random.key(0))
    with pytest.raises(UserError, match=f"objective.num_decoder_layers {said}"):
        TranslationConfig(num_decoder_layers=given).laid_out(network.model, params)
    fits = TranslationConfig(num_decoder_layers=1, init_decoder=True)
    assert fits.laid_out(network.model, params) is params


@pytest.mark.parametrize(
    ("there", "given", "said"),
    [({"tying": "none"}, {}, "objective.tying is 'all' here, but 'none' in init"),
     ({"name": "recurrent_translation", "residual_from": 2}, {},
      "objective.residual_from is 0 here, but 2 in init"),
     ({"name": "recurrent_translation"}, {"num_decoder_layers": 1, "cell": "lstm"},
      "objective.cell is 'lstm' here, but 'gru' in init; "
      "objective.num_decoder_layers is 1 here, but 0 in init"),
     ({"name": "recurrent_translation", "num_decoder_layers": 2}, {"window": 3}, ""),
     ({"num_decoder_layers": 2}, {}, "")],
)  # fmt: skip
def test_a_network_of_another_wiring_is_no_start(there, given, said):
    """It began anyway, without the tables and layers of init that the run did not have."""
    there = {"name": "translation", **there}
    started_from = translation_config(objective=there).with_vocabulary(64)
    network = started_from.objective.network(started_from.model)
    initial = SavedModel(
        network.model, jax.eval_shape(network.init, jax.random.key(0)), None, TOKENIZER, Path(),
        64, "a translator", Origin("pretrain"), network,
    )  # fmt: skip
    config = translation_config(objective={"name": there["name"], **given}, init="elsewhere")
    if not said:
        assert resolve_start(config.with_vocabulary(64), lambda _: initial)[1].initial is not None
        return
    with pytest.raises(UserError, match=re.escape(f"({said}). Set these fields of this run to ")):
        resolve_start(config.with_vocabulary(64), lambda _: initial)
    other = "translation" if "recurrent" in there["name"] else "recurrent_translation"
    config = translation_config(objective={"name": other}, init="elsewhere").with_vocabulary(64)
    with pytest.raises(UserError, match=r"Network, but this run trains a .*Set objective\.name"):
        resolve_start(config, lambda _: initial)


def test_both_lengths_count_and_a_slice_of_tpus_is_planned(tmp_path):
    config = CONFIG.with_vocabulary(64)
    longer = translation_config(data__target_length=32).with_vocabulary(64)
    assert row_flops(config, 0) < row_flops(longer, 0)
    pytest.importorskip("libtpu", reason="libtpu is not installed: no slice can be compiled for")
    plan = compile_step(config, 0, parse_topology("v5e:2x2"), cache=tmp_path)
    assert plan.fits
    assert plan.mfu is not None
