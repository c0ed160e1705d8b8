# ruff: noqa: RUF001  (quotes and terminators of several scripts are the subject here)
"""Splitting of paragraphs into sentences."""

import re
from collections.abc import Callable
from itertools import takewhile

from bert_jax.errors import UserError, needs_package

Splitter = Callable[[str], list[str]]

MAX_SENTENCE_CHARS = 8192  # bound for memory; a longer sentence is cut, if possible at white space

# Matches possible sentence ends: terminators of many scripts, then closing quotes, brackets and
# note marks, then white space, which full-width terminators (Chinese, Japanese) do not need. The
# leading character class lets the engine skip other text. A run of periods takes linear time: the
# lookbehind lets a match begin only at the first terminator of a run, and nothing backtracks.
_CANDIDATE = re.compile(
    r"[.!?…。！？｡؟۔।॥։።။។](?<![.!?…。！？｡؟].)"
    r"(?:[.!?…。！？｡؟]*+(?:[\"'”“’‘»«›‹)\]}」』）】》〉]|\s»(?=\s)|\[\d+\])*+\s++"
    r"|(?<=[。！？｡])[。！？｡…]*+[」』）】》〉”’]*+)",
    re.DOTALL,
)
_OPENING = "\"'“‘„‚«‹»›([{「『（【《〈¿¡—–-*_"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A period after these never ends a sentence, since a name or a number follows.
_TITLES = _words("""
    mr mrs ms messrs mme mlle dr prof rev hon gen col maj capt cpt lt sgt cpl sen rep gov pres st mt
    ft fr sr bp supt insp vs v cf e.g i.e viz al ed eds trans approx ca dept univ esp incl resp herr
    hr bzw z.b d.h u.a
""")
_MONTHS = _words("jan feb mar apr jun jul aug sep sept oct nov dec")
# A period after these does not end a sentence if a number, Arabic or Roman, follows.
_BEFORE_NUMBERS = _MONTHS | _words("""
    no nos vol vols p pp fig figs eq eqs sec sect ch chap art para bk pt ver ref refs tab nr n lib
""")
# A period after these ends a sentence if the next word commonly starts one.
_MAY_END = _MONTHS | _words("""
    etc jr inc ltd co corp bros a.m p.m u.s u.k u.n u.s.a d.c b.c a.d ph.d m.d b.a m.a esq ave blvd
    est
""")
_STARTERS = _words("""
    a after all although an and another any as at because before both but by each even every few for
    from he her here his how however i if in it its later many more most my no nobody not now of on
    once one only other our over perhaps she since so some such that the their then there therefore
    these they this those though thus to under until we what when where which while who why with yet
    you your
""")
_LONGEST_WORD = 40
_ROMAN = frozenset("IVXLC")


def split_fast(paragraph: str) -> list[str]:
    """Split a paragraph into sentences by punctuation, at 40 to 50 MB/s of English on one core.

    A terminator (of many scripts) ends a sentence unless an abbreviation (initial, title) precedes
    it, or lower case follows. A period without white space after it (decimal, version, host name)
    never does. Sentences are stripped, not empty, and together hold every non-space character.
    """
    sentences = []
    start = 0
    for match in _CANDIDATE.finditer(paragraph):
        end = match.end()
        if end - start > 2 and _is_boundary(paragraph, start, match.start(), end):
            sentences.append(paragraph[start:end].strip())
            start = end
    if last := paragraph[start:].strip():
        sentences.append(last)
    if len(paragraph) > MAX_SENTENCE_CHARS:
        return [part for sentence in sentences for part in _cut(sentence)]
    return sentences


def _is_boundary(text: str, start: int, terminator: int, end: int) -> bool:
    """Return true if a sentence from `start` ends at `end`, after punctuation at `terminator`."""
    # A lower-case letter cannot begin the next sentence; opening marks before it are skipped.
    first = text[end : end + 1]
    position = end
    while first and first in _OPENING:
        position += 1
        first = text[position : position + 1]
    if first.islower() or (first == "と" and text[end - 1] in "」』"):  # a quotation goes on
        return False
    if text[terminator] != ".":
        return True
    if terminator + 1 < len(text) and text[terminator + 1] == ".":
        return True  # an ellipsis of periods, and no lower case after it
    # The bound keeps a text without spaces from being searched to its beginning at every period.
    begin = max(start, terminator - _LONGEST_WORD)
    before = text[begin:terminator].replace("\xa0", " ").rpartition(" ")[2]
    word = before.lstrip(_OPENING).rsplit("—", 1)[-1]
    if not word or not word[-1].isalnum():
        return True  # "(Paris, 1900)." or a lone period
    key = word.lower()
    if key in _TITLES or (len(word) == 1 and _starts_list_item(text, start, terminator)):
        return False
    letters = takewhile(str.isalpha, text[position : position + _LONGEST_WORD])
    following = "".join(letters).lower()
    is_roman = following != "" and _ROMAN.issuperset(following.upper())
    if key in _BEFORE_NUMBERS and (first.isdigit() or is_roman):
        return False
    if len(word) == 1 and word.isupper():
        # An initial ("J. R. R. Tolkien"), unless a new sentence plainly follows ("and I. The").
        return following in _STARTERS
    if key in _MAY_END or (len(word) > 2 and word[-2] == "."):
        return following in _STARTERS
    if word.isdigit():
        return not _starts_list_item(text, start, terminator)
    return True


def _starts_list_item(text: str, start: int, terminator: int) -> bool:
    """Return true if only a list number or letter precedes the period: "2. Second", "(b. That"."""
    return terminator - start <= 4 and " " not in text[start:terminator].strip()


def _cut(sentence: str) -> list[str]:
    """Cut a sentence into pieces of at most MAX_SENTENCE_CHARS, at white space if possible."""
    pieces = []
    while len(sentence) > MAX_SENTENCE_CHARS:
        cut = sentence.rfind(" ", MAX_SENTENCE_CHARS // 2, MAX_SENTENCE_CHARS + 1)
        cut = cut if cut > 0 else MAX_SENTENCE_CHARS
        pieces.append(sentence[:cut].rstrip())
        sentence = sentence[cut:].lstrip()
    return [piece for piece in (*pieces, sentence) if piece]


def split_lines(paragraph: str) -> list[str]:
    """Return the paragraph, one line of text, as one sentence, but cut it if it is too long."""
    stripped = paragraph.strip()
    return _cut(stripped) if stripped else []


def _syntok_splitter() -> Splitter:
    with needs_package(
        "the sentence splitter 'syntok' needs the package syntok: pip install syntok. The "
        "splitter 'fast' needs no package."
    ):
        import syntok.segmenter as segmenter

    def split(paragraph: str) -> list[str]:
        sentences = [
            "".join(token.spacing + token.value for token in sentence).strip()
            for part in segmenter.process(paragraph)
            for sentence in part
        ]
        return [piece for sentence in sentences if sentence for piece in _cut(sentence)]

    return split


def get_splitter(name: str) -> Splitter:
    """Return a splitter (fast, lines, syntok); raise a UserError if unknown or not installed."""
    if name == "syntok":
        return _syntok_splitter()
    splitters = {"fast": split_fast, "lines": split_lines}
    if name not in splitters:
        raise UserError(f"there is no sentence splitter {name!r}; use fast, lines or syntok.")
    return splitters[name]
