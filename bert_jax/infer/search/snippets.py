"""Parts of passages in which the words of a query are marked."""

from bert_jax.data.corpus.overlap.ngrams import WORD, normalised_words


def snippet(text: str, query: str, size: int = 240) -> str:
    """Return the part of a text with the most words of a query, each marked as in **word**.

    The part has at most `size` characters without its marks. Each run of white space becomes a
    space, and an ellipsis stands for omitted text.
    """
    text, wanted = " ".join(text.split()), {*normalised_words(query)}
    marks: list[tuple[int, int]] = []
    for match in WORD.finditer(text):
        begin, end = match.span()
        if wanted.intersection(normalised_words(match[0])):
            touches = marks and marks[-1][1] == begin  # as Chinese words of one character do
            marks.append((marks.pop()[0], end) if touches else (begin, end))

    def words_from(start: int) -> int:
        return len({text[a:b].lower() for a, b in marks if start <= a and b <= start + size})

    first, last = 0, len(text)
    if last > size:
        starts = [_word_start(text, max(0, begin - size // 5)) for begin, _ in marks]
        first = max([0, *starts], key=words_from)
        last = last if last <= first + size else _word_start(text, first + size)
    marked, at = "... " if first else "", first
    for begin, end in marks:
        if first <= begin and end <= last:
            marked += f"{text[at:begin]}**{text[begin:end]}**"
            at = end
    return marked + text[at:last].rstrip() + (" ..." if last < len(text) else "")


def _word_start(text: str, at: int) -> int:
    """Return the start of the word at index `at`, or `at` if no space is near."""
    space = text.rfind(" ", max(0, at - 40), at)
    return at if space < 0 else space + 1
