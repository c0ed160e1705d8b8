# ruff: noqa: RUF001  (typographic apostrophes)
"""Docstrings and reStructuredText to plain paragraphs of prose."""

import inspect
import re

from bert_jax.data.corpus.sentences import split_fast

_UNDERLINE = re.compile(r"^([=\-~^*#\"'`+.:_])\1{2,}\s*$")
_TABLE = re.compile(r"^\s*(?:[+|].*[+|]|=+(?:\s+=+)+|-+(?:\s+-+)+)\s*$")
_DOCTEST = re.compile(r"^\s*(?:>>>|In \[\d+\]:|\$ )")
_DIRECTIVE = re.compile(r"^(\s*)\.\.(?:\s|$)")
_ADMONITION = re.compile(
    r"^\s*\.\.\s+(?:note|warning|tip|important|caution|admonition|attention|hint)::\s*(.*)", re.I
)
_FIELD = re.compile(r"^\s*(?::\w[^:`]*:|@\w+:?)(?:\s+(.*)|$)")  # ":param x:", "@param"
_BULLET = re.compile(r"^\s*(?:[-*+•o]|\(?\d{1,2}[.)]|\(?[a-z][.)])\s+(?=\S)")
# "axis : int, optional" of numpy's style: an identifier list, a colon after a space, a type.
_TYPED = re.compile(
    r"^\s*[`*]{0,2}[\w.*]+[`*]{0,2}(?:\s*,\s*[`*]{0,2}[\w.*]+[`*]{0,2})*\s+:(?:\s|$)"
)
# "axis (int): the axis" or "axis: the axis" of Google's style.
_NAMED = re.compile(r"^\s*[`*]{0,2}[a-z_][\w.]*[`*]{0,2}(?:\s*\([^)]*\))?:\s+(?=\S)")
_CODE = re.compile(r"[=({\[]\S|^\s*(?:from|import|def|for)\s")
_HEADING = re.compile(r"^\s*[A-Z][\w \-/]{0,40}:\s*$")
_SKIPPED_SECTIONS = frozenset({"references", "see also", "see-also", "authors", "author", "todo"})

_ROLE = re.compile(r":[\w:+.-]+:`([^`<]*?)(?:\s*<[^`>]*>)?`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}|\[([^\]]+)\]\((?:https?:|#|\.)[^)]*\)")
_CITATION = re.compile(r"\s*\[(?:\d+|#\w*|\w+\d{4}\w?|\*)\]_?")
_TICKS = re.compile(r"`{1,2}([^`]*)`{1,2}_?")
_EMPHASIS = re.compile(r"(?<![\w*])\*{1,2}(?=[\w(])([^*]+?)(?<=[\w).,!?])\*{1,2}(?![\w*])")
_SPACE = re.compile(r"\s+")

_WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*|\d+(?:\.\d+)?(?:-?D|th|st|nd)?|--?|–")
# A sentence with one of these is left out. Names of code (`my_name`, `f(x)`, `axis=0`) are not
# among them: they count as words that are not plain.
_NOISE = re.compile(
    r"https?:|www\.|@\w|[{}<>|\\^~$#]|(?<!\S)=|=(?!\S)|__|->|\[\w*[,:\]]|\.\.\.|\w/\w+/|::|\d\.\d+\.\d"
    r"|(?i:copyright|all rights reserved|licen[sc]e|warrant(?:y|ies)|redistribut)|XXX|TODO|FIXME"
)
_ENDS = re.compile(r"[.!?][\"')\]]*$")
MIN_WORDS = 5
MAX_WORDS = 70


def prose_paragraphs(docstring: str) -> list[list[str]]:
    """Return the prose of a docstring: paragraphs, each the list of its sentences.

    Doctests, code, tables, directives, types of parameters, headings, lists of references and
    sentences that are mostly code are left out. A paragraph in which a sentence was left out in
    the middle is split there, so that sentences that follow each other here did so in the text.
    """
    paragraphs = []
    for block in _blocks(inspect.cleandoc(docstring)):
        run: list[str] = []
        for sentence in split_fast(_plain(block)):
            if is_prose(sentence):
                run.append(sentence)
            elif run:
                paragraphs.append(run)
                run = []
        if run:
            paragraphs.append(run)
    return paragraphs


def is_prose(sentence: str) -> bool:
    """Whether a sentence reads as English prose: ends as one, mostly plain words."""
    if not sentence[0].isupper() or not _ENDS.search(sentence) or _NOISE.search(sentence):
        return False
    words = sentence.split()
    if not MIN_WORDS <= len(words) <= MAX_WORDS:
        return False
    plain = sum(1 for word in words if _WORD.fullmatch(word.strip("\"'(),.;:!?-")))
    letters = sum(map(str.isalpha, sentence)) + sentence.count(" ")
    return plain >= 0.85 * len(words) and letters >= 0.9 * len(sentence)


def _plain(text: str) -> str:
    """Inline markup taken off."""
    text = _ROLE.sub(lambda m: m[1].lstrip("~!").rsplit(".", 1)[-1], text)
    text = _LINK.sub(lambda m: m[1] or m[2], text)
    text = _CITATION.sub("", text)
    text = _TICKS.sub(r"\1", text)
    text = _EMPHASIS.sub(r"\1", text)
    return _SPACE.sub(" ", text).strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _blocks(text: str) -> list[str]:
    """Paragraphs and list items of running text, each on one line, markup still in."""
    lines = text.expandtabs().split("\n")
    blocks: list[str] = []
    block: list[str] = []
    literal: int | None = None  # drop what is indented deeper than this: code follows a "::"
    skipping = doctest = fence = False  # in a section of references, an example, a code block

    def flush() -> None:
        nonlocal literal
        if block:
            joined = " ".join(part.strip() for part in block)
            if joined.endswith("::"):
                literal = _indent(block[0]) if len(block) == 1 else min(map(_indent, block))
                joined = joined[:-2].rstrip() + "."
            elif joined.endswith(":"):
                joined = joined[:-1] + "."
            blocks.append(joined)
            block.clear()

    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if line.lstrip().startswith("```"):
            flush()
            fence = not fence
            continue
        if not fence and not line.strip():
            flush()
            doctest = False
        if fence or doctest or not line.strip():
            continue
        if literal is not None:
            if _indent(line) > literal:
                continue
            literal = None
        if _UNDERLINE.match(following.strip()) and len(following.strip()) >= 3 and len(line) < 80:
            flush()
            skipping = line.strip().lower() in _SKIPPED_SECTIONS
            continue
        if _UNDERLINE.match(line.strip()) or _TABLE.match(line):
            block.clear()
            continue
        if skipping:
            continue
        if _DOCTEST.match(line):
            flush()
            doctest = True
            continue
        if _DIRECTIVE.match(line):
            flush()
            admonition = _ADMONITION.match(line)
            if admonition:
                block.extend([admonition[1]] if admonition[1] else [])
            else:
                literal = _indent(line)
            continue
        if _HEADING.match(line):
            flush()
            skipping = line.strip().rstrip(":").lower() in _SKIPPED_SECTIONS
            continue
        if _TYPED.match(line):
            flush()
            continue
        opening = _FIELD.match(line)
        if opening:
            flush()
            line = opening[1] or ""
        else:
            for pattern in (_BULLET, _NAMED):
                match = pattern.match(line)
                # Within a paragraph, "name: " opens an entry only where the last one began.
                if match and (
                    pattern is _BULLET or not block or _indent(line) == _indent(block[0])
                ):
                    flush()
                    line = " " * _indent(line) + line[match.end() :]
        is_indented = not block and line.startswith("    ")
        if is_indented and (not line.strip()[:1].isalpha() or _CODE.search(line)):
            literal = _indent(line) - 1
            continue
        if line.strip():
            block.append(line)
    flush()
    return blocks
