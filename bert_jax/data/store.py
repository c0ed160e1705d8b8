"""The token store: a tokenized corpus as memory-mapped arrays.

On disk, a store has a manifest (`corpus.json`) and one or more shards. A shard has one flat
little-endian file per array, so that building a batch is one gather::

    corpus.json  tokenizer/  unigram_counts.bin
    shards/00000/  shards/00001/  ...
        tokens.bin  sentence_offsets.bin  document_offsets.bin  unigram_counts.bin
"""

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data.shard import (
    MAX_HEADER_BYTES,
    OFFSET_DTYPE,
    OPEN_SHARDS,
    Shard,
    Shards,
    StoreTokenizer,
    check_digests,
    check_manifest,
    check_offsets,
    check_tokens,
    damaged,
    map_array,
    token_dtype,
)
from bert_jax.errors import UserError
from bert_jax.files.checks import DIGESTS, Checks
from bert_jax.files.untrusted.json_file import read_json
from bert_jax.tokenization.special_ids import SpecialIds

FORMAT = "bert_jax token store"
VERSION = 3
ARRAYS = ("tokens", "sentence_offsets", "document_offsets")
"""Names of the array files of a shard, without `.bin`."""
COUNTS = "unigram_counts"
"""Name of an array file of a store and of each shard: the number of times that each id occurs."""
MAX_VOCAB = 1 << 22  # largest vocabulary, since opening a store reads the counts of all ids
_NAME = re.compile(r"[0-9A-Za-z_-]{1,100}")  # name of the directory of a shard


class ShardEntry(NamedTuple):
    """A shard's entry in the manifest."""

    name: str
    """Directory below `shards`."""
    num_tokens: int
    num_sentences: int
    num_documents: int
    sha256: Mapping[str, str] = {}
    """sha256 of each array, by name. The fingerprint of the store depends on these digests."""
    crc32c: Mapping[str, str] = {}
    """CRC-32C of each array and of `COUNTS`, by name. It is faster to compute than sha256."""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "ShardEntry":
        """Make an entry from its JSON. Malformed JSON raises the errors that `_described` lists."""
        name, *numbers = (entry[field] for field in cls._fields[:4])
        if not _NAME.fullmatch(name) or not all(
            type(number) is int and 0 < number < 1 << 48 for number in numbers
        ):
            raise ValueError(f"invalid name or counts of a shard: {name!r} with {numbers}")
        sha256 = {array: str(entry["sha256"][array]) for array in ARRAYS}
        crc32c = {array: str(entry[DIGESTS][array]) for array in (*ARRAYS, COUNTS)}
        return cls(name, *numbers)._replace(sha256=sha256, crc32c=crc32c)


@dataclass(frozen=True)
class TokenStore:
    """A tokenized corpus: the shards, and the content of the manifest."""

    shards: Shards
    counts: tuple[ShardEntry, ...]
    """Sizes and digests of the shards, from the manifest."""
    unigram_counts: np.ndarray
    """(vocab_size,) int64: number of times that each id occurs."""
    vocab_size: int
    special_ids: SpecialIds
    tokenizer_fingerprint: str
    fingerprint: str
    """sha256 of everything that determines the content. Equal stores have equal fingerprints."""
    path: Path | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Entries of `corpus.json` that have no field of their own."""
    checks: Checks = field(default_factory=Checks)
    """Comparisons of the arrays of opened shards with their digests (see `open_store`)."""

    @classmethod
    def of(cls, shards: Sequence[Shard], unigram_counts: np.ndarray) -> "TokenStore":
        """Make a store from shards in memory. The first shard gives vocabulary and metadata."""
        first = shards[0]
        sizes = ((each.num_tokens, each.num_sentences, each.num_documents) for each in shards)
        return cls(
            Shards(len(shards), shards.__getitem__), tuple(ShardEntry("", *each) for each in sizes),
            unigram_counts, first.vocab_size, first.special_ids, "", "", meta=first.meta,
        )  # fmt: skip

    @functools.cached_property
    def num_tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.num_tokens for shard in self.counts)

    @functools.cached_property
    def num_sentences(self) -> int:
        """Number of sentences in all shards."""
        return sum(shard.num_sentences for shard in self.counts)

    @functools.cached_property
    def num_documents(self) -> int:
        """Number of documents in all shards."""
        return sum(shard.num_documents for shard in self.counts)

    def shard_path(self, shard: ShardEntry) -> Path:
        """Return the directory of a shard. The store must be on disk."""
        assert self.path is not None
        return self.path / "shards" / shard.name

    @property
    def unknown_rate(self) -> float:
        """Share of [UNK] among the tokens. [UNK] stands for text the tokenizer cannot represent."""
        return float(self.unigram_counts[self.special_ids.unk] / self.num_tokens)

    @property
    def is_pairs(self) -> bool:
        """Whether each document is a pair of two sentences, a source and its target."""
        return self.meta.get("pairs") is True

    @property
    def target_entropy(self) -> float | None:
        """Entropy in nats of target tokens, with one end token per target. None without pairs."""
        value = self.meta.get("target_entropy")
        return float(value) if isinstance(value, float) else None

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Entropy in nats of the distribution of tokens, without special tokens.

        This is the masked-LM loss of a model that knows only the frequency of each token.
        """
        counts = np.asarray(self.unigram_counts, dtype=np.float64).copy()
        counts[list(asdict(self.special_ids).values())] = 0.0
        return entropy(counts)


def entropy(counts: np.ndarray) -> float:
    """Return the entropy in nats of the distribution with these counts, (vocab_size,)."""
    rates = counts[counts > 0] / max(counts.sum(), 1)
    return float((rates * -np.log(rates)).sum())


def is_store(path: str | Path) -> bool:
    """Tell whether `path` is the directory of a complete token store, even of an old version."""
    path = Path(path)
    has_arrays = (path / "shards").is_dir() or (path / "tokens.bin").is_file()
    return has_arrays and (path / "corpus.json").is_file()


def content_fingerprint(tokenizer_fingerprint: str, *digests: Mapping[str, str]) -> str:
    """Compute a store's fingerprint from its tokenizer's fingerprint and its arrays' sha256."""
    # Old runs have recorded fingerprints, so these version numbers must never change.
    parts = [f"{FORMAT} {1 if len(digests) == 1 else 2}", tokenizer_fingerprint]
    parts += [f"{name} {each[name]}" for each in digests for name in sorted(each)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def open_store(
    path: str | Path,
    tokenizer: StoreTokenizer | None = None,
    *,
    verify: bool = False,
    background: bool = False,
    fetch: Callable[[str], None] = lambda name: None,
    num_open: int = OPEN_SHARDS,
) -> TokenStore:
    """Open a store. Arrays are memory maps, and a shard is opened when it is first used.

    Raise a UserError if the store is missing, incomplete, damaged or of another version, or if it
    was built with another tokenizer than `tokenizer`. (None allows any tokenizer.)

    Args:
        verify: Whether to read everything and compare it with the fingerprint (about 1 GB/s).
        background: Whether a thread compares an opened shard with its digests while the shard is in
            use; `store.checks.wait()` raises the error. Otherwise, opening a shard waits.
        fetch: Function that fetches a shard's files, by shard name, before the shard is opened.
    """
    store = read_manifest(path, tokenizer)
    checked: set[int] = set()

    def open_by_number(number: int) -> Shard:
        fetch(store.counts[number].name)
        shard = open_shard(store, number, check=number not in checked)
        if number not in checked:
            checked.add(number)
            assert shard.path is not None
            digests = {f"{array}.bin": store.counts[number].crc32c[array] for array in ARRAYS}
            store.checks.add(functools.partial(check_digests, shard.path, digests))
            if not background:
                store.checks.wait()
        return shard

    store = replace(store, shards=Shards(len(store.counts), open_by_number, num_open))
    if verify:
        _verify(store)
    elif len(store.counts) == 1:
        fetch(store.counts[0].name)
        open_shard(store, 0)  # raises now if a file is missing
    return store


def read_manifest(path: str | Path, tokenizer: StoreTokenizer | None = None) -> TokenStore:
    """Read the manifest and the counts of ids, but no shards. Errors are as in `open_store`."""
    path = Path(path)
    header = _read_header(path)
    try:
        store = _described(path, header)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"corpus.json: {type(error).__name__}: {error}") from error
    if tokenizer is not None and tokenizer.fingerprint != store.tokenizer_fingerprint:
        raise UserError(
            f"the token store {path} was built with another tokenizer (fingerprint "
            f"{store.tokenizer_fingerprint}; the given tokenizer's is {tokenizer.fingerprint}). "
            f"Use the tokenizer in {path / 'tokenizer'}, or build the corpus with the given one."
        )
    unigram = np.array(map_array(path, COUNTS, OFFSET_DTYPE, store.vocab_size))
    total = sum(unigram.tolist())  # numpy's sum could overflow
    if unigram.min() < 0 or total != store.num_tokens:
        raise damaged(path, f"{COUNTS}.bin adds up to {total}, not {store.num_tokens}")
    check_manifest(path, header)
    return replace(store, unigram_counts=unigram)


def open_shard(
    store: TokenStore, number: int, *, check: bool = True, verify: bool = False
) -> Shard:
    """Open a shard on disk; `check` its first offsets or, with `verify`, all offsets.

    Raise a UserError if the shard is missing or damaged.
    """
    entry = store.counts[number]
    path = store.shard_path(entry)
    shard = Shard(
        map_array(path, "tokens", token_dtype(store.vocab_size), entry.num_tokens),
        map_array(path, "sentence_offsets", OFFSET_DTYPE, entry.num_sentences + 1),
        map_array(path, "document_offsets", OFFSET_DTYPE, entry.num_documents + 1),
        store.vocab_size, store.special_ids, path, store.meta,
    )  # fmt: skip
    if check:
        check_offsets(path, "sentence", shard.sentence_offsets, entry.num_tokens, whole=verify)
        check_offsets(path, "document", shard.document_offsets, entry.num_sentences, whole=verify)
    return shard


def _verify(store: TokenStore) -> None:
    """Read all shards and compare them with the manifest."""
    for number, entry in enumerate(store.counts):
        shard = open_shard(store, number, verify=True)
        assert shard.path is not None
        check_tokens(shard.path, shard.tokens, store.vocab_size)
        for name, digest in entry.sha256.items():
            if hashlib.sha256(getattr(shard, name).data).hexdigest() != digest:
                said = f"{name}.bin does not have the digest that corpus.json names"
                raise damaged(shard.path, said)
    digests = (entry.sha256 for entry in store.counts)
    if content_fingerprint(store.tokenizer_fingerprint, *digests) != store.fingerprint:
        raise damaged(store.path, "its content does not have the fingerprint in corpus.json")


def _described(path: Path, header: Mapping[str, Any]) -> TokenStore:
    """Make the store that a header describes, without its shards and its counts of ids.

    Raise an AttributeError, KeyError, TypeError or ValueError if the header is malformed.
    """
    shards = tuple(map(ShardEntry.read, header["shards"]))
    whole = tuple(header[name] for name in ShardEntry._fields[1:4])
    sums = tuple(map(sum, zip(*(shard[1:4] for shard in shards), strict=True)))
    if sums != whole:  # true for an empty list of shards, too
        raise ValueError(
            f"the token, sentence and document counts of the shards add up to {sums}, but the "
            f"counts of the store are {whole}"
        )
    if len({shard.name for shard in shards}) < len(shards):
        raise ValueError("two shards have the same name")
    vocab_size = header["vocab_size"]
    if type(vocab_size) is not int or not 0 < vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size is {vocab_size}; it must be 1 to {MAX_VOCAB}")
    special_ids = SpecialIds(**header["special_ids"])
    if not all(type(i) is int and 0 <= i < vocab_size for i in asdict(special_ids).values()):
        raise ValueError(f"{special_ids} has ids that are not from 0 to {vocab_size - 1}")
    fingerprints = (header["tokenizer_fingerprint"], header["fingerprint"])
    if not all(isinstance(fingerprint, str) for fingerprint in fingerprints):
        raise ValueError(f"a fingerprint is not a string: {fingerprints}")
    if header["token_dtype"] != token_dtype(vocab_size).name:
        raise ValueError(
            f"token_dtype is {header['token_dtype']!r}, which does not fit vocab_size {vocab_size}"
        )
    known = {"vocab_size", "special_ids", "tokenizer_fingerprint", "fingerprint", "shards"}
    return TokenStore(
        Shards(0, ().__getitem__), shards, np.zeros(0, np.int64), vocab_size, special_ids,
        *fingerprints, path, {key: value for key, value in header.items() if key not in known},
    )  # fmt: skip


def _read_header(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UserError(f"no token store at {path}: there is no such directory.")
    if not (path / "corpus.json").is_file():
        for part in ("train", "heldout"):
            if is_store(path / part):
                said = f"holds several token stores; name one of them, such as {path / part}."
                raise UserError(f"{path} {said}")
        raise UserError(
            f"no complete token store at {path}: it has no corpus.json. Build one with "
            "`bert-jax corpus`."
        )
    try:
        header = read_json(path / "corpus.json", max_bytes=MAX_HEADER_BYTES)
    except UserError as error:
        raise damaged(path, f"{error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UserError(f"{path / 'corpus.json'} does not describe a bert_jax token store.")
    if header.get("version") != VERSION:
        raise UserError(
            f"the token store {path} has version {header.get('version')!r}; this bert_jax reads "
            f"version {VERSION}. Build the corpus again, or use the version that built it."
        )
    return header
