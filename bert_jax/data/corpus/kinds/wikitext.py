"""Conversion of wikitext to running text."""

from collections.abc import Collection

import mwparserfromhell

from bert_jax.data.corpus.documents import paragraphs
from bert_jax.tokenization.tokenizer import replace_surrogates

_NO_PROSE = {"ref", "references", "table", "gallery", "math", "timeline", "score"}


def stripped(left_out: Collection[str], wikitext: str) -> str:
    """Return the running text of an article, without tables, references, pictures and categories.

    Links to pages in the namespaces `left_out` (casefolded names) are removed with their text, and
    so are pictures under an old name (`Bild:`), which have several parameters. The time may grow as
    the square of the length, for example for nested braces.
    """
    code = mwparserfromhell.parse(wikitext)
    for link in code.filter_wikilinks():
        name, colon, _ = f"{link.title}".strip().removeprefix(":").partition(":")
        if colon and (
            name.strip().casefold() in left_out
            or (link.text and any("|" in f"{n}" for n in link.text.filter_text(recursive=False)))
        ):
            link.title, link.text = "", None  # emptied, since removing n nodes takes n * n steps
    for tag in code.filter_tags():
        if f"{tag.tag}".lower() in _NO_PROSE:
            tag.contents = ""
    return paragraphs(replace_surrogates(code.strip_code().replace("\0", " ")))
