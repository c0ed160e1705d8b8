"""Tracks: fixed text, vocabulary, evaluation and budget, so that recipes' losses are comparable."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bert_jax.cli.demo.console import build_once, make_once
from bert_jax.config.bounds import Above, AtLeast, Below, Bounded
from bert_jax.config.mapping import build
from bert_jax.data.corpus.build import is_corpus, iter_texts
from bert_jax.errors import UserError
from bert_jax.files.checks import digest_of
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.training.pretrain.corpus import Corpus, open_corpus


@dataclass(frozen=True)
class Text:
    """A file that a track fixes."""

    name: str
    sha256: str
    """SHA-256 digest of the file in hexadecimal."""


@dataclass(frozen=True)
class Track(Bounded, section="track"):
    """Everything that recipes on a track have in common."""

    texts: tuple[Text, ...] = ()
    device: str = "cpu"
    """Kind of device, as `jax.Device.device_kind` names it."""
    devices: Annotated[int, AtLeast(1)] = 1
    cores: int = 0
    """Number of processor cores that a run may use; 0 for any number."""
    seconds: Annotated[float, Above(0)] = 600.0
    """Training time of a run."""
    vocab_size: Annotated[int, AtLeast(100)] = 8192
    """Number of tokens of the WordPiece vocabulary, which is learned from the texts."""
    heldout_rate: Annotated[float, Above(0), Below(1)] = 0.02
    """Share of the documents that is held out."""
    masking_rate: Annotated[float, Above(0), Below(1)] = 0.15
    """Share of the held-out tokens that is masked."""
    eval_rows: Annotated[int, AtLeast(1)] = 4096
    """Number of held-out rows that are scored."""

    def fields(self, corpus: Path | str) -> list[str]:
        """Return the fields that the track sets in every recipe, as NAME=VALUE."""
        return [
            f"data.corpus={corpus}", f"masking.eval_rate={self.masking_rate}",
            "masking.mask_rate=0.8", "masking.random_rate=0.1",  # kept tokens are easy to guess
            "masking.whole_word=False",  # a part of a word is easy to guess beside the others
            f"training.eval_rows={self.eval_rows}", "training.eval_every_steps=0",
        ]  # fmt: skip


def read_track(path: Path) -> Track:
    """Read a track from a JSON file; raise a UserError that names a wrong field."""
    return build(Track, read_json_object(path, max_bytes=1 << 20), str(path))


def prepare(track: Track, texts: Path, home: Path) -> Corpus:
    """Check the texts; learn the vocabulary and build the corpus, unless they exist.

    Raise a UserError, and write nothing, if a text is missing or differs from the track's.
    """
    corpus = home / "corpus"
    if not is_corpus(corpus):
        files = list(_checked(track, texts))
        vocabulary = home / "tokenizer"

        def learn() -> str:
            train_wordpiece(iter_texts(files), track.vocab_size, progress=True).save(vocabulary)
            return f"vocabulary  {track.vocab_size:,} tokens"

        make_once(vocabulary, learn)
        build_once(files, vocabulary, corpus, track.heldout_rate)
    return open_corpus(str(corpus))


def _checked(track: Track, texts: Path) -> Iterator[str]:
    for text in track.texts:
        path = texts / text.name
        if not path.is_file():
            raise UserError(f"{path}: no such file; --input names the directory of the texts")
        if (found := digest_of(path)) != text.sha256:
            raise UserError(
                f"{path}: SHA-256 is {found}, but the track has {text.sha256}; losses on another "
                "text do not compare"
            )
        yield str(path)
