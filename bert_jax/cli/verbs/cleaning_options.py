"""Options of cleaning, for the verb that builds a corpus; imports are made when one is used."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from bert_jax.cli.verbs.options import Commas, Directory, Verb
from bert_jax.errors import UserError

if TYPE_CHECKING:
    from bert_jax.data.corpus.cleaning.config import CleaningConfig


class Cleaning(Verb):
    """Rules for cleaning documents."""

    TITLE: ClassVar[str] = "cleaning"

    filter: tuple[Annotated[str, "NAME"], ...] = ()
    """Published filters that drop documents or lines: a group (gopher, gopher-quality,
    gopher-repetition, c4), a single filter, or a filter with other bounds, NAME=LOW:HIGH. May be
    repeated; an unknown name lists all."""
    language: Annotated[str, "CODE[:P]"] = ""
    """Language to keep, such as de; de:0.9 with the lowest probability (default: 0.8)."""
    drop_duplicates: Commas[str] = ()
    """Kinds of duplicates to drop, separated by commas. exact: documents with the same words as an
    earlier document, or equal training pairs. paragraphs: paragraphs with the same words as an
    earlier paragraph. near: documents whose word 5-shingles have a Jaccard similarity of at least
    0.8 with an earlier document; near=0.7 sets another limit."""
    without: tuple[Annotated[str, "FILE"], ...] = ()
    """Evaluation texts, as `bert-jax contamination --against` takes them; paragraphs that share an
    n-gram of 13 words with them are left out. May be repeated."""
    keep_dropped: Directory | None = None
    """Directory for samples of dropped documents, with the reason."""

    def cleaning(self) -> "CleaningConfig":
        """Return the rules that the options set; refuse options without sense or effect."""
        from bert_jax.data.corpus.cleaning.config import CleaningConfig

        language, colon, threshold = self.language.partition(":")
        given: dict[str, Any] = (
            {"language_threshold": _number("--language", threshold)} if colon else {}
        )
        names = {"exact": "duplicates", "paragraphs": "duplicate_paragraphs"}
        for each in self.drop_duplicates:
            kind, equals, similarity = each.partition("=")
            if kind == "near":
                value = _number("--drop-duplicates near", similarity) if equals else 0.8
                given["near_duplicates"] = value
            elif each in names:
                given[names[each]] = True
            else:
                raise UserError(
                    f"--drop-duplicates has {each!r}; give exact, paragraphs, near or "
                    "near=JACCARD, with commas between them"
                )
        config = CleaningConfig(
            filters=self.filter, language=language, without=self.without, **given
        )
        if self.keep_dropped is not None and config.is_empty:
            raise UserError(
                "--keep-dropped has nothing to write: no document is dropped without --filter, "
                "--language, --drop-duplicates or --without"
            )
        return config


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{option}: {text!r} is no number") from None
