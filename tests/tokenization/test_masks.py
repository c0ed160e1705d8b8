"""Masks and what fills them, for readers: against the decoders of the `tokenizers` library."""

import pytest
from fast_files import write_fast
from tokenizers import decoders

from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.masks import encode_masked, filled, mask_spans, token_text
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

WORDS = ["the", "cat", "##s", ".", "[", "]", "mask", "猫"]
DECODERS = {"bpe": decoders.ByteLevel(), "unigram": decoders.Metaspace()}


@pytest.fixture(scope="module", params=list(DECODERS))
def fast(request, tmp_path_factory):
    path = write_fast(tmp_path_factory.mktemp(request.param), request.param)
    return load_tokenizer(path), DECODERS[request.param]


def entries_of(tokenizer, decoder):
    """(id, entry) of ordinary tokens that are whole characters."""
    special = {*vars(tokenizer.special_ids).values()}
    every = [(id, tokenizer.id_to_token(id)) for id in range(tokenizer.vocab_size)]
    found = [(id, e) for id, e in every if id not in special and "�" not in decoder.decode([e])]
    assert len(found) > 30
    return found


def test_a_token_reads_as_the_library_decodes_it(fast):
    tokenizer, decoder = fast
    for id, entry in entries_of(tokenizer, decoder):
        assert token_text(id, tokenizer).strip() == decoder.decode([entry]).strip()


@pytest.mark.parametrize("text", ["The dog <mask> over", "[MASK] dog", "The dog[MASK] over"])
def test_a_filled_text_reads_as_the_library_decodes_its_tokens(fast, text):
    tokenizer, decoder = fast
    (span,) = mask_spans(text, tokenizer)
    ids = encode_masked(text, tokenizer).ids.tolist()
    at = ids.index(tokenizer.special_ids.mask)
    for id, entry in entries_of(tokenizer, decoder):
        tokens = [tokenizer.id_to_token(other) for other in ids]
        tokens[at] = entry
        found = filled(text, span, id, tokenizer)
        assert found.split() == decoder.decode(tokens).split()


def test_bytes_that_are_no_character_are_named(tmp_path):
    tokenizer = load_tokenizer(write_fast(tmp_path, "bpe"))
    text = "漢\u0085😀"
    shown = [token_text(id, tokenizer) for id in tokenizer.encode(text).ids]
    assert shown == [f"<0x{byte:02X}>" for byte in text.encode()]
    assert token_text(tokenizer.token_to_id("Ġdog"), tokenizer) == " dog"


def test_pieces_of_words_join():
    tokenizer = WordPieceTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    text = "The cat [MASK], [MASK] ran"
    first, second = mask_spans(text, tokenizer)
    of = tokenizer.token_to_id
    assert filled(text, first, of("##s"), tokenizer) == "The cats, [MASK] ran"
    assert filled(text, second, of("猫"), tokenizer) == "The cat [MASK], 猫 ran"
    assert filled("[MASK]s", (0, 6), of("##s"), tokenizer) == "ss"


def test_places_in_the_text_are_those_of_the_text(fast):
    tokenizer, _ = fast
    text = "The  dog <mask> over[MASK] lazy"
    found = encode_masked(text, tokenizer)
    assert mask_spans(text, tokenizer) == [(9, 15), (20, 26)]
    slices = ["".join(text[start:end].split()) for start, end in found.offsets]
    assert "".join(slices) == "".join(text.split())
    at = [n for n, id in enumerate(found.ids) if id == tokenizer.special_ids.mask]
    assert [slices[n] for n in at] == ["<mask>", "[MASK]"]
