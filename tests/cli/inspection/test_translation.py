"""Evaluation of translations on pairs of files."""

import dataclasses
import json
import re
import sys

import jax
import numpy as np
import pytest
from asked_models import TOKENIZER
from one_shard import StoreWriter
from toy_networks import MemoryNetwork, toy_translator

from bert_jax.artefacts.saved.model import Origin
from bert_jax.cli import main as cli
from bert_jax.cli.inspection import translation
from bert_jax.cli.inspection.translation import losses, read_pairs
from bert_jax.errors import UserError
from bert_jax.infer.forward import on_device
from bert_jax.infer.loaded import LoadedModel
from bert_jax.model.seq2seq.network import Cache, Side
from bert_jax.model.seq2seq.search import SearchConfig
from bert_jax.tasks.translation import quality
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

pytest.importorskip("sacrebleu")
SOURCES = ["the cat sat on the mat .", "dogs ran", "kim met lee in rome", "a hill", "the dog sat ."]
TARGETS = ["a dog ran under a hill .", "cats sat", "lee met kim", "the mat", "a cat ran . the end"]


class DeafNetwork(MemoryNetwork):
    """A network that does not read its source."""

    def start(self, params, source, num_beams, max_length):
        cache = super().start(params, source, num_beams, max_length)
        return Cache(0 * cache.shared, {"state": 0 * cache.beams["state"]})


@pytest.fixture(scope="module")
def saved():
    return toy_translator()


def ids(texts):
    return [TOKENIZER.encode(text).ids for text in texts]


def one_by_one(saved, sources, targets):
    """Nats a token, a pair at a time."""
    special, total, count = TOKENIZER.special_ids, 0.0, 0
    logits = jax.jit(saved.network.logits)
    for source, target in zip(ids(sources), ids(targets), strict=True):
        rows = [special.cls, *source, special.sep], [special.cls, *target]
        width = [np.array([[*row, *[0] * (12 - len(row))]], np.int32) for row in rows]
        real = [(np.arange(12) < len(row)).astype(np.int32)[None] for row in rows]
        found = logits(saved.params, *(Side(*each) for each in zip(width, real, strict=True)))
        logs = jax.nn.log_softmax(found[0], -1)
        for place, label in enumerate([*target, special.sep]):
            total -= float(logs[place, label])
            count += 1
    return total / count


def test_the_loss_is_that_of_each_pair_alone_and_swapping_raises_it(saved):
    model = on_device(saved)
    own, swapped = losses(model, SOURCES, ids(TARGETS))
    assert own == pytest.approx(one_by_one(saved, SOURCES, TARGETS), rel=1e-5)
    assert abs(swapped - own) > 0.01
    assert losses(model, SOURCES[:1], ids(TARGETS[:1]))[1] is None
    # Of two pairs there is one way to swap.
    _, swapped = losses(model, SOURCES[:2], ids(TARGETS[:2]))
    assert swapped == pytest.approx(one_by_one(saved, SOURCES[1::-1], TARGETS[:2]), rel=1e-5)


def test_a_target_that_is_cut_has_no_end_token(saved):
    """The token at the cut was scored as if the target ended there."""
    target = TOKENIZER.encode("a dog ran under a hill . " * 3).ids[:12]
    model = dataclasses.replace(on_device(saved), max_length=8)
    found, _ = losses(model, ["dogs ran"], [target])
    special, source = TOKENIZER.special_ids, TOKENIZER.encode("dogs ran").ids
    rows = np.array([[special.cls, *source, special.sep]]), np.array([[special.cls, *target[:7]]])
    sides = (Side(row.astype(np.int32), np.ones(row.shape, np.int32)) for row in rows)
    logs = np.asarray(jax.nn.log_softmax(saved.network.logits(saved.params, *sides)[0], -1))
    assert found == pytest.approx(-np.mean(logs[np.arange(8), target[:8]]), rel=1e-5)


def test_a_decoder_that_ignores_its_source_has_no_gap(saved):
    deaf = dataclasses.replace(saved, network=DeafNetwork(saved.config))
    own, swapped = losses(on_device(deaf), SOURCES, ids(TARGETS))
    assert own == pytest.approx(swapped, abs=1e-5)  # float32 sums in another order


def put(path, lines, end="\n"):
    path.write_bytes("".join(f"{line}{end}" for line in lines).encode())
    return str(path)


def test_lines_are_paired_and_unequal_files_are_refused(tmp_path):
    odd = ["the cat\u2028sat", "no\u00a0break", "tab\there"]
    a, b = put(tmp_path / "a.en", odd), put(tmp_path / "b.de", odd, end="\r\n")
    assert read_pairs(a, b) == (odd, odd)
    short = put(tmp_path / "c.de", odd[:2])
    with pytest.raises(UserError, match=r"a\.en has 3 lines and .*c\.de has 2"):
        read_pairs(a, short)
    with pytest.raises(UserError, match=r"d\.de, line 2 is empty"):
        read_pairs(a, put(tmp_path / "d.de", ["x", " ", "y"]))
    nothing = put(tmp_path / "e.de", [])
    with pytest.raises(UserError, match="has no lines"):
        read_pairs(nothing, nothing)


@pytest.fixture
def run(saved, monkeypatch, capsys):
    def run(*argv, model=saved):
        monkeypatch.setattr(translation, "read_model", lambda path: model)
        capsys.readouterr()
        code = cli.main(["evaluate", "work/toy", *map(str, argv)])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def pairs(tmp_path):
    return put(tmp_path / "test.en", SOURCES), put(tmp_path / "test.de", TARGETS)


def test_translations_are_scored_with_floors_and_losses(run, pairs, saved, tmp_path):
    texts = [each for pair in zip(ids(SOURCES), ids(TARGETS), strict=True) for each in pair]
    with StoreWriter(tmp_path / "pairs", TOKENIZER) as writer:
        writer.append(np.concatenate(texts), np.array([*map(len, texts)]), np.full(5, 2))
        writer.store(pairs=True)
    origin = Origin("pretrain", 7, {"data": {"corpus": str(tmp_path / "pairs")}})
    trained = dataclasses.replace(saved, origin=origin)
    code, printed, _ = run("--pairs", *pairs, "--num-beams=2", "--json", model=trained)
    assert code == 0
    found = json.loads(printed)
    assert (found["pairs"], found["step"]) == (5, 7)
    hypotheses = [a["translation"] for a in LoadedModel(saved).translate(SOURCES, num_beams=2)]
    assert {n: found[n] for n in ("bleu", "chrf")} == quality(hypotheses, TARGETS).values
    assert found["exact"] == 0
    assert found["floors"]["copy"] == quality(SOURCES, TARGETS).values["bleu"]
    assert found["floors"]["constant"] > 0
    assert found["ceiling"] < 100  # "end" is no word of the tokenizer
    assert (found["loss"], found["loss_swapped"]) == losses(on_device(saved), SOURCES, ids(TARGETS))
    assert [row["pairs"] for row in found["by_length"]] == [5]
    code, printed, _ = run("--pairs", *pairs, "--num-beams=2", model=trained)
    assert code == 0
    assert f"BLEU          {found['bleu']:.1f}  (no interval: few pairs or errors)" in printed
    assert "smooth:exp" in printed
    assert f"one constant text: {found['floors']['constant_text']!r}" in printed
    ignored = found["loss_swapped"] - found["loss"] < translation.LEAST_GAP
    assert ("ignores its source" in printed) == ignored


def test_training_targets_of_another_tokenizer_are_not_read(run, pairs, saved, tmp_path):
    """Their ids were decoded by the model's tokenizer, which made other words of them."""
    other = WordPieceTokenizer([*SPECIAL_TOKENS, "ein", "Hund"])
    with StoreWriter(tmp_path / "other", other) as writer:
        writer.append(np.array([5, 6]), np.ones(2, int), np.array([2]))
        writer.store(pairs=True)
    corpus = str(tmp_path / "other")
    code, _, err = run("--pairs", *pairs, "--num-beams=1", "--corpus", corpus)
    assert code == 2
    assert "--corpus: the tokenizer of a toy" in err
    trained = dataclasses.replace(saved, origin=Origin("pretrain", 7, {"data": {"corpus": corpus}}))
    code, printed, _ = run("--pairs", *pairs, "--num-beams=1", model=trained)
    assert code == 0
    assert "no constant translation is known: no corpus with this tokenizer" in printed


def test_a_decoder_that_ignores_its_source_is_named(run, pairs, saved):
    deaf = dataclasses.replace(saved, network=DeafNetwork(saved.config))
    code, printed, _ = run("--pairs", *pairs, "--num-beams=1", model=deaf)
    assert code == 0
    assert "wrong sources raise the loss by 0.000 nats per token" in printed
    assert "no constant translation is known" in printed  # without a corpus


def test_two_models_are_compared_on_the_same_pairs(saved, tmp_path, monkeypatch, capsys):
    """Differences of the scores, with intervals over sentences that are resampled in pairs."""
    random = np.random.default_rng(0)
    sources = [" ".join(random.permutation(SOURCES[n % 5].split())) for n in range(40)]
    deaf = dataclasses.replace(saved, network=DeafNetwork(saved.config))
    models = {"work/toy": saved, "work/deaf": deaf, "work/again": saved, "work/deaf2": deaf}
    monkeypatch.setattr(translation, "read_model", lambda path: models[str(path)])
    ours, texts = (
        [each["translation"] for each in LoadedModel(model).translate(sources, num_beams=1)]
        for model in (saved, deaf)
    )
    right = [texts[n] if n % 3 == 0 else ours[n] for n in range(40)]
    pairs = put(tmp_path / "test.en", sources), put(tmp_path / "test.de", right)

    def run(*argv):
        capsys.readouterr()
        code = cli.main(["evaluate", "work/toy", "--pairs", *pairs, "--num-beams=1", *argv])
        return (code, *capsys.readouterr())

    code, printed, _ = run("--versus=work/deaf", "--json")
    assert code == 0
    found = json.loads(printed)
    theirs = quality(texts, right).values
    for name, each in found["differences"].items():
        assert each["difference"] == pytest.approx(found[name] - theirs[name])
        assert 0 < each["interval"][0] < each["difference"] < each["interval"][1]
    code, printed, _ = run("--versus=work/deaf")
    assert re.search(r"test.en +\| +bleu +\| +\+\d.*\| distinguishable from zero", printed)
    assert "toy minus deaf" in printed
    assert "Intervals are over sentences" in printed
    code, printed, _ = run("--versus=work/again")
    assert printed.count("not judged: no interval") == 2  # all translations are equal
    code, _, err = run("--versus=work/deaf", "--other-seed=work/again")
    assert code == 2
    assert "--versus is given 1 times; give it 2 times" in err
    code, printed, _ = run("--versus=work/deaf", "--other-seed=work/again", "--versus=work/deaf2")
    assert "Differences are means over pairs of seeds" in printed


def test_options_of_other_evaluations_are_refused(run, pairs):
    for option in ("--rows=3", "--by-position", "--data=x"):
        code, _, err = run("--pairs", *pairs, option)
        assert code == 2
        assert f"{option.partition('=')[0]} cannot be used with --pairs" in err


def test_a_missing_scorer_is_found_before_anything_is_translated(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setattr(translation, "_translated", pytest.fail)
    for name in ("a", "b"):
        (tmp_path / name).write_text("dogs ran\n")
    with pytest.raises(UserError, match="scoring translations needs sacreBLEU"):
        translation.evaluate_pairs(
            "run", f"{tmp_path / 'a'}", f"{tmp_path / 'b'}", settings=SearchConfig()
        )
