"""English prose that comes with every installation: Python's documentation and its packages'.

Docstrings, and comments of several lines: they explain in running text what the code beside them
does, and were 0.28 of the docstrings' prose when measured.
"""

import ast
import contextlib
import hashlib
import importlib.util
import os
import re
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bert_jax.data.corpus.documents import NO_FIELDS, Source
from bert_jax.data.corpus.kinds.prose import prose_paragraphs
from bert_jax.data.corpus.workers import grouped, map_ordered, num_cores

_NAMES = """
    numpy scipy jax jaxlib flax optax orbax grain matplotlib mpl_toolkits fontTools absl etils
    treescope rich pygments PIL pyparsing dateutil packaging contourpy tensorboardX tqdm opt_einsum
    ml_collections ml_dtypes jaxtyping msgpack cloudpickle aiofiles humanize psutil fsspec
    huggingface_hub click markdown_it tensorstore sentencepiece tokenizers yaml simplejson filelock
    anyio wadler_lindig prometheus_client array_record httpx2 httpcore2 h11 idna
"""
PACKAGES = tuple(_NAMES.split())
"""Read where installed. All are dependencies of this package, at any depth: what else happens to be
installed is not read, so that the same versions give the same corpus on every machine."""

MIN_SENTENCES = 4
"""A class with less than this joins its module's document; a module with less is left out."""

_LEFT_OUT = {"test", "tests", "testing", "_vendor", "vendor", "site-packages", "dist-packages"}
_LEFT_OUT |= {"__pycache__", "lib2to3", "pydoc_data", "ensurepip"}
_CHUNK_BYTES = 1 << 20

# Strings are stepped over, since a # in one begins no comment, and so are comments behind code; the
# group is a run of lines that hold a comment and nothing else. (`tokenize` takes a minute.)
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

# A document on its way: for each paragraph its sentences.
_Paragraphs = list[list[str]]


class PythonDocs(Source):
    """The corpus named `python-docs`.

    A document for each topic of the language reference, module and larger class. A paragraph met
    before, here or elsewhere, is left out.
    """

    def __init__(self, num_workers: int | None = None) -> None:
        self._files = _files()
        self._num_workers = num_workers or num_cores()
        self._num_documents = 0
        super().__init__("python-docs", sum(size for _, size in self._files))

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        self._num_documents, digest = 0, hashlib.sha256()
        seen: set[bytes] = set()
        for document in self._read():
            text = _unseen(document, seen)
            if text:
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

    def record(self) -> dict[str, Any]:
        """Return name, number of documents and sha256 of the text."""
        return {"name": self.name, "documents": self._num_documents, "sha256": self._sha256}


def _unseen(document: _Paragraphs, seen: set[bytes]) -> str:
    """Return the paragraphs that are new, where they are long enough; adds them to `seen`."""
    kept = []
    for paragraph in document:
        text = " ".join(paragraph)
        letters = re.sub(r"\W+", "", text).lower()
        key = hashlib.blake2b(letters.encode(), digest_size=12).digest()
        if key not in seen:
            seen.add(key)
            kept.append((text, len(paragraph)))
    if sum(count for _, count in kept) < MIN_SENTENCES:
        return ""
    return "\n".join(text for text, _ in kept)


def _topics() -> Iterator[_Paragraphs]:
    """Return the language reference, as `help()` shows it."""
    from pydoc_data import topics  # a module of data

    return (prose_paragraphs(text) for _, text in sorted(topics.topics.items()))


def _files() -> list[tuple[str, int]]:
    """Paths and sizes of the Python files to read, in an order that does not depend on the disk."""
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
                warnings.simplefilter("ignore")  # other people's escape sequences
                tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError):  # templates, Python 2
            continue
        documents += _module_documents(data.decode("utf-8", "replace"), tree)
    return documents


def _module_documents(source: str, tree: ast.Module) -> list[_Paragraphs]:
    """Return a document for each larger class, then one for the rest of the module."""
    documents: list[_Paragraphs] = []
    module: _Paragraphs = []
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

    module += _docstring(tree)
    visit(tree, module)
    take_comments(module, source.count("\n") + 1)
    documents.append(module)
    return documents


def _comments(source: str) -> Iterator[tuple[int, _Paragraphs]]:
    """Return the prose of comments of several lines, with the number of their first line."""
    line, position = 1, 0
    for match in _COMMENTS.finditer(source):
        if match[1]:
            line += source.count("\n", position, match.start())
            position = match.start()
            paragraphs = prose_paragraphs(_HASHES.sub("", match[1]))
            if paragraphs:
                yield line, paragraphs


def _docstring(node: Any) -> _Paragraphs:
    text = ast.get_docstring(node, clean=False)
    return prose_paragraphs(text) if text else []


def _added_docstring(node: ast.Expr) -> _Paragraphs:
    """Docstrings of compiled functions: numpy and scipy give them by calls such as add_newdoc."""
    value = node.value
    if not isinstance(value, ast.Call):
        return []
    name = getattr(value.func, "id", getattr(value.func, "attr", ""))
    if "doc" not in name:
        return []
    found: _Paragraphs = []
    for argument in ast.walk(value):
        text = argument.value if isinstance(argument, ast.Constant) else None
        if isinstance(text, str) and len(text) > 100:
            found += prose_paragraphs(text)
    return found
