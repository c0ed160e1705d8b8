"""Scripts of letters, and how a tokenizer covers them."""

import numpy as np
import pytest
from fast_files import write_fast

from bert_jax.data.corpus.datasheet import (
    OTHER,
    measure_coverage,
    script_of,
    scripts_as_json,
    text_script,
    vocabulary_scripts,
)
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer


@pytest.mark.parametrize(
    ("char", "script"),
    [
        ("a", "Latin"), ("Ä", "Latin"), ("ж", "Cyrillic"), ("漢", "Han"), ("々", "Han"),
        ("ひ", "Hiragana"), ("ｶ", "Katakana"), ("\uff21", "Latin"), ("한", "Hangul"),
        ("ा", "Devanagari"), ("ع", "Arabic"), ("λ", "Greek"), ("7", ""), (".", ""), ("\u0301", ""),
        ("\U0001d400", ""), (" ", ""),
    ],
)  # fmt: skip
def test_scripts_of_letters(char: str, script: str) -> None:
    assert script_of(char) == script


def test_a_text_has_the_script_of_its_first_letter() -> None:
    assert text_script("3. жизнь and more") == "Cyrillic"
    assert text_script("3.14") == OTHER


def test_unknown_words_by_script() -> None:
    tokenizer = WordPieceTokenizer([*SPECIAL_TOKENS, "the", "cat", "##s", "день", "."])
    found = measure_coverage(tokenizer, ["The cats the.", "день ночь", "漢"])
    counts = {name: tuple(c.values()) for name, c in found.items()}
    assert counts == {
        "Latin": (3, 4, 0, 0), OTHER: (1, 1, 0, 0), "Cyrillic": (2, 2, 1, 0), "Han": (1, 1, 1, 0),
    }  # fmt: skip
    assert scripts_as_json(found)["Latin"]["tokens_per_word"] == pytest.approx(4 / 3)


def test_a_token_is_decoded_once(monkeypatch) -> None:
    tokenizer, decoded = WordPieceTokenizer([*SPECIAL_TOKENS, "the", "cat"]), []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(ids) or decode(ids))
    for _ in range(3):
        measure_coverage(tokenizer, ["the cat", "the"])
    assert len(decoded) == 2


@pytest.mark.parametrize("kind", ["bpe", "pieces"])
def test_bytes_of_a_letter_count_for_its_script(tmp_path, kind: str) -> None:
    tokenizer = load_tokenizer(write_fast(tmp_path, kind))
    found = measure_coverage(tokenizer, ["the fox 漢"])
    assert (found["Han"]["tokens"] >= 3, found["Han"]["fallback"]) == (True, 3)
    assert (found["Latin"]["fallback"], found["Han"]["unknown"]) == (0, 0)


def test_counts_of_ids_are_divided_without_text(tmp_path) -> None:
    tokenizer = load_tokenizer(write_fast(tmp_path, "bpe"))
    ids = np.concatenate(tokenizer.encode_batch(["the dog, the fox", "漢"]))
    found = vocabulary_scripts(tokenizer, np.bincount(ids, minlength=tokenizer.vocab_size))
    assert sum(one["tokens"] for one in found.values()) == ids.size
    assert found["parts of characters"]["fallback"] == 3
    assert found["Latin"]["words"] == 3  # the first word has no space before it
    assert found[OTHER]["tokens"] == 1
