"""WordPiece: BERT's own tokenizer, through Hugging Face `tokenizers`.

The algorithm (Devlin et al. 2018; google-research/bert `tokenization.py`): drop control characters,
set CJK characters apart, optionally lower-case and strip accents, split at whitespace and
punctuation, then cut each word greedily into the longest pieces the vocabulary has.

`tokenizers` departs from the original on rare characters; `docs/decisions.md` lists them all. They
are kept: `transformers` rebuilds this normaliser from the vocabulary whatever `tokenizer.json`
says, and a model must see in use the ids that it saw in training.
"""

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm import tqdm

from bert_jax.data.store import SpecialIds
from bert_jax.data.tokenizer import (
    CONFIG_NAME,
    MAX_TOKEN_CHARS,
    MAX_TOKENS,
    SPECIAL_TOKENS,
    Encoding,
    Id,
    replace_surrogates,
    write_directory,
)
from bert_jax.errors import UserError

# One thread unless the environment says otherwise: the corpus builder runs one process per core,
# and a pool of threads started before a fork would deadlock in the child.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CONTINUATION = "##"

_log = logging.getLogger(__name__)

_JOINERS = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
"""Python's `str.split` splits at these, BERT deletes them (they are control characters)."""
_CACHED_WORDS = 1 << 18
"""About 50 MB when full."""
_CACHED_WORD_LENGTH = 32
_COUNTED_WORDS = 1 << 18


@dataclass(frozen=True)
class WordPieceOptions:
    """What determines ids besides the vocabulary."""

    lowercase: bool = True
    strip_accents: bool | None = None
    """None: as `lowercase`, the original's behaviour."""
    split_cjk: bool = True
    """Each CJK ideograph is a word of its own."""
    max_word_chars: int = 100
    """Longer words become [UNK]. `transformers` has 100 and cannot be told otherwise; the original
    had 200 in its last version."""

    @property
    def strips_accents(self) -> bool:
        """`strip_accents` with its default resolved."""
        return self.lowercase if self.strip_accents is None else self.strip_accents

    def normalizer(self) -> normalizers.Normalizer:
        """BERT's normaliser with these options."""
        return normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=self.split_cjk,
            strip_accents=self.strips_accents,
            lowercase=self.lowercase,
        )


class WordPieceTokenizer:
    """A vocabulary and its options; see `bert_jax.data.tokenizer.Tokenizer` for the methods."""

    kind = "wordpiece"
    word_prefix = ""
    num_between = 1
    mask_takes_blank = False

    def __init__(
        self,
        vocab: Sequence[str],
        options: WordPieceOptions | None = None,
        *,
        where: str = "vocabulary, entry {}",
    ) -> None:
        """Check the vocabulary and build the tokenizer.

        Args:
            vocab: tokens in the order of their ids.
            options: see `WordPieceOptions`.
            where: names an entry in error messages; `{}` becomes its position, from 1.

        Raises:
            UserError: an entry is empty, repeated, too long or not one line of text; a special
                token is missing; too many entries.
        """
        options = options or WordPieceOptions()
        ids = _check_vocab(vocab, where)
        self.options = options
        self.vocab = tuple(vocab)
        self.vocab_size = len(self.vocab)
        self.special_ids = SpecialIds(*(ids[t] for t in SPECIAL_TOKENS))
        self.continues_word = np.array(
            [t.startswith(CONTINUATION) and len(t) > len(CONTINUATION) for t in self.vocab]
        )
        self.fingerprint = _fingerprint(self.vocab, options)
        self._ids = ids
        # No added tokens: they would be matched in raw text before anything else.
        self._fast = tokenizers.Tokenizer(
            models.WordPiece(
                ids,
                unk_token="[UNK]",
                max_input_chars_per_word=options.max_word_chars,
                continuing_subword_prefix=CONTINUATION,
            )
        )
        self._fast.normalizer = options.normalizer()
        self._fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._decoder = decoders.WordPiece(prefix=CONTINUATION)
        self._cache: dict[str, bytes] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return WordPieceTokenizer, (self.vocab, self.options)

    def encode(self, text: str) -> Encoding:
        """See `Tokenizer.encode`; a word that becomes [UNK] has the span of the word."""
        try:
            found = self._fast.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            found = self._fast.encode(replace_surrogates(text), add_special_tokens=False)
        offsets = np.array(found.offsets, np.int32).reshape(-1, 2)
        return Encoding(np.array(found.ids, np.int32), offsets)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """See `Tokenizer.encode_batch`.

        No step of the algorithm looks across whitespace, so a text's ids are those of its
        space-separated words one after another, and words repeat: each is encoded once and kept.
        The arrays are read-only.
        """
        cache = self._cache
        words = [
            (_JOINERS.sub("", text) if _JOINERS.search(text) else text).split() for text in texts
        ]
        parts = [list(map(cache.get, each)) for each in words]
        missing = {
            word
            for each, found in zip(words, parts, strict=True)
            if None in found
            for word, ids in zip(each, found, strict=True)
            if ids is None
        }
        if missing:
            fresh = dict(zip(missing, self._encode_words(list(missing)), strict=True))
            if len(cache) + len(fresh) > _CACHED_WORDS:
                cache = self._cache = {}  # starting over costs one batch; frequent words return
            # Words of unspaced scripts are whole sentences and do not repeat.
            cache.update(
                (word, ids)
                for word, ids in fresh.items()
                if len(word) <= _CACHED_WORD_LENGTH and len(cache) < _CACHED_WORDS
            )
            for each, found in zip(words, parts, strict=True):
                if None in found:
                    found[:] = [
                        fresh[word] if ids is None else ids
                        for word, ids in zip(each, found, strict=True)
                    ]
        return [np.frombuffer(b"".join(found), np.int32) for found in parts]  # type: ignore[arg-type]

    def _encode_words(self, words: list[str]) -> list[bytes]:
        try:
            found = self._fast.encode_batch_fast(words, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            words = [replace_surrogates(word) for word in words]
            found = self._fast.encode_batch_fast(words, add_special_tokens=False)
        return [np.array(each.ids, np.int32).tobytes() for each in found]

    def decode(self, ids: Iterable[Id]) -> str:
        """See `Tokenizer.decode`; pieces are joined and English punctuation closed up."""
        return self._decoder.decode([self.id_to_token(id) for id in ids])

    def id_to_token(self, id: Id) -> str:
        """See `Tokenizer.id_to_token`."""
        if not 0 <= id < self.vocab_size:
            raise IndexError(f"token id {id} is outside the vocabulary of {self.vocab_size}")
        return self.vocab[id]

    def token_to_id(self, token: str) -> int | None:
        """See `Tokenizer.token_to_id`."""
        return self._ids.get(token)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json, vocab.txt, tokenizer_config.json; `AutoTokenizer` loads them too.

        There the special tokens are added tokens, so `transformers` does match them in text.
        """
        whole = tokenizers.Tokenizer.from_str(self._fast.to_str())
        whole.decoder = self._decoder
        whole.add_special_tokens(list(SPECIAL_TOKENS))
        whole.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", self.special_ids.cls), ("[SEP]", self.special_ids.sep)],
        )
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.options.lowercase,
            "strip_accents": self.options.strips_accents,
            "tokenize_chinese_chars": self.options.split_cjk,
            "max_input_chars_per_word": self.options.max_word_chars,
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "mask_token": "[MASK]",
        }
        files = {
            "tokenizer.json": whole.to_str(pretty=True),
            "vocab.txt": "".join(token + "\n" for token in self.vocab),
            CONFIG_NAME: json.dumps(config, indent=1) + "\n",
        }
        write_directory(directory, self.kind, {n: f.encode() for n, f in files.items()})


def _check_vocab(vocab: Sequence[str], where: str) -> dict[str, int]:
    """Token to id, or UserError."""
    if len(vocab) > MAX_TOKENS:
        raise UserError(f"{where.format(MAX_TOKENS + 1)}: more than {MAX_TOKENS:,} tokens")
    ids: dict[str, int] = {}
    for id, token in enumerate(vocab):
        at = where.format(id + 1)
        if not token:
            raise UserError(f"{at} is empty; each entry is one token")
        if len(token) > MAX_TOKEN_CHARS:
            raise UserError(
                f"{at}: a token of {len(token):,} characters ({token[:40]!r}...); the limit is "
                f"{MAX_TOKEN_CHARS:,}"
            )
        if "\n" in token or "\r" in token or "\0" in token:
            raise UserError(f"{at}: {token[:80]!r} has a line break or a NUL; vocab.txt has one "
                            "token a line")  # fmt: skip
        if ids.setdefault(token, id) != id:
            raise UserError(
                f"{at}: {token[:80]!r} is there already ({where.format(ids[token] + 1)}); each "
                "token has one id"
            )
        try:
            token.encode()
        except UnicodeEncodeError:
            raise UserError(f"{at}: {token[:80]!r} is not valid Unicode text") from None
    missing = [token for token in SPECIAL_TOKENS if token not in ids]
    if missing:
        source = where.partition(",")[0]
        raise UserError(
            f"{source} has {len(vocab):,} tokens, without {', '.join(missing)}; all of "
            f"{', '.join(SPECIAL_TOKENS)} are needed"
        )
    return ids


def _fingerprint(vocab: Sequence[str], options: WordPieceOptions) -> str:
    """sha256 over the vocabulary in order and the options with defaults resolved."""
    determines = {
        "kind": "wordpiece",
        "version": 1,
        "vocab": list(vocab),
        "options": asdict(options) | {"strip_accents": options.strips_accents},
    }
    return hashlib.sha256(json.dumps(determines, sort_keys=True).encode()).hexdigest()


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    *,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    split_cjk: bool = True,
    min_frequency: int = 2,
    limit_alphabet: int = 1000,
    progress: bool = False,
) -> WordPieceTokenizer:
    """Learn a vocabulary: the same texts in any order give the same one.

    Pairs of pieces are merged most frequent first, as `tokenizers` does it. Its trainer alone gives
    another vocabulary on every run, because it numbers the characters in the order of a randomly
    seeded hash table and breaks ties by number. Here the characters are counted and numbered first,
    and the trainer gets the counted words with that numbering.

    Args:
        texts: read once; memory grows with the number of distinct words only.
        vocab_size: tokens in all, the five special ones included.
        lowercase, strip_accents, split_cjk: see `WordPieceOptions`.
        min_frequency: a pair rarer than this is not merged.
        limit_alphabet: only so many characters, the most frequent, get tokens; words with others
            become [UNK]. Raise it for Chinese or Japanese.
        progress: show a bar on stderr.

    Returns:
        A tokenizer whose `vocab_size` is smaller than asked, with a logged warning, where the texts
        have too few pairs.

    Raises:
        UserError: no words in `texts`, or `vocab_size` smaller than the special tokens and the
            alphabet.
    """
    options = WordPieceOptions(lowercase, strip_accents, split_cjk)
    if vocab_size > MAX_TOKENS:
        raise UserError(f"vocab_size is {vocab_size:,}; the limit is {MAX_TOKENS:,}")
    if vocab_size <= len(SPECIAL_TOKENS):  # said before the texts are read
        raise UserError(
            f"vocab_size is {vocab_size}; the {len(SPECIAL_TOKENS)} special tokens alone take "
            f"{len(SPECIAL_TOKENS)}. BERT has 30522; a few thousand do for a small corpus"
        )
    counts = _count_words(iter(tqdm(texts, "texts", disable=not progress)), options)
    if not counts:
        raise UserError("the texts to train a vocabulary on have no words; give some text")
    alphabet, kept = _alphabet(counts, limit_alphabet)
    numbered = [*SPECIAL_TOKENS, *alphabet]
    if len(numbered) > vocab_size:
        raise UserError(
            f"vocab_size is {vocab_size}; the {len(SPECIAL_TOKENS)} special tokens and the "
            f"{kept} characters of the texts (alone and after {CONTINUATION}) need "
            f"{len(numbered)}. Ask for more than that, or lower limit_alphabet ({limit_alphabet})"
        )
    allowed = {token[-1] for token in alphabet}

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
        show_progress=progress,
    )
    trained.train_from_iterator(words(), trainer)
    ids = trained.get_vocab()
    if len(ids) < vocab_size:
        _log.warning(
            "the texts gave %d tokens, %d were asked for: no further pair occurs %d times",
            len(ids), vocab_size, min_frequency,
        )  # fmt: skip
    return WordPieceTokenizer(sorted(ids, key=ids.__getitem__), options)


def _count_words(texts: Iterable[str], options: WordPieceOptions) -> Counter[str]:
    """How often each word occurs, after normalisation and splitting at punctuation."""
    normalizer, splitter = options.normalizer(), pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()

    def flush(spaced: Counter[str]) -> None:
        for text, count in spaced.items():
            for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)):
                if len(word) <= options.max_word_chars:
                    counts[word] += count
        spaced.clear()

    # Normalisation is slow and does not look across whitespace: do it once per distinct word.
    spaced: Counter[str] = Counter()
    for text in texts:
        spaced.update(_JOINERS.sub("", replace_surrogates(text)).split())
        if len(spaced) > _COUNTED_WORDS:
            flush(spaced)
    flush(spaced)
    return counts


def _alphabet(counts: Counter[str], limit: int) -> tuple[list[str], int]:
    """Sorted tokens of one character, alone and continuing, and how many characters they are."""
    total: Counter[str] = Counter()
    first: set[str] = set()
    rest: set[str] = set()
    for word, count in counts.items():
        first.add(word[0])
        rest.update(word[1:])
        for char in word:
            total[char] += count
    kept = set(sorted(total, key=lambda char: (-total[char], char))[:limit])
    alone = sorted(first & kept)
    return alone + [CONTINUATION + char for char in sorted(rest & kept)], len(kept)
