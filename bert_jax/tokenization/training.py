"""Training of a WordPiece vocabulary, or of a byte-level BPE vocabulary like ModernBERT's."""

import json
import logging
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from bert_jax.errors import UserError
from bert_jax.terminal import progress_bar
from bert_jax.tokenization.fast_tokenizer import FastTokenizer
from bert_jax.tokenization.tokenizer import (
    MAX_TOKEN_CHARS,
    SPECIAL_TOKENS,
    check_vocab_size,
    replace_surrogates,
    warn_of_few,
)
from bert_jax.tokenization.tokenizer_json import Pipeline
from bert_jax.tokenization.wordpiece import (
    CONTINUATION,
    JOINERS,
    WordPieceOptions,
    WordPieceTokenizer,
)

COVERAGE = 0.9995
"""Default fraction of the texts' characters, counted with repetitions, that must have a token."""
_ALPHABET = 1000  # characters that get a token by default, even if fewer reach `COVERAGE`
_COUNTED_WORDS = 1 << 18  # distinct words in memory before they are normalised
_COUNTED_CHARS = 1 << 24  # characters of texts in memory before they are normalised
MEMORY = 4.0  # default bound, in GiB, of the memory for counted words
_WORD_BYTES = 1 << 10  # memory for a counted word, in the table of counts and in the trainer

_log = logging.getLogger(__name__)


class CountedWords(NamedTuple):
    """Words of some texts, in a form that takes little memory."""

    words: str
    """Distinct words, with spaces between them."""
    counts: "array[int]"
    dropped: int
    """Number of times that a rare word was dropped."""


def train_wordpiece(
    texts: Iterable[str | CountedWords],
    vocab_size: int,
    *,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    min_frequency: int = 2,
    limit_alphabet: int | None = None,
    character_coverage: float | None = None,
    memory: float = MEMORY,
    progress: bool = False,
) -> WordPieceTokenizer:
    """Train a vocabulary. Unless words are dropped (see `memory`), the order does not matter.

    The trainer of `tokenizers` merges pairs of pieces, most frequent first. Used directly, it gives
    another vocabulary on every run, because it numbers characters in the order of a randomly seeded
    hash table and breaks ties by number. This function counts and numbers the characters first.
    Raise a UserError if `texts` have no words, an option is out of range, or `vocab_size` has no
    room for the special tokens and the alphabet. Log a warning if there are too few pairs for
    `vocab_size`, or if more than 0.05% of the texts are characters without a token.

    Args:
        texts: Texts, which are read once, or the words that `count_words` counted in them with the
            same `lowercase` and `strip_accents`.
        lowercase, strip_accents: See `WordPieceOptions`.
        min_frequency: Smallest number of times that a pair must occur to be merged.
        limit_alphabet: Number of characters that get tokens; words with rarer ones become [UNK].
        character_coverage: Fraction of the texts' characters, counted with repetitions, that must
            have a token. If neither this nor `limit_alphabet` is given, the 1,000 most frequent
            characters get tokens: more if 99.95% coverage needs more, fewer if `vocab_size` is too
            small for them. If merging leaves room, further characters get tokens.
        memory: Limit in GiB for the counted words, at 1 KiB a word. Beyond the limit, the rarest
            words so far are dropped (among equally rare words, the first in alphabetical order)
            until half of the limit is used. A warning is logged.
    """
    options = WordPieceOptions(lowercase, strip_accents)
    advice = "BERT has 30522; a few thousand are enough for a small corpus"
    check_vocab_size(vocab_size, len(SPECIAL_TOKENS), "the special tokens", advice)
    for name, value in (("min_frequency", min_frequency), ("limit_alphabet", limit_alphabet)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    if character_coverage is not None and not 0 < character_coverage <= 1:
        raise UserError(
            f"character_coverage is {character_coverage}; it must be above 0 and at most 1"
        )
    shown = iter(progress_bar(texts, of="tokenizer", unit="texts", shown=progress))
    counts, dropped = _count_words(shown, options, memory)
    if dropped:
        _log.warning(
            "rare words were dropped %d times, because counted words fill %g GiB; a larger bound "
            "(--memory) drops fewer", dropped, memory,
        )  # fmt: skip
    if not counts:
        raise UserError("the texts to train a vocabulary on have no words; give some text")
    alphabet = _Alphabet.of(counts)
    size = alphabet.choose(vocab_size, limit_alphabet, character_coverage)
    numbered = [*SPECIAL_TOKENS, *alphabet.tokens(0, size)]
    allowed = set(alphabet.characters[:size])

    def words() -> Iterator[str]:
        for word, count in counts.items():
            if allowed.issuperset(word):
                for done in range(0, count, 4096):
                    yield f"{word} " * min(4096, count - done)

    trained = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=numbered,  # numbers them in this order
        continuing_subword_prefix=CONTINUATION,
        show_progress=progress and sys.stderr.isatty(),
    )
    trained.train_from_iterator(words(), trainer)
    ids = trained.get_vocab()
    vocab = sorted(ids, key=ids.__getitem__)
    if limit_alphabet is None and character_coverage is None:
        while size < len(alphabet.characters) and len(vocab) < vocab_size:  # room that is left
            vocab += alphabet.tokens(size, size + 1)[: vocab_size - len(vocab)]
            size += 1
    warn_of_few(len(vocab), vocab_size, f"no remaining pair occurs {min_frequency} times")
    if (share := alphabet.share(size)) < COVERAGE:
        why = f"vocab_size {vocab_size} has no room for them"
        if character_coverage is not None:
            why = f"character_coverage is {character_coverage}"
        if limit_alphabet is not None and size == limit_alphabet:
            why = f"limit_alphabet is {limit_alphabet}"
        _log.warning(
            "%d of the %d characters of the texts, %.2f%% of the text, have no token (%s); words "
            "that contain one of them become [UNK]",
            len(alphabet.characters) - size, len(alphabet.characters), 100 * (1 - share), why,
        )  # fmt: skip
    return WordPieceTokenizer(vocab, options)


def count_words(
    texts: Iterable[str], options: WordPieceOptions, memory: float = MEMORY
) -> CountedWords:
    """Count words for `train_wordpiece`, where `memory` is explained."""
    counts, dropped = _count_words(texts, options, memory)
    return CountedWords(" ".join(counts), array("Q", counts.values()), dropped)


def _count_words(
    texts: Iterable[str | CountedWords], options: WordPieceOptions, memory: float
) -> tuple[Counter[str], int]:
    """Count words, after normalisation and splitting at punctuation. Also count dropped words."""
    normalizer, splitter = options.normalizer(), pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    most = max(2, int(memory * 2**30) // _WORD_BYTES)
    chars = dropped = 0

    def add(words: Iterable[tuple[str, int]]) -> None:
        nonlocal dropped
        for word, count in words:
            counts[word] += count
            if len(counts) > most:
                rare = sorted(counts, key=lambda word: (counts[word], word))[: -(most // 2)]
                dropped += len(rare)
                for each in rare:
                    del counts[each]

    def flush(spaced: Counter[str]) -> None:
        nonlocal chars
        add(
            (word, count)
            for text, count in spaced.items()
            for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
            if len(word) <= options.max_word_chars
        )
        spaced.clear()
        chars = 0

    # Normalisation is slow, but does not look across whitespace: each distinct word needs it once.
    spaced: Counter[str] = Counter()
    for text in texts:
        if isinstance(text, CountedWords):
            add(zip(text.words.split(), text.counts, strict=True))
            dropped += text.dropped
            continue
        spaced.update(JOINERS.sub("", replace_surrogates(text)).split())
        chars += len(text)
        if len(spaced) > _COUNTED_WORDS or chars > _COUNTED_CHARS:
            flush(spaced)
    flush(spaced)
    return counts, dropped


@dataclass(frozen=True)
class _Alphabet:
    """The characters of counted words."""

    characters: list[str]
    """Characters, the most frequent first."""
    counts: list[int]
    first: set[str]
    """Characters that begin a word."""
    rest: set[str]
    """Characters that continue a word."""

    @classmethod
    def of(cls, words: Counter[str]) -> "_Alphabet":
        """Count the characters of words."""
        total: Counter[str] = Counter()
        for word, count in words.items():
            for char in word:
                total[char] += count
        first = {word[0] for word in words}
        rest = set(chain.from_iterable(word[1:] for word in words))
        characters = sorted(total, key=lambda char: (-total[char], char))
        return cls(characters, [total[char] for char in characters], first, rest)

    def tokens(self, start: int, stop: int) -> list[str]:
        """Return tokens for characters `start` to `stop`: word beginnings, then continuations."""
        kept = set(self.characters[start:stop])
        alone = sorted(self.first & kept)
        return alone + [CONTINUATION + char for char in sorted(self.rest & kept)]

    def share(self, size: int) -> float:
        """Return the fraction of the texts that the `size` most frequent characters make up."""
        return sum(self.counts[:size]) / sum(self.counts)

    def choose(self, vocab_size: int, limit: int | None, coverage: float | None) -> int:
        """Count the characters that get tokens; raise a UserError if `vocab_size` is too small."""
        costs = [(char in self.first) + (char in self.rest) for char in self.characters]
        used = [len(SPECIAL_TOKENS), *(len(SPECIAL_TOKENS) + n for n in accumulate(costs))]
        room = bisect_right(used, vocab_size) - 1
        wanted = COVERAGE if coverage is None else coverage
        covered = bisect_left(list(accumulate(self.counts)), wanted * sum(self.counts)) + 1
        covered = min(covered, len(self.characters))
        if limit is None and coverage is None:
            usual = min(_ALPHABET, len(self.characters))
            size = max(usual, covered)
            size = size if size <= room else min(covered, max(usual, room))
        else:
            size = min(limit or covered, covered if coverage else len(self.characters))
        if size > room:
            raise UserError(
                f"vocab_size is {vocab_size}; the {len(SPECIAL_TOKENS)} special tokens and the "
                f"{size} most frequent characters of the texts (alone and after {CONTINUATION}) "
                f"need {used[size]}. Set vocab_size above {used[size]}, or lower limit_alphabet or "
                "character_coverage"
            )
        return size


def train_bytelevel(
    texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2, progress: bool = False
) -> FastTokenizer:
    """Train a byte-level BPE of `vocab_size` tokens.

    Text is NFC-normalised and split by GPT-2's pattern, in which a word includes the space before
    it. No space is put before a text. Pairs of UTF-8 bytes are merged, most frequent first. As
    every byte has a token, no text becomes [UNK]. [MASK] stands for a word and the space before it
    (ModernBERT, Warner et al. 2024). Raise a UserError if no pair occurs `min_frequency` times, or
    an option is out of range (`vocab_size` includes 256 bytes and five special tokens).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    reserved = f"{len(SPECIAL_TOKENS)} special tokens and {len(alphabet)} bytes"
    number = len(SPECIAL_TOKENS) + len(alphabet)
    check_vocab_size(vocab_size, number, reserved, "ModernBERT has 50368")
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
        show_progress=progress and sys.stderr.isatty(),
    )
    counted = progress_bar(texts, of="tokenizer", unit="texts", shown=progress)
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
        kind="byte_level_bpe", vocab=tuple(vocab), scores=(),
        merges=tuple((left, right) for left, right in model["merges"]),
        normalizer=({"type": "NFC"},), pre_tokenizer=(divide | {"trim_offsets": True},),
        byte_fallback=False, fuse_unk=False, unk_in_model=False, roles=SPECIAL_TOKENS,
        eats_space=("[MASK]",), trim_offsets=True,
    )  # fmt: skip
    return FastTokenizer(pipeline)
