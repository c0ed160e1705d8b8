from functools import partial

import numpy as np
import pytest

from bert_jax.cli.inspection.replay import describe_batch
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.objective import Shown
from bert_jax.tokenization.load import load_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "play", "##ing", "dog"]
PAD, UNK, CLS, SEP, MASK, THE, CAT, SAT, PLAY, ING, DOG = range(11)

describe = partial(describe_batch, first_row=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return load_tokenizer(path)


def make_batch(tokens, types, segments, label):
    return {
        "tokens": np.array([tokens], np.uint16),
        "type_ids": np.array([types], np.uint8),
        "segment_ids": np.array([segments], np.uint8),
        "pair_labels": np.array([label], np.int32),
        "row_index": np.array([40], np.uint32),
    }


def mask(batch, replaced):
    tokens = batch["tokens"].astype(np.int32)
    positions = np.array([[*replaced, 0]], np.int32)
    weights = np.array([[1] * len(replaced) + [0]], np.float32)
    inputs = tokens.copy()
    inputs[0, list(replaced)] = list(replaced.values())
    return MaskedLM.shown({"tokens": inputs, "positions": positions, "weights": weights})


def test_pair_with_masks(tokenizer):
    tokens = [CLS, THE, CAT, PLAY, ING, SEP, DOG, SAT, SEP, PAD]
    batch = make_batch(tokens, [0] * 6 + [1] * 3 + [0], [1] * 9 + [0], 1)
    text = describe(
        batch,
        mask(batch, {1: THE, 2: MASK, 4: MASK, 6: CAT}),
        tokenizer,
        pairing="nsp",
        first_row=40,
    )
    assert text.splitlines() == [
        "1 rows of 10: 9 tokens, 1 padding, 4 to predict.",
        "{word} is masked, {word>other} replaced by a random token, {word=} kept; "
        "all are predicted.",
        "",
        "row 0, stream 40, 9 tokens, B is random, 4 to predict",
        "   A  [CLS] {the=} {cat} play{ing} [SEP]",
        "   B  {dog>cat} sat [SEP]",
    ]
    swapped = describe(batch, mask(batch, {}), tokenizer, pairing="sop")
    _, row = swapped.split("\n\n")
    assert "A and B swapped" in row
    assert "{" not in row


def test_packed_segments_and_padding_rows(tokenizer):
    batch = make_batch(
        [CLS, CAT, SEP, CLS, ING, DOG, SEP, PAD], [0] * 8, [1] * 3 + [2] * 4 + [0], -1
    )
    text = describe(batch, mask(batch, {}), tokenizer)
    assert "row 0, stream 40, 7 tokens, 2 segments, 0 to predict\n" in text
    assert "   1  [CLS] cat [SEP]\n   2  [CLS] ##ing dog [SEP]" in text
    empty = make_batch([PAD] * 4, [0] * 4, [0] * 4, -1)
    assert describe(empty, mask(empty, {}), tokenizer).endswith(
        "row 0, stream 40, 0 tokens, 0 to predict"
    )


def test_targets_follow_their_sources(tokenizer):
    batch = make_batch([CLS, CAT, SEP, CLS, DOG, SEP], [0] * 6, [1] * 3 + [2] * 3, -1)
    del batch["pair_labels"]
    batch["target_tokens"] = np.array([[CLS, PLAY, ING, CLS, SAT, PAD, PAD]], np.uint16)
    batch["target_segment_ids"] = np.array([[1, 1, 1, 2, 2, 0, 0]], np.uint8)
    shown = Shown(batch["tokens"], np.zeros((1, 6), bool))
    assert describe(batch, shown, tokenizer, pairing="translation").splitlines() == [
        "1 rows of 6 + 7: 11 tokens, 2 padding, 5 to predict.",
        "A target (>) follows its source; its tokens after [CLS] and its end are predicted.",
        "",
        "row 0, stream 40, 11 tokens, 2 segments, 5 to predict",
        "   1  [CLS] cat [SEP]",
        "   >  [CLS] playing",
        "   2  [CLS] dog [SEP]",
        "   >  [CLS] sat",
    ]


def test_long_rows_wrap_and_rows_can_be_limited(tokenizer):
    batch = make_batch([CLS] + [PLAY, ING, DOG] * 100 + [SEP], [0] * 302, [1] * 302, 0)
    text = describe(batch, mask(batch, {}), tokenizer)
    assert max(map(len, text.splitlines())) <= 98
    assert text.count("playing dog") + text.count("playing\n") == 100
    two = {name: np.repeat(array, 2, axis=0) for name, array in batch.items()}
    shown = Shown(*(np.repeat(array, 2, axis=0) for array in mask(batch, {})))
    assert describe(two, shown, tokenizer, max_rows=1).endswith("(1 more rows)")
