"""Fill-mask: candidates, batches, several masks in a text, and what it refuses."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.errors import UserError
from bert_jax.infer.loaded import LoadedModel
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "a", "mat", "hill", "."]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    tokenizer = WordPieceTokenizer([*SPECIAL, *WORDS])
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, num_positions=40, hidden_dim=16, num_layers=1,
        num_heads=2, mlp_dim=32, init_std=0.5,
    )  # fmt: skip
    return loaded(config, tokenizer)


def loaded(
    config: ModelConfig, tokenizer: WordPieceTokenizer, max_length: int | None = None
) -> LoadedModel:
    saved = SavedModel(
        config=config, params=init_params(config, jax.random.key(0)), outputs=None,
        tokenizer=tokenizer, tokenizer_files=Path(), max_length=config.num_positions,
        name="random", origin=Origin("pretrain"),
    )  # fmt: skip
    return LoadedModel(saved, max_length=max_length)


def fill(model: LoadedModel, texts: list[str], top: int = 5) -> list[list[list[dict]]]:
    return [answer["masks"] for answer in model.fill_mask(texts, top=top)]


def test_special_tokens_are_never_candidates(model):
    ((candidates,),) = fill(model, ["the cat [MASK] on a mat."], top=len(WORDS))
    assert sorted(c["token"] for c in candidates) == sorted(WORDS)


def test_more_candidates_than_words_are_all_words(model):
    ((candidates,),) = fill(model, ["[MASK]"], top=10**6)
    assert len(candidates) == len(WORDS)
    # Shares of the whole vocabulary: the special tokens have the rest.
    assert 0 < sum(c["probability"] for c in candidates) < 0.99


def test_rows_of_the_model_without_a_token_are_no_candidates(model):
    """A table may be padded, say to a multiple of 64."""
    config = dataclasses.replace(model.model.config, vocab_size=40)
    ((candidates,),) = fill(loaded(config, model.tokenizer), ["the [MASK] sat"], top=40)
    assert sorted(c["token"] for c in candidates) == sorted(WORDS)


def test_a_candidate_names_its_token_and_fills_its_place(model):
    (masks,) = fill(model, ["The [MASK] sat on [MASK] mat."])
    tokenizer = model.model.tokenizer
    for candidates, form in zip(
        masks, ("The {} sat on [MASK] mat.", "The [MASK] sat on {} mat."), strict=True
    ):
        for each in candidates:
            assert tokenizer.id_to_token(each["id"]) == each["token"]
            assert each["sequence"] == form.format(each["token"])


def test_candidates_come_best_first(model):
    ((candidates,),) = fill(model, ["the [MASK] sat"])
    probabilities = [c["probability"] for c in candidates]
    assert len(probabilities) == 5
    assert probabilities == sorted(probabilities, reverse=True)


def test_batch_equals_single_texts(model):
    texts = [
        "[MASK] cat",
        "the [MASK] sat on [MASK] mat . the dog ran",
        "a [MASK] hill .",
        "cat " * 35 + "[MASK]",
    ]
    for alone, together in zip([fill(model, [t])[0] for t in texts], fill(model, texts),
                               strict=True):  # fmt: skip
        assert len(alone) == len(together)
        for a, b in zip(alone, together, strict=True):
            assert [c["token"] for c in a] == [c["token"] for c in b]
            np.testing.assert_allclose(
                [c["probability"] for c in a], [c["probability"] for c in b], atol=2e-6
            )


def test_several_masks_answer_for_their_own_place(model):
    (masks,) = fill(model, ["[MASK] cat [MASK] on [MASK]"])
    assert len(masks) == 3
    assert len({tuple((c["token"], c["probability"]) for c in mask) for mask in masks}) == 3


def test_more_texts_than_a_batch(model):
    assert len(fill(model, ["[MASK] cat"] * 70)) == 70


@pytest.mark.parametrize("text", ["", "no mask", "[mask]"])
def test_text_without_mask_is_refused(model, text):
    with pytest.raises(UserError, match=r"^text 1: .* has no \[MASK\]"):
        fill(model, [text])


def test_text_beyond_the_positions_is_refused(model):
    fits = "cat " * 37 + "[MASK]"  # and [CLS], [SEP]: 40
    assert len(fill(model, [fits])) == 1
    with pytest.raises(UserError, match="has 41 tokens, but the model takes at most 40"):
        fill(model, ["cat " + fits])
    short = loaded(model.model.config, model.tokenizer, max_length=16)
    with pytest.raises(UserError, match="has 17 tokens, but the model takes at most 16"):
        fill(short, ["cat " * 14 + "[MASK]"])


def test_length_of_the_batch_does_not_pass_the_positions(model):
    saved = model.model
    shorter = dataclasses.replace(saved.config, num_positions=35)
    assert fill(loaded(shorter, saved.tokenizer), ["cat " * 32 + "[MASK]"])
