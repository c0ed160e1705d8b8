"""Translations from Python and from the command line, of a network with random weights."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_models import TOKENIZER, random_model
from toy_networks import plain_search, toy_translator

from bert_jax.cli import main as cli
from bert_jax.cli.verbs import answering
from bert_jax.errors import UserError
from bert_jax.infer.loaded import LoadedModel
from bert_jax.infer.translate import Translator, mean_attention, word_attention
from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.network import Side
from bert_jax.model.seq2seq.recurrent import RecurrentNetwork
from bert_jax.model.seq2seq.recurrent_layers import RecurrentConfig
from bert_jax.model.seq2seq.search import SearchConfig
from bert_jax.model.seq2seq.transformer import TransformerNetwork
from bert_jax.tasks.examples import Origin, TextExample
from bert_jax.tasks.translation import decoded
from bert_jax.tokenization.tokenizer import make_row
from bert_jax.tokenization.training import train_bytelevel

TEXTS = ["the cat sat on the mat", "", "dogs", "the dog .", "kim met lee in rome", "a", "the cat"]
CLS, SEP = TOKENIZER.special_ids.cls, TOKENIZER.special_ids.sep


@pytest.fixture(scope="module")
def saved():
    return toy_translator()


@pytest.fixture(scope="module")
def model(saved):
    return LoadedModel(saved)


def expected(saved, text, **settings):
    """Translation of a text by the search without a cache, and its score."""
    row = make_row(TOKENIZER, TOKENIZER.encode(text).ids).ids
    search = SearchConfig(**settings)
    limit = int(search.limits(len(row), saved.max_length))
    found = plain_search(saved.network, saved.params, row, search, limit, CLS, SEP)
    return [
        (decoded(TOKENIZER, np.array(tokens[:-1] if ended else tokens)), score, not ended)
        for tokens, score, ended in found
    ]


@pytest.mark.parametrize("settings", [{"num_beams": 1}, {"num_beams": 3, "length_alpha": 0.6}])
def test_each_text_is_translated_as_if_it_were_alone_and_order_is_kept(saved, model, settings):
    answers = model.translate(TEXTS, **settings)
    assert answers[1] == {"translation": "", "score": 0.0}
    for text, answer in zip(TEXTS, answers, strict=True):
        if text:
            best, score, cut = expected(saved, text, **settings)[0]
            assert answer["translation"] == best
            assert answer["score"] == pytest.approx(score, abs=1e-4)
            assert answer.get("cut", False) == cut
    assert model.translate([]) == []
    assert model.verbs == ("translate",)


def test_further_hypotheses_come_best_first(saved, model):
    (answer,) = model.translate("the cat", num_beams=4, nbest=3)
    found = [(each["translation"], each.get("cut", False)) for each in answer["candidates"]]
    assert found == [(text, cut) for text, _, cut in expected(saved, "the cat", num_beams=4)][:3]
    assert answer["translation"] == found[0][0]
    scores = [each["score"] for each in answer["candidates"]]
    assert scores == sorted(scores, reverse=True)


def test_a_blank_text_has_the_fields_of_the_others(model):
    blank, other = model.translate([" ", "the cat"], nbest=2, alignments=True)
    assert blank.keys() == other.keys() - {"cut"}
    assert blank["candidates"] == [{"translation": "", "score": 0.0}]
    assert blank["attention"] == []


def test_blanks_around_a_text_are_not_translated(saved):
    """The pairs of a corpus have none, and tokens of a byte-level tokenizer contain blanks."""
    texts = ["the dog sat on the mat . the cat ran . a hill of dogs"] * 20
    translator = Translator(dataclasses.replace(saved, tokenizer=train_bytelevel(texts, 300)))
    examples = [
        TextExample("0", text, None, None, Origin("texts", 1)) for text in ("the dog", " the dog  ")
    ]
    plain, wide = translator.prepare(examples).rows.tokens
    np.testing.assert_array_equal(plain, wide)


def test_a_translation_begins_with_its_prefix(model):
    free, forced, other = model.translate(
        ["the dog", "the dog", "the cat sat"], [None, "a hill", "the mat ."], num_beams=3
    )
    assert forced["translation"].startswith("a hill")
    assert other["translation"].startswith("the mat.")
    assert free == model.translate("the dog", num_beams=3)[0]
    with pytest.raises(UserError, match="the prefix has 24 tokens"):
        model.translate("the dog", "a " * 24)


def test_the_greatest_length_counts_the_prefix(model):
    (answer,) = model.translate("the", "a hill " * 4, num_beams=1, max_length_rate=1.0)
    assert answer["translation"].startswith("a hill a hill a hill a hill")


@pytest.mark.parametrize(("option", "most"), [("max_length", 3), ("max_length_rate", 0.5)])
def test_a_prefix_that_the_greatest_length_would_cut_is_refused(model, option, most):
    """The translation was the beginning of the prefix."""
    with pytest.raises(UserError, match="the prefix has 8 tokens; max_length and its rate allow"):
        model.translate("the", "a hill " * 4, num_beams=1, **{option: most})


def test_a_long_source_is_cut_and_said(model):
    with pytest.warns(UserWarning, match=r"1 of 2 texts are longer than 24 tokens.*\(text 2\)"):
        _, long = model.translate(["the", "the cat " * 20], num_beams=1)
    (same,) = model.translate("the cat " * 11, num_beams=1)
    assert long == same


def test_attention_joins_sub_words_and_leaves_special_tokens_out():
    tokenizer = TOKENIZER
    source = make_row(tokenizer, tokenizer.encode("the dogs ran").ids).ids  # the dog ##s ran
    target = tokenizer.encode("cats sat").ids  # cat ##s sat
    weights = np.zeros((5, 8), np.float32)
    weights[0, [0, 1, 2, 3]] = 0.5, 0.2, 0.15, 0.15  # [CLS] has most, the dogs more than the
    weights[1, [3, 5]] = 0.4, 0.6
    weights[2, [4, 5]] = 0.3, 0.7
    found = word_attention(tokenizer, source, target, weights)
    assert [(each["target"], each["source"], each["places"]) for each in found] == [
        ("cats", "dogs", [0, 1]), ("sat", "ran", [1, 2])
    ]  # fmt: skip
    assert found[0]["weight"] == pytest.approx((0.3 + 0.4) / 2)


def test_attention_is_that_of_the_step_that_wrote_the_token(saved, model):
    (answer,) = model.translate("the cat sat on the mat", alignments=True, num_beams=2)
    assert [pair["source"] for pair in answer["attention"]][:6] == [
        "the", "cat", "sat", "on", "the", "mat"
    ]  # fmt: skip
    tokens = np.array([[7, 8, 9, SEP, 0]], np.int32)
    source = Side(np.array([[CLS, 5, 6, SEP]], np.int32), np.ones((1, 4), np.int32))
    weights = mean_attention(saved.network, saved.params, source, tokens, np.array([4]), CLS)
    np.testing.assert_allclose(weights[0, :4].sum(-1), 1, rtol=1e-6)
    assert weights[0].argmax(-1)[:3].tolist() == [1, 2, 3]

    class TwoLayers(type(saved.network)):
        """The second looks nowhere."""

        def weights(self, *arguments):
            found = super().weights(*arguments)
            return found._replace(cross=jnp.concatenate([found.cross, 0 * found.cross]))

    two = TwoLayers(**vars(saved.network))
    half = mean_attention(two, saved.params, source, tokens, np.array([4]), CLS)
    np.testing.assert_allclose(half, weights / 2, rtol=1e-6)


def test_the_end_of_a_translation_is_no_word_of_the_attention(saved):
    write = saved.params["write"].copy()
    write[:, SEP] *= 4  # translations end early
    often = dataclasses.replace(saved, params={**saved.params, "write": write})
    answers = LoadedModel(often).translate(TEXTS, alignments=True, num_beams=1)
    ended = [each for each in answers if "attention" in each and "cut" not in each]
    assert ended
    assert all(pair["target"] for each in ended for pair in each["attention"])


def test_models_refuse_what_they_were_not_made_for(model):
    with pytest.raises(UserError, match=r"no masked-LM head; it supports translate"):
        model.fill_mask("the [MASK]")
    with pytest.raises(UserError, match=r"no encoder of texts; it supports translate"):
        model.embed("the cat")
    with pytest.raises(UserError, match=r"no decoder; it supports fill-mask and embed"):
        LoadedModel(random_model("pretrained")).translate("the cat")
    with pytest.raises(UserError, match="unknown field beams"):
        model.translate("the cat", beams=3)


def test_weights_that_are_no_numbers_are_refused(saved):
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), saved.params)
    with pytest.raises(UserError, match="outputs are not finite"):
        LoadedModel(dataclasses.replace(saved, params=broken)).translate("the cat", num_beams=2)


@pytest.fixture
def run(saved, monkeypatch, capsys):
    def run(*argv: object):
        capsys.readouterr()
        code = cli.main(["translate", "work/toy", "--num-beams=2", *map(str, argv)])
        return (code, *capsys.readouterr())

    monkeypatch.setattr(answering, "read_model", lambda path: saved)
    return run


def test_lines_in_lines_out(run, model, tmp_path):
    file, out = tmp_path / "test.en", tmp_path / "test.de"
    file.write_text("".join(f"{text}\n" for text in TEXTS))
    code, printed, err = run("--input", file, "--out", out)
    answers = model.translate(TEXTS, num_beams=2)
    assert (code, printed) == (0, "")
    assert out.read_text() == "".join(f"{each['translation']}\n" for each in answers)
    cut = sum("cut" in each for each in answers)
    assert f"Warning: {cut} translations reached the length limit" in err
    assert f"7 answers in {out}" in err
    code, printed, _ = run("--input", file)
    assert printed == out.read_text()
    code, printed, _ = run("--input", file, "--json", "--top", 2, "--alignments")
    assert [json.loads(line) for line in printed.splitlines()] == model.translate(
        TEXTS, num_beams=2, nbest=2, alignments=True
    )
    for option in ("--alignments", "--top=2"):
        code, printed, err = run("--input", file, "--out", out, option)
        assert (code, printed) == (2, "")
        assert "works only with JSON output: add --json" in err


def test_finished_lines_stay_where_one_cannot_be_read_and_a_rerun_goes_on(
    run, saved, model, tmp_path, monkeypatch
):
    file, out, kept = (tmp_path / name for name in ("test.en", "test.de", "test.de.partial"))
    monkeypatch.setattr(Translator, "CHUNK", 3)
    sound = [text.encode() for text in TEXTS]

    def started(lines, params=saved.params):
        """Write the lines, translate them; the code, the messages and the texts that were asked."""
        file.write_bytes(b"\n".join(lines) + b"\n")
        asked: list[str] = []
        example = Translator.example

        def told(self, fields, origin):
            asked.append(fields["text"])
            return example(self, fields, origin)

        other = dataclasses.replace(saved, params=params)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Translator, "example", told)
            patch.setattr(answering, "read_model", lambda _: other)
            code, _, err = run("--input", file, "--out", out)
        return code, err, asked

    code, err, _ = started([*sound[:4], b"a \xff", *sound[5:]])
    assert (code, out.exists()) == (2, False)
    assert f"{file}, line 5: byte 3: 0xff is not UTF-8" in err
    assert f"4 answers are kept in {kept}; rerun the command to continue" in err
    answers = [each["translation"] for each in model.translate(TEXTS, num_beams=2)]
    assert run("--input", file)[1].splitlines() == answers[:4]
    lines = kept.read_bytes().replace(answers[0].encode(), b"as kept", 1)
    kept.write_bytes(lines)
    code, _, asked = started(sound)
    assert (code, asked) == (0, TEXTS[4:])
    assert out.read_text().splitlines() == ["as kept", *answers[1:]]
    assert not kept.exists()
    # Another text, or another model, has no line from there on.
    kept.write_bytes(lines)
    assert started([b"dogs", *sound[1:]])[2] == ["dogs", *TEXTS[1:]]
    kept.write_bytes(lines)
    changed = jax.tree.map(lambda leaf: leaf * np.float32(1.0001), saved.params)
    assert started(sound, changed)[2] == TEXTS


def test_texts_are_answered_below_themselves(run, model):
    code, printed, _ = run("the cat", "a dog", "--top=2", "--alignments", "--prefix", "a hill")
    assert code == 0
    (first, _) = model.translate(
        ["the cat", "a dog"], ["a hill"] * 2, num_beams=2, nbest=2, alignments=True
    )
    best, other = first["candidates"]
    begin = printed.splitlines()[:4]
    assert begin[0] == "the cat"
    for line, each in zip(begin[1:3], (best, other), strict=True):
        assert line.startswith(f"    {each['score']:.3f}  {each['translation']}")
    assert begin[3].startswith("    attention: a←the  hill←cat")


def test_bad_settings_are_refused_before_anything_is_read(run):
    code, printed, err = run("the cat", "--top=3")
    assert (code, printed) == (2, "")
    assert "--top is 3; it must be at most --num-beams, 2" in err


SMALL = ModelConfig(
    vocab_size=TOKENIZER.vocab_size, num_positions=24, hidden_dim=16, num_layers=1, num_heads=2,
    mlp_dim=24, init_std=0.3, dtype="float32", pooler=False,
)  # fmt: skip
NETWORKS = {
    "transformer": TransformerNetwork(SMALL),
    "after": RecurrentNetwork(SMALL, RecurrentConfig("lstm", "multiplicative", "after")),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_translate_as_a_search_without_their_cache_does(name):
    saved = toy_translator(NETWORKS[name], scale=2.0)
    (answer,) = LoadedModel(saved).translate("the cat sat .", num_beams=3, alignments=True)
    best, score, _ = expected(saved, "the cat sat .", num_beams=3)[0]
    assert answer["translation"] == best
    assert answer["score"] == pytest.approx(score, abs=1e-4)
    assert answer["attention"]
