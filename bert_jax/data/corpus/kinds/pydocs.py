# ruff: noqa: RUF001  (typographic apostrophes)
"""English prose that every installation has: docstrings and comments of Python and of packages."""

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import itertools
import os
import re
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

from bert_jax.data.corpus.documents import NO_FIELDS, Row, Source
from bert_jax.data.corpus.sentences import split_fast
from bert_jax.data.corpus.workers import grouped, map_ordered, worker_count

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
# A sentence that matches is left out. Names from code (`my_name`, `f(x)`) are left to `is_prose`.
_NOISE = re.compile(
    r"https?:|www\.|@\w|[{}<>|\\^~$#]|(?<!\S)=|=(?!\S)|__|->|\[\w*[,:\]]|\.\.\.|\w/\w+/|::|\d\.\d+\.\d"
    r"|(?i:copyright|all rights reserved|licen[sc]e|warrant(?:y|ies)|redistribut)|XXX|TODO|FIXME"
)
_ENDS = re.compile(r"[.!?][\"')\]]*$")
_MIN_WORDS, _MAX_WORDS = 5, 70


def prose_paragraphs(docstring: str) -> list[list[str]]:
    """Return the prose of a docstring as paragraphs, each a list of sentences.

    Doctests, code, tables, directives, parameter types, headings, reference lists and sentences
    that are not prose (see `is_prose`) are left out. A left-out sentence splits its paragraph, so
    that adjacent sentences in a returned paragraph are adjacent in the docstring.
    """
    return [
        list(run)
        for block in _blocks(inspect.cleandoc(docstring))
        for kept, run in itertools.groupby(split_fast(_plain(block)), is_prose)
        if kept
    ]


def is_prose(sentence: str) -> bool:
    """Return true if the words, the beginning and the end of a sentence look like English prose."""
    if not sentence[0].isupper() or not _ENDS.search(sentence) or _NOISE.search(sentence):
        return False
    words = sentence.split()
    if not _MIN_WORDS <= len(words) <= _MAX_WORDS:
        return False
    plain = sum(1 for word in words if _WORD.fullmatch(word.strip("\"'(),.;:!?-")))
    letters = sum(map(str.isalpha, sentence)) + sentence.count(" ")
    return plain >= 0.85 * len(words) and letters >= 0.9 * len(sentence)


def _plain(text: str) -> str:
    """Remove inline markup."""
    text = _ROLE.sub(lambda m: m[1].lstrip("~!").rsplit(".", 1)[-1], text)
    text = _LINK.sub(lambda m: m[1] or m[2], text)
    text = _CITATION.sub("", text)
    text = _TICKS.sub(r"\1", text)
    text = _EMPHASIS.sub(r"\1", text)
    return _SPACE.sub(" ", text).strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _blocks(text: str) -> list[str]:
    """Return paragraphs and list items of running text, each on one line, still with markup."""
    lines = text.expandtabs().split("\n")
    blocks: list[str] = []
    block: list[str] = []
    literal: int | None = None  # drop lines indented deeper than this: code follows a "::"
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
        if _UNDERLINE.match(following.strip()) and len(line) < 80:
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
            if admonition := _ADMONITION.match(line):
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
        if opening := _FIELD.match(line):
            flush()
            line = opening[1] or ""
        else:
            for pattern in (_BULLET, _NAMED):
                match = pattern.match(line)
                # Inside a paragraph, "name: " begins an entry only at the paragraph's indent.
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


_NAMES = """
    numpy scipy jax jaxlib flax optax orbax grain matplotlib mpl_toolkits fontTools absl etils
    treescope rich pygments PIL pyparsing dateutil packaging contourpy tensorboardX tqdm opt_einsum
    ml_collections ml_dtypes jaxtyping msgpack cloudpickle aiofiles humanize psutil fsspec
    huggingface_hub click markdown_it tensorstore sentencepiece tokenizers yaml simplejson filelock
    anyio wadler_lindig prometheus_client array_record httpx2 httpcore2 h11 idna
"""
PACKAGES = tuple(_NAMES.split())
"""Packages that are read if installed: only dependencies of bert_jax, so that the same versions of
Python and of these packages give the same corpus everywhere."""

MIN_SENTENCES = 4
"""Smallest number of sentences in a document. A class with fewer sentences is added to the document
of the enclosing class or module. A module or a topic with fewer sentences is left out."""

_LEFT_OUT = {"test", "tests", "testing", "_vendor", "vendor", "site-packages", "dist-packages"}
_LEFT_OUT |= {"__pycache__", "lib2to3", "pydoc_data", "ensurepip"}
_CHUNK_BYTES = 1 << 20

# Finds comments of several lines (the group). The other alternatives skip strings, where a # begins
# no comment, and comments after code. (The module `tokenize` would take a minute.)
_COMMENTS = re.compile(
    r"""
    \"{3} (?: [^"\\]++ | \\[\s\S] | "(?!"") )*+ \"{3}
    | '{3} (?: [^'\\]++ | \\[\s\S] | '(?!'') )*+ '{3}
    | " (?: [^"\\\n]++ | \\[\s\S] )*+ "
    | ' (?: [^'\\\n]++ | \\[\s\S] )*+ '
    | ( ^[ \t]*+\#.*+ (?: \n[ \t]*+\#.*+ )++ )
    | \#.*+
    """,
    re.VERBOSE | re.MULTILINE,
)
_HASHES = re.compile(r"^[ \t]*#+[:!]? ?", re.MULTILINE)

_Paragraphs = list[list[str]]  # document as paragraphs, each a list of sentences


class PythonDocs(Source):
    """The source `python-docs`, whose documents are topics of `help()`, modules and larger classes.

    Paragraphs that occurred earlier, in any document, are left out.
    """

    def __init__(self, num_workers: int | None = None) -> None:
        self._files = _files()
        self._num_workers = worker_count(num_workers)
        self._num_documents = 0
        super().__init__("python-docs", sum(size for _, size in self._files))

    def _rows(self) -> Iterator[Row]:
        self._num_documents, digest = 0, hashlib.sha256()
        seen: set[bytes] = set()
        for document in self._read():
            if text := _unseen(document, seen):
                digest.update(text.encode() + b"\0")
                self._num_documents += 1
                yield text, NO_FIELDS
        self._sha256 = digest.hexdigest()

    def _read(self) -> Iterator[_Paragraphs]:
        yield from _topics()
        chunks = list(grouped(self._files, lambda file: file[1], _CHUNK_BYTES))
        paths = [[path for path, _ in chunk] for chunk in chunks]
        results = map_ordered(_read_files, paths, self._num_workers)
        with contextlib.closing(results):
            for chunk, documents in zip(chunks, results, strict=True):
                yield from documents
                self.bytes_read += sum(size for _, size in chunk)

    @override
    def record(self) -> dict[str, Any]:
        return {"name": self.name, "documents": self._num_documents, "sha256": self._sha256}


def _unseen(document: _Paragraphs, seen: set[bytes]) -> str:
    """Add paragraphs to `seen`; return the new ones as text, "" if they are too short."""
    kept, count = [], 0
    for paragraph in document:
        text = " ".join(paragraph)
        letters = re.sub(r"\W+", "", text).lower()
        key = hashlib.blake2b(letters.encode(), digest_size=12).digest()
        if key not in seen:
            seen.add(key)
            kept.append(text)
            count += len(paragraph)
    return "\n".join(kept) if count >= MIN_SENTENCES else ""


def _topics() -> Iterator[_Paragraphs]:
    """Return the prose of the language reference's topics, which `help()` shows."""
    from pydoc_data import topics  # the texts that `help()` shows

    return (prose_paragraphs(text) for _, text in sorted(topics.topics.items()))


def _files() -> list[tuple[str, int]]:
    """List paths and sizes of the Python files to read, in the same order on every machine."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        if spec is not None:
            roots += map(Path, spec.submodule_search_locations or ())
    files: dict[str, int] = {}
    for root in roots:
        for directory, subdirectories, names in os.walk(root):
            subdirectories[:] = sorted(d for d in subdirectories if d not in _LEFT_OUT)
            for name in sorted(names):
                if name.endswith((".py", ".pyi")) and not name.startswith("test_"):
                    path = os.path.join(directory, name)
                    files[path] = os.path.getsize(path)
    return list(files.items())


def _read_files(paths: list[str]) -> list[_Paragraphs]:
    documents = []
    for path in paths:
        data = Path(path).read_bytes()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about invalid escape sequences
                tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError):  # such as templates or Python 2
            continue
        documents += _module_documents(data.decode("utf-8", "replace"), tree)
    return documents


def _module_documents(source: str, tree: ast.Module) -> list[_Paragraphs]:
    """Return one document per class with `MIN_SENTENCES` or more, then one for all other text."""
    documents: list[_Paragraphs] = []
    comments = deque(_comments(source))
    if tree.body:  # licences and authors come before the first statement
        while comments and comments[0][0] < tree.body[0].lineno:
            comments.popleft()

    def take_comments(document: _Paragraphs, last_line: int) -> None:
        while comments and comments[0][0] <= last_line:
            document.extend(comments.popleft()[1])

    def visit(node: ast.AST, document: _Paragraphs) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                take_comments(document, child.lineno)
            if isinstance(child, ast.ClassDef):
                own = _docstring(child)
                visit(child, own)
                take_comments(own, child.end_lineno or child.lineno)
                if sum(map(len, own)) >= MIN_SENTENCES:
                    documents.append(own)
                else:
                    document += own
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                document += _docstring(child)
                visit(child, document)
            elif isinstance(child, ast.Expr):
                document += _added_docstring(child)
            elif isinstance(child, ast.If | ast.Try | ast.With):
                visit(child, document)

    module = _docstring(tree)
    visit(tree, module)
    take_comments(module, source.count("\n") + 1)
    documents.append(module)
    return documents


def _comments(source: str) -> Iterator[tuple[int, _Paragraphs]]:
    """Yield (first line number, prose) of each multi-line comment that contains prose."""
    line, position = 1, 0
    for match in _COMMENTS.finditer(source):
        if match[1]:
            line += source.count("\n", position, match.start())
            position = match.start()
            if paragraphs := prose_paragraphs(_HASHES.sub("", match[1])):
                yield line, paragraphs


def _docstring(node: Any) -> _Paragraphs:
    text = ast.get_docstring(node, clean=False)
    return prose_paragraphs(text) if text else []


def _added_docstring(node: ast.Expr) -> _Paragraphs:
    """Return the prose of a docstring set by a call, such as `add_newdoc` in numpy and scipy."""
    function = getattr(node.value, "func", None)  # None unless a call
    if "doc" not in getattr(function, "id", getattr(function, "attr", "")):
        return []
    found: _Paragraphs = []
    for argument in ast.walk(node.value):
        text = argument.value if isinstance(argument, ast.Constant) else None
        if isinstance(text, str) and len(text) > 100:
            found += prose_paragraphs(text)
    return found
