"""Fill-mask: candidates, batches, several masks in a text, and what it refuses."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.infer import MaskFiller, forward
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.saved.model import Origin, SavedModel
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "a", "mat", "hill", "."]


@pytest.fixture(scope="module")
def filler() -> MaskFiller:
    tokenizer = WordPieceTokenizer([*SPECIAL, *WORDS])
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, num_positions=40, hidden_dim=16, num_layers=1,
        num_heads=2, mlp_dim=32, init_std=0.5,
    )  # fmt: skip
    return filler_of(config, tokenizer)


def filler_of(config: ModelConfig, tokenizer: WordPieceTokenizer, top: int = 5) -> MaskFiller:
    saved = SavedModel(
        config=config, params=init_params(config, jax.random.key(0)), outputs=None,
        tokenizer=tokenizer, tokenizer_files=Path(), max_length=config.num_positions,
        name="random", origin=Origin("pretrain"),
    )  # fmt: skip
    return MaskFiller(forward.on_device(saved), top=top)


def test_special_tokens_are_never_candidates(filler):
    every = MaskFiller(filler.model, top=len(WORDS))
    ((candidates,),) = every.fill(["the cat [MASK] on a mat."])
    assert sorted(c.token for c in candidates) == sorted(WORDS)


def test_more_candidates_than_words_are_all_words(filler):
    ((candidates,),) = MaskFiller(filler.model, top=10**6).fill(["[MASK]"])
    assert len(candidates) == len(WORDS)
    # Shares of the whole vocabulary: the special tokens have the rest.
    assert 0 < sum(c.probability for c in candidates) < 0.99


def test_a_candidate_names_its_token_and_fills_its_place(filler):
    (masks,) = filler.fill(["The [MASK] sat on [MASK] mat."])
    tokenizer = filler.model.tokenizer
    for candidates, form in zip(
        masks, ("The {} sat on [MASK] mat.", "The [MASK] sat on {} mat."), strict=True
    ):
        for each in candidates:
            assert tokenizer.id_to_token(each.id) == each.token
            assert each.sequence == form.format(each.token)


def test_candidates_come_best_first(filler):
    ((candidates,),) = filler.fill(["the [MASK] sat"])
    probabilities = [c.probability for c in candidates]
    assert len(probabilities) == 5
    assert probabilities == sorted(probabilities, reverse=True)


def test_batch_equals_single_texts(filler):
    texts = [
        "[MASK] cat",
        "the [MASK] sat on [MASK] mat . the dog ran",
        "a [MASK] hill .",
        "cat " * 35 + "[MASK]",
    ]
    for alone, together in zip([filler.fill([t])[0] for t in texts], filler.fill(texts),
                               strict=True):  # fmt: skip
        assert len(alone) == len(together)
        for a, b in zip(alone, together, strict=True):
            assert [c.token for c in a] == [c.token for c in b]
            np.testing.assert_allclose(
                [c.probability for c in a], [c.probability for c in b], atol=2e-6
            )


def test_several_masks_answer_for_their_own_place(filler):
    (masks,) = filler.fill(["[MASK] cat [MASK] on [MASK]"])
    assert len(masks) == 3
    assert len({tuple(c.token for c in m) + tuple(c.probability for c in m) for m in masks}) == 3


def test_more_texts_than_a_batch(filler):
    assert len(filler.fill(["[MASK] cat"] * 70)) == 70


@pytest.mark.parametrize("text", ["", "no mask", "[mask]"])
def test_text_without_mask_is_refused(filler, text):
    with pytest.raises(UserError, match=r"^text 1: .* has no \[MASK\]"):
        filler.fill([text])


def test_text_beyond_the_positions_is_refused(filler):
    fits = "cat " * 37 + "[MASK]"  # and [CLS], [SEP]: 40
    assert len(filler.fill([fits])) == 1
    with pytest.raises(UserError, match="has 41 tokens, and the model was built for 40"):
        filler.fill(["cat " + fits])


def test_length_of_the_batch_does_not_pass_the_positions(filler):
    model = filler.model
    shorter = dataclasses.replace(model.config, num_positions=35)
    assert filler_of(shorter, model.tokenizer).fill(["cat " * 32 + "[MASK]"])
