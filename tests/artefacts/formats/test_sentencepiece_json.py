# ruff: noqa: RUF001 (texts of many scripts)
"""A SentencePiece model as tokenizer.json gives the ids that the model gives."""

import io
import unicodedata

import numpy as np
import pytest
import sentencepiece
import tokenizers

from bert_jax.artefacts.exchange.proof import PROOF_TEXTS
from bert_jax.artefacts.formats.sentencepiece_json import is_tie, tokenizer_json
from bert_jax.errors import UserError
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer, train_sentencepiece

DECOMPOSED = [unicodedata.normalize("NFD", text) for text in PROOF_TEXTS]
ORDER = [
    "مدرِّسٌ خاصَّةٌ",  # shadda after and before its vowel: NFC would reorder
    "مدر\u0650\u0651س",
    "ا\u064f\u0654ف",  # a mark between a letter and the one it composes with
    "ｶﾞｷﾞ ﾊﾟ ｳﾞ",
    "ª\u200d Ａ ¼",
    "\x01\u0301a",
    "\u200d\u200d x",
    " \u2581 a \u2581",
    "\u00b4a \u00a8",
]
SPELLED = ["[CLS][SEP] a[MASK]b [PAD] ▁[UNK]", "<0x41><0xFF> <0x4 1>", "[[CLS]] <<0x41>>"]


@pytest.fixture(scope="module", params=["unigram", "bpe", "unigram lower", "bpe without bytes"])
def both(request):
    kind, *options = request.param.split()
    ours = train_sentencepiece(
        [*PROOF_TEXTS, *ORDER], 1000, model=kind, lowercase="lower" in options,
        byte_fallback="without" not in options, character_coverage=0.98,
    )  # fmt: skip
    theirs = tokenizers.Tokenizer.from_str(tokenizer_json(ours).decode())
    return ours, theirs


def assert_same(ours, found, text):
    expected = ours.encode(text).ids.tolist()
    if found != expected:
        assert is_tie(ours, found, expected), text


def test_only_what_is_as_probable_is_a_tie(both):
    ours, _ = both
    a = ours.encode("the river froze").ids.tolist()
    b = ours.encode("the river frozen").ids.tolist()
    spelled = [ours.token_to_id(char) for char in "the"]
    whole = ours.encode("the").ids.tolist()
    assert not is_tie(ours, a, b)
    assert not is_tie(ours, whole, [ours.token_to_id("▁"), *spelled])


@pytest.mark.parametrize("texts", [PROOF_TEXTS, DECOMPOSED, ORDER, SPELLED])
def test_ids_are_equal(both, texts):
    ours, theirs = both
    theirs.encode_special_tokens = True  # text that spells one is text
    for text in texts:
        found = theirs.encode(text, add_special_tokens=False).ids
        assert_same(ours, found, text)


def test_random_characters_and_spaces(both):
    ours, theirs = both
    theirs.encode_special_tokens = True
    random = np.random.default_rng(0)
    alphabet = " \t\n\u3000\u00a0\u2581ab\x01\u00b4\u200b\u200d-é漢"
    texts = ["".join(random.choice(list(alphabet), 12)) for _ in range(300)]
    for text, found in zip(
        texts, theirs.encode_batch(texts, add_special_tokens=False), strict=True
    ):
        assert_same(ours, found.ids, text)


def test_special_tokens_are_set_around(both):
    ours, theirs = both
    special = ours.special_ids
    a, b = (ours.encode(text).ids.tolist() for text in ("a river", "the bank"))
    found = theirs.encode("a river", "the bank")
    assert found.ids == [special.cls, *a, special.sep, *b, special.sep]
    assert found.type_ids == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    words = theirs.decode(found.ids, skip_special_tokens=True).split()
    assert words == ["a", "river", "the", "bank"]


def test_the_file_alone_is_read_here(both, tmp_path):
    """As Transformers saves it again, without the model that it was made of."""
    ours, _ = both
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json(ours))
    back = load_tokenizer(tmp_path)
    assert back.special_ids == ours.special_ids
    for text in (*PROOF_TEXTS, *DECOMPOSED, *ORDER, *SPELLED):
        assert_same(ours, back.encode(text).ids.tolist(), text)


def test_what_cannot_be_said_is_refused():
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROOF_TEXTS[:8]), model_writer=out, vocab_size=120,
        hard_vocab_limit=False, pad_id=0, unk_id=1, bos_id=2, eos_id=3, pad_piece="[PAD]",
        unk_piece="[UNK]", bos_piece="[CLS]", eos_piece="[SEP]", control_symbols=["[MASK]"],
        user_defined_symbols=["river"], treat_whitespace_as_suffix=True, minloglevel=2,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"user-defined.*treat_whitespace_as_suffix"):
        tokenizer_json(SentencePieceTokenizer(out.getvalue()))
