"""Byte-level BPE learnt from text."""

import json
import logging
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from checked_encoding import checked_encoding
from modern_files import TEXTS

from bert_jax.cli import main as cli
from bert_jax.errors import UserError
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import make_row
from bert_jax.tokenization.training import train_bytelevel

SCRIPT = """
import json, sys
from bert_jax.tokenization.training import train_bytelevel
print(train_bytelevel(json.load(sys.stdin), 600).fingerprint)
"""


@pytest.fixture(scope="module")
def made():
    return train_bytelevel(TEXTS, 600)


def test_the_same_texts_in_any_order_give_the_same_vocabulary(made):
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    for texts in (TEXTS, shuffled):
        found = subprocess.run(
            [sys.executable, "-c", SCRIPT], input=json.dumps(texts), text=True, check=True,
            capture_output=True,
        )  # fmt: skip
        assert found.stdout.strip() == made.fingerprint


def test_the_most_frequent_pair_is_merged_first():
    texts = ["aab aab aab", "ab ab", "zz"]
    found = train_bytelevel(texts, 264).pipeline.merges
    counts = Counter(pair for word in ("aab", "Ġaab", "Ġaab", "ab", "Ġab", "zz")
                     for pair in pairwise(word))  # fmt: skip
    assert found[0] == max(counts, key=counts.__getitem__) == ("a", "b")
    assert found[1] == ("a", "ab")
    assert train_bytelevel(texts, 300, min_frequency=3).pipeline.merges == found[:2]


def test_rows_and_special_tokens_are_as_of_modernbert(made):
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert made.vocab[:5] == names
    assert tuple(vars(made.special_ids).values()) == (0, 1, 2, 3, 4)
    assert made.vocab_size == 600
    assert made.word_prefix == " "
    assert made.mask_strips_space
    row = make_row(made, made.encode("a").ids, made.encode("b").ids).ids
    assert made.decode(row) == "[CLS] a [SEP] b [SEP]"


def test_no_text_is_lost(made):
    for text in TEXTS:
        ids = checked_encoding(made, text).ids
        assert made.special_ids.unk not in ids
    assert made.decode(made.encode("x \U0001f9ff\n  y\u0301").ids) == "x \U0001f9ff\n  \u00fd"
    assert made.encode("e\u0301").ids.tolist() == made.encode("\u00e9").ids.tolist()


def test_saved_it_is_the_same(made, tmp_path):
    made.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.fingerprint == made.fingerprint
    for text in TEXTS:
        np.testing.assert_array_equal(again.encode(text).ids, made.encode(text).ids)


@pytest.mark.parity
def test_transformers_loads_it(made, tmp_path):
    transformers = pytest.importorskip("transformers")
    made.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        if "[MASK]" not in text:
            row = make_row(made, made.encode(text).ids).ids.tolist()
            assert theirs(text)["input_ids"] == row
    assert theirs("a [MASK] b")["input_ids"] == [2, *made.encode("a").ids, 4,
                                                 *made.encode(" b").ids, 3]  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        (TEXTS, {"vocab_size": 261}, "vocab_size is 261; 5 special tokens and 256 bytes alone"),
        (TEXTS, {"vocab_size": 10**7}, "vocab_size is 10,000,000; the limit is 1,000,000"),
        (TEXTS, {"vocab_size": 300, "min_frequency": 0}, "min_frequency is 0; it must be at least"),
        ([], {"vocab_size": 300}, "no pair of characters that occurs 2 times; give more text"),
        (["a b c"], {"vocab_size": 300}, "no pair of characters that occurs 2 times"),
    ],
)
def test_what_is_refused(texts, options, said):
    with pytest.raises(UserError, match=said):
        train_bytelevel(texts, **options)


def test_too_little_text_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        made = train_bytelevel(["ab ab"], 300)
    assert made.vocab_size < 300
    assert "of the 300 tokens that were asked for: no remaining pair occurs 2 times" in caplog.text


def test_from_the_command_line(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("\n".join(TEXTS[:20]) * 3)
    command = ["tokenizer", "--input", f"{tmp_path / 'text.txt'}", "--kind", "bytelevel"]
    command += ["--vocab-size", "400", "--out", f"{tmp_path / 'out'}"]
    assert cli.main(command) == 0
    made = load_tokenizer(tmp_path / "out")
    assert f"bytelevel, 400 tokens, fingerprint {made.fingerprint[:12]}" in capsys.readouterr().out
    assert cli.main([*command[:-1], f"{tmp_path / 'b'}", "--min-frequency", "12"]) == 0
    assert load_tokenizer(tmp_path / "b").vocab_size < 400
    assert cli.main([*command[:-1], f"{tmp_path / 'c'}", "--character-coverage", "0.99"]) == 2
    assert "--character-coverage cannot be used with --kind bytelevel" in capsys.readouterr().err
