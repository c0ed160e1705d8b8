"""Learning a byte-level BPE from text, in the form of ModernBERT's tokenizer."""

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm

from bert_jax.errors import UserError
from bert_jax.tokenization.fast_tokenizer import FastTokenizer
from bert_jax.tokenization.tokenizer import (
    MAX_TOKEN_CHARS,
    MAX_TOKENS,
    SPECIAL_TOKENS,
    replace_surrogates,
    warn_of_few,
)
from bert_jax.tokenization.tokenizer_json import Pipeline


def train_bytelevel(
    texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2, progress: bool = False
) -> FastTokenizer:
    """Learn a vocabulary: the same texts in any order give the same one.

    Text is NFC-normalised and cut by GPT-2's pattern; a word begins with the space before it, and a
    text begins without one. Characters are UTF-8 bytes, and pairs are merged most frequent first,
    so that no text is lost to [UNK] and case, spaces and line breaks come back. Rows are [CLS] A
    [SEP] B [SEP], and [MASK] stands for a word with its space (Warner et al. 2024, ModernBERT).

    Args:
        texts: read once; memory grows with the number of distinct words only.
        vocab_size: tokens in all, the five special ones and 256 bytes included.
        min_frequency: least number of times that a merged pair occurs.
        progress: show how far the training is.

    Returns:
        A tokenizer whose `vocab_size` is smaller than asked, with a logged warning, where the texts
        have too few pairs.

    Raises:
        UserError: no text, or an option out of range.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    reserved = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size > MAX_TOKENS:
        raise UserError(f"vocab_size is {vocab_size:,}; the limit is {MAX_TOKENS:,}")
    if vocab_size <= reserved:
        raise UserError(
            f"vocab_size is {vocab_size}; {len(SPECIAL_TOKENS)} special tokens and "
            f"{len(alphabet)} bytes alone take {reserved}. ModernBERT has 50368"
        )
    if min_frequency < 1:
        raise UserError(f"min_frequency is {min_frequency}; it must be at least 1")
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.NFC()
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        max_token_length=MAX_TOKEN_CHARS,
        show_progress=progress,
    )
    counted = tqdm(texts, "texts", disable=not progress)
    trained.train_from_iterator(map(replace_surrogates, counted), trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].__getitem__)
    if not model["merges"]:
        raise UserError(
            "the texts to train a vocabulary on have no pair of characters that occurs "
            f"{min_frequency} times; give more text"
        )
    warn_of_few(len(vocab), vocab_size, f"no remaining pair occurs {min_frequency} times")
    divide = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    pipeline = Pipeline(
        kind="byte_level_bpe",
        vocab=tuple(vocab),
        scores=(),
        merges=tuple((left, right) for left, right in model["merges"]),
        normalizer=({"type": "NFC"},),
        pre_tokenizer=(divide | {"trim_offsets": True},),
        byte_fallback=False,
        fuse_unk=False,
        unk_in_model=False,
        roles=SPECIAL_TOKENS,
        eats_space=("[MASK]",),
        trim_offsets=True,
    )
    return FastTokenizer(pipeline)
