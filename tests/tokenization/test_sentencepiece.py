# ruff: noqa: RUF001 (texts in many scripts)
"""SentencePiece: offsets through normalisation, injection, files, training, bad input."""

import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import sentencepiece as library
from checked_encoding import checked_encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.errors import UserError
from bert_jax.files.untrusted.tensor_bundle import read_varint
from bert_jax.terminal import Intervals
from bert_jax.tokenization import sentencepiece as module
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS, Tokenizer, replace_surrogates

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "Pack my box with five dozen liquor jugs; the jugs are heavy.",
    "A fine office finds full fields; the final figure is 12345.",
    "literal [MASK] and [CLS] or [SEP], [PAD], [UNK] in the text",
] * 10
Kind = Literal["unigram", "bpe"]
KINDS: tuple[Kind, Kind] = ("unigram", "bpe")
MADE = {
    (kind, fallback): train_sentencepiece(TEXTS, 400 if fallback else 150, model=kind,
                                          byte_fallback=fallback, character_coverage=1.0)
    for kind in KINDS
    for fallback in (True, False)
}  # fmt: skip
ALL = pytest.mark.parametrize("made", MADE.values(), ids=[f"{k}-{b}" for k, b in MADE])


_TRICKY = st.sampled_from(" \tthefoxﬁ½é\u0301漢🎉▁ﷺ´\u200b\x00[]")
# Not st.text: it would draw from the union, in which the tricky ones are one in ten thousand.
_ANY_TEXT = st.lists(st.one_of(_TRICKY, _TRICKY, st.characters()), max_size=40).map("".join)


def spans(made: Tokenizer, text: str) -> list[tuple[str, str]]:
    """(token, the text it covers), bare spaces left out."""
    ids, offsets = made.encode(text)
    found = [(made.id_to_token(i), text[a:b]) for i, (a, b) in zip(ids, offsets, strict=True)]
    return [(token, part) for token, part in found if token != "▁"]


def covered(made: Tokenizer, text: str) -> list[str]:
    """The distinct stretches of text that tokens cover, in order."""
    parts = [tuple(span) for span in made.encode(text).offsets.tolist() if span[0] < span[1]]
    return [text[a:b] for a, b in dict.fromkeys(parts)]


@ALL
def test_special_ids_are_fixed(made: SentencePieceTokenizer) -> None:
    assert made.special_ids == SpecialIds(0, 1, 2, 3, 4)
    assert [made.id_to_token(i) for i in range(5)] == list(SPECIAL_TOKENS)
    assert isinstance(made, Tokenizer)
    assert made.continues_word.shape == (made.vocab_size,)
    assert not made.continues_word[:5].any()
    space, letter = made.token_to_id("▁"), made.token_to_id("x")
    assert space is not None
    assert letter is not None
    assert not made.continues_word[space]
    assert made.continues_word[letter]
    byte = made.token_to_id("<0x41>")
    assert byte is None or made.continues_word[byte]
    assert made.token_to_id("no such piece") is None
    assert made.token_to_id("[UNK]") == 1


@ALL
def test_text_never_yields_special_ids(made: SentencePieceTokenizer) -> None:
    text = "[MASK] x[MASK]y [CLS][SEP] [PAD] </s> <unk> [UNK]"
    for ids in (made.encode(text).ids, made.encode_batch([text])[0]):
        assert not {0, 2, 3, 4} & set(ids.tolist())
    if made.token_to_id("<0x41>") is not None:
        assert 1 not in made.encode(text).ids
        assert made.decode(made.encode(text).ids) == text


def test_a_model_whose_specials_match_text_is_refused(tmp_path: Path) -> None:
    out = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=out, vocab_size=99, hard_vocab_limit=False,
        minloglevel=2, pad_id=0, unk_id=1, bos_id=2, eos_id=3, bos_piece="[CLS]", eos_piece="[SEP]",
        user_defined_symbols=["[MASK]"],
    )  # fmt: skip
    path = tmp_path / "a.model"
    path.write_bytes(out.getvalue())
    with pytest.raises(UserError, match=r"a.model: \[MASK\] is not a control symbol"):
        load_tokenizer(path)
    out = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=out,
        vocab_size=99,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path.write_bytes(out.getvalue())
    # A setting that has no effect, as in a T5, does not hide this.
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    said = r"no piece for \[PAD\], \[CLS\], \[SEP\], \[MASK\]; give a tokenizer\.json"
    with pytest.raises(UserError, match=said):
        load_tokenizer(path)


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_through_normalisation(kind: Kind) -> None:
    made = MADE[kind, True]
    # Each letter of the ligature belongs to the whole ligature, and nothing spills over.
    parts = spans(made, "a ﬁne")
    assert "".join(token for token, _ in parts).replace("▁", "") == "afine"
    assert {part for token, part in parts if token in ("▁f", "▁fi", "f", "fi", "i")} <= {"ﬁ"}
    assert "".join(covered(made, "ｆｕｌｌ")) == "ｆｕｌｌ"
    assert covered(made, "e\u0301") == ["e\u0301"]  # composed, then two bytes
    assert covered(made, "漢字") == ["漢", "字"]
    assert covered(made, "🎉 👩\u200d👧") == ["🎉", "👩", "\u200d", "👧"]
    assert covered(made, "\u1112\u1161\u11ab") == ["\u1112\u1161\u11ab"]  # one composed syllable
    assert covered(made, "½") == ["½"]
    assert covered(made, "ﷺ") == ["ﷺ"]  # four words, with spaces between
    assert covered(made, "x´")[-1] == "´"  # a space and an accent
    # The space put before the first word has no source.
    ids, offsets = made.encode("漢")
    assert made.id_to_token(ids[0]) == "▁"
    assert offsets[0].tolist() == [0, 0]
    assert covered(made, "x\x1cy z") == ["x", "y", "z"]  # U+001C is dropped, and is a space
    text = "  the \t\n the\u3000the  "
    ids, offsets = made.encode(text)
    assert "".join(text[a:b] for a, b in offsets) == "the" * 3
    assert len(ids) == len(offsets)


@ALL
@settings(max_examples=120)
@given(text=_ANY_TEXT)
def test_offsets_and_batches_on_any_text(made: SentencePieceTokenizer, text: str) -> None:
    ids, offsets = checked_encoding(made, text)
    for id, (start, end) in zip(ids.tolist(), offsets.tolist(), strict=True):
        token = made.id_to_token(id)
        assert (start == end) <= (token.strip("▁") == "" or made.special_ids.unk == id)
        if id >= 5 and not token.startswith("<0x") and token.strip("▁"):
            plain = made._fast.normalize(text[start:end])
            assert token.strip("▁") in plain
            if all(len(made._fast.normalize(char).strip("▁")) < 2 for char in text[start:end]):
                assert token.strip("▁") == plain.strip("▁")
    again, text = made.decode(ids), replace_surrogates(text)
    # NFKC of U+FB01 and an accent is not yet normal: the accent then joins the bare letter.
    if 1 not in ids and made._fast.normalize(again) == made._fast.normalize(text):
        np.testing.assert_array_equal(made.encode(again).ids, ids)


@ALL
def test_extreme_texts(made: SentencePieceTokenizer) -> None:
    assert made.encode("").ids.shape == (0,)
    assert made.encode("").offsets.shape == (0, 2)
    assert made.encode_batch([]) == []
    assert [len(x) for x in made.encode_batch(["", "  ", "\u200b"])] == [0, 0, 0]
    word = made.encode("a" * 20_000)
    assert word.offsets[-1].tolist()[1] == 20_000
    (long_text,) = made.encode_batch(["the fox " * 20_000])
    assert len(long_text) == 20_000 * len(made.encode("the fox").ids)
    assert made.encode("a\ud800b").offsets.max() == 3
    assert len(made.encode_batch(["a\ud800b"])[0]) == len(made.encode("a\ud800b").ids)


@ALL
def test_decode_shows_special_tokens_by_name(made: SentencePieceTokenizer) -> None:
    ids = [2, *made.encode("the quick fox").ids, 4, *made.encode("jumps").ids, 3, 0]
    assert made.decode(ids) == "[CLS] the quick fox [MASK] jumps [SEP] [PAD]"
    assert made.decode(np.array(ids)) == made.decode(ids)
    for bad in (-1, made.vocab_size):
        with pytest.raises(IndexError):
            made.decode([bad])
        with pytest.raises(IndexError):
            made.id_to_token(bad)


@ALL
def test_saved_and_loaded_is_the_same(made: SentencePieceTokenizer, tmp_path: Path) -> None:
    made.save(tmp_path / "t")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t"]
    for path in (tmp_path / "t", tmp_path / "t" / "tokenizer.model"):
        loaded = load_tokenizer(path)
        assert loaded.fingerprint == made.fingerprint
        assert loaded.encode(TEXTS[0]).ids.tolist() == made.encode(TEXTS[0]).ids.tolist()
    assert pickle.loads(pickle.dumps(made)).fingerprint == made.fingerprint


def test_fingerprints_differ() -> None:
    assert len({made.fingerprint for made in MADE.values()}) == len(MADE)


@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_same_bytes_every_time(kind: Kind) -> None:
    here = train_sentencepiece(iter(TEXTS), 350, model=kind)
    assert here._model == train_sentencepiece(TEXTS, 350, model=kind)._model
    code = (
        "import sys, json\n"
        "from bert_jax.tokenization.sentencepiece import train_sentencepiece as t\n"
        f"print(t(json.load(sys.stdin), 350, model={kind!r}).fingerprint)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(TEXTS), capture_output=True, text=True,
        check=True, env={"PATH": "", "PYTHONHASHSEED": "7"}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert out.stdout.strip() == here.fingerprint


def test_lowercase_folds_case() -> None:
    made = train_sentencepiece(TEXTS, 350, lowercase=True)
    assert made.encode("THE Fox").ids.tolist() == made.encode("the fox").ids.tolist()
    assert "".join(covered(made, "THE")) == "THE"


def test_long_lines_and_reserved_characters_are_not_dropped() -> None:
    # The library drops lines over 4192 bytes, and those with a tab or U+2585, silently.
    for texts in (
        ["zebra " * 2000],
        ["zebra\tzoo " * 9],
        ["zebra \u2585 zoo"] * 9,
        ["zébra" * 4000],
    ):
        lines = list(module._lines(texts))
        assert max(len(line.encode()) for line in lines) <= 4 * module._LINE_CHARS
        letters = [c for c in "".join(texts) if c.isalpha()]
        assert [c for c in "".join(lines) if c.isalpha()] == letters
        made = train_sentencepiece(texts, 290)
        assert any("z" in made.id_to_token(i) for i in range(261, made.vocab_size))


def test_a_sample_of_many_lines_is_uniform_and_repeatable(caplog: Any) -> None:
    lines = [str(i) for i in range(2000)]
    assert module._sample(lines, 2000) == lines
    assert not caplog.records
    sample = module._sample(iter(lines), 500)
    assert sample == module._sample(lines, 500)
    assert "sample of 500 of 2000 lines" in caplog.text
    assert len(set(sample)) == 500
    # Mean of a uniform sample: 999.5, with a standard error of 577 / sqrt(500) = 26.
    assert abs(np.mean([int(line) for line in sample]) - 999.5) < 4 * 26


def test_bad_training_requests(caplog: Any) -> None:
    with pytest.raises(UserError, match="are empty"):
        train_sentencepiece(["", " \n\t "], 400)
    with pytest.raises(
        UserError, match=r"vocab_size is 200; 5 special tokens and 256 bytes .* 261"
    ):
        train_sentencepiece(TEXTS, 200)
    with pytest.raises(UserError, match=r"vocab_size is 5; 5 special tokens alone take 5"):
        train_sentencepiece(TEXTS, 5, byte_fallback=False)
    with pytest.raises(UserError, match=r"vocab_size is 262, .* characters of the texts need \d+"):
        train_sentencepiece(TEXTS, 262)
    with pytest.raises(UserError, match="limit is 1,000,000"):
        train_sentencepiece(TEXTS, 2_000_000)
    made = train_sentencepiece(TEXTS, 5000)
    assert made.vocab_size < 5000
    assert f"the vocabulary has {made.vocab_size} of the 5000 tokens" in caplog.text


def test_nothing_is_printed_unless_asked(capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Intervals, "due", lambda intervals: True)
    train_sentencepiece(TEXTS, 350)
    assert capfd.readouterr() == ("", "")
    train_sentencepiece(TEXTS, 350, progress=True)
    assert " texts/s]" in capfd.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\x00", b"not a model", b"\xff" * 1000])
def test_bad_model_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.model"):
        load_tokenizer(path)


def test_a_damaged_piece_is_named() -> None:
    whole = MADE["unigram", True]._model
    with pytest.raises(UserError, match=r"piece \d+ is not UTF-8"):
        SentencePieceTokenizer(whole.replace("▁".encode(), b"\xe2\x96A", 1))


def test_two_models_in_a_directory_are_refused(tmp_path: Path) -> None:
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match="2 tokenizers, "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["spm.model", "spiece.model"])
def test_tokens_that_other_files_add_are_refused(name: str, tmp_path: Path) -> None:
    made = MADE["unigram", True]
    (tmp_path / name).write_bytes(made._model)
    added = tmp_path / "added_tokens.json"
    added.write_text(json.dumps({"[MASK]": made.special_ids.mask}))  # a piece of the model
    assert load_tokenizer(tmp_path).vocab == made.vocab
    added.write_text(json.dumps({"<ent>": made.vocab_size}))
    with pytest.raises(
        UserError, match=rf"{name}: a file beside it adds '<ent>'; .* tokenizer\.json"
    ):
        load_tokenizer(tmp_path)
    added.unlink()
    fields = {"added_tokens_decoder": {str(made.vocab_size): {"content": "<ent>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="adds '<ent>'; give"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"do_lower_case": True}, "sets do_lower_case"),
        ({"tokenizer_class": "AlbertTokenizer"}, "class changes accents and quotation marks"),
        (
            {"tokenizer_class": "AlbertTokenizerFast", "do_lower_case": False},
            "class changes accents and quotation marks",
        ),
        ({"tokenizer_class": "BigBirdTokenizer"}, ""),
        ({"split_by_punct": True}, "sets split_by_punct"),
    ],
)
def test_what_a_class_does_before_the_model_is_refused(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    made = MADE["unigram", True]
    (tmp_path / "spiece.model").write_bytes(made._model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    if not said:
        assert load_tokenizer(tmp_path).vocab == made.vocab
        return
    with pytest.raises(UserError, match=rf"spiece.model: .* {said}; give a tokenizer.json"):
        load_tokenizer(tmp_path)


def test_truncated_models_are_refused_or_sound(tmp_path: Path) -> None:
    whole = MADE["unigram", True]._model
    ends, at = [], 0  # of the fields
    while at < len(whole):
        _, at = read_varint(whole, at, len(whole), "tag")
        size, at = read_varint(whole, at, len(whole), "size")
        at += size
        ends.append(at)
    sound = []
    for size in sorted({*range(0, len(whole), len(whole) // 40), *ends[:-2:40], ends[-2]}):
        try:
            made = SentencePieceTokenizer(whole[:size])
        except UserError:  # anything else, a crash included, fails
            continue
        sound.append(size)
        ids = checked_encoding(made, TEXTS[0]).ids
        assert 0 <= ids.min() <= ids.max() < made.vocab_size
        assert made.decode(ids) == TEXTS[0]
    assert sound == ends[-2:-1]  # lacks the rules of normalisation alone
