"""Prose out of docstrings."""

import ast
import textwrap

import pytest

from bert_jax.data.corpus.kinds import pydocs
from bert_jax.data.corpus.kinds.pydocs import is_prose, prose_paragraphs


def prose(text: str) -> list[str]:
    return [" ".join(paragraph) for paragraph in prose_paragraphs(textwrap.dedent(text))]


def test_numpy_style():
    found = prose(
        """
        Return the sum of all elements over an axis.

        The result has one dimension less than the array `a`.  It is computed by
        :func:`~numpy.add.reduce` in the order of the **memory layout** [1]_.

        Parameters
        ----------
        a : array_like
            The numbers that are to be added up.
        axis, out : int or None, optional
            Along which dimension the sum is taken.

            .. versionadded:: 1.7.0
               This sentence is about an old version.

        See Also
        --------
        mean : This sentence describes another function entirely.

        Notes
        -----
        .. math:: s = \\sum_i a_i

        .. note::
           The sum of an empty array is always zero.

        ====== ==================================
        name   This row is part of a table here.
        ====== ==================================

        References
        ----------
        .. [1] A. Author wrote a long paper about sums.

        Examples
        --------
        >>> np.sum([1, 2])
        3
        This line is printed by the example above.

        Negative numbers can be used just as well::

            This is code in an indented block of code.

        The last paragraph is prose again.
        """
    )
    assert found == [
        "Return the sum of all elements over an axis.",
        "The result has one dimension less than the array a. "
        "It is computed by reduce in the order of the memory layout.",
        "The numbers that are to be added up.",
        "Along which dimension the sum is taken.",
        "The sum of an empty array is always zero.",
        "Negative numbers can be used just as well.",
        "The last paragraph is prose again.",
    ]


def test_google_style():
    found = prose(
        """Builds a model from its description.

        Args:
          name: The name under which it is kept.
          size (int): The number of units in each
            of the layers that are built.

        Returns:
          A new model that has not been trained.

        ```python
        This is a sentence inside of a fence.
        ```
        :param other: The other thing that is needed here.
        - The first point of a list is made.
        - The second point of a list is made.
        """
    )
    assert found == [
        "Builds a model from its description.",
        "The name under which it is kept.",
        "The number of units in each of the layers that are built.",
        "A new model that has not been trained.",
        "The other thing that is needed here.",
        "The first point of a list is made.",
        "The second point of a list is made.",
    ]


def test_paragraphs_are_cut_where_a_sentence_is_left_out():
    found = prose_paragraphs(
        "The first sentence is fine. So is the second one. Then f(x) = {y} breaks it. "
        "Here it goes on again."
    )
    assert found == [
        ["The first sentence is fine.", "So is the second one."],
        ["Here it goes on again."],
    ]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("This is a plain sentence.", True),
        ("It doesn't need any of the well-known tricks, or 3 of them.", True),
        ("Is this one a question?", True),
        ("Too short.", False),
        ("lower case at the beginning here.", False),
        ("This one does not end", False),
        ("See https://example.org for more about this.", False),
        ("The value of my_variable is used here.", True),
        ("If axis=0 is given, the function f(x) is applied to each column of it.", True),
        ("The value of my_variable is other_variable here.", False),
        ("Then the length x = y is used in the next step.", False),
        ("Then a + b * c / d - e is found.", False),
        ("Licensed under the Apache License of some year.", False),
        ("It is given without any warranty of any kind.", False),
    ],
)
def test_is_prose(sentence, expected):
    assert is_prose(sentence) is expected


def module_documents(source: str) -> list[list[list[str]]]:
    source = textwrap.dedent(source)
    return pydocs._module_documents(source, ast.parse(source))


def test_comments_of_several_lines_are_read_where_they_stand():
    large, module = module_documents(
        '''\
        # This file may be used by everyone who
        # keeps this line in each copy of it.
        """The module is described in this sentence."""
        # The first comment says something about
        # the class that follows it here.
        class Large:
            """A large class has many sentences about it. They go on and on here."""
            def one(self):
                """The first method does one thing well."""
                # The second comment doesn't end after
                #   a line. It has two sentences in it.
                #
                # A paragraph of its own stands here.
                x = "# This looks like a comment of\\n# two lines, but is a string."
                y = """
                # This looks like a comment of
                # two lines, but is a string.
                """  # A comment behind code isn't read
                # This single line is not read either.
                z = x + y
                for step in z:
                    # The third comment is the last thing
                    # that the class has to say.
                    step()
        # The fourth comment belongs to the module
        # because it is not indented any more.
        '''
    )
    assert [" ".join(paragraph) for paragraph in large] == [
        "A large class has many sentences about it. They go on and on here.",
        "The first method does one thing well.",
        "The second comment doesn't end after a line. It has two sentences in it.",
        "A paragraph of its own stands here.",
        "The third comment is the last thing that the class has to say.",
    ]
    assert [" ".join(paragraph) for paragraph in module] == [
        "The module is described in this sentence.",
        "The first comment says something about the class that follows it here.",
        "The fourth comment belongs to the module because it is not indented any more.",
    ]


def test_documents_of_a_module():
    source = '''
    """The module is described in this sentence."""

    class Large:
        """A large class has many sentences about it. They go on and on here."""
        def one(self):
            """The first method does one thing well."""
        def two(self):
            """The second method does two things well."""

    class Small:
        """A small class has one sentence only."""

    def function():
        """A function belongs to its module's document."""

    if True:
        def inner():
            """A function behind a condition is found."""

    add_newdoc("numpy", "sum", """
        Documentation that is added to compiled functions is read, where it is long enough to be
        documentation. It has to have a hundred characters.
        """)
    '''
    large, module = module_documents(source)
    assert [len(paragraph) for paragraph in large] == [2, 1, 1]
    assert [paragraph[0].split()[1] for paragraph in module] == [
        "module", "small", "function", "function", "that",
    ]  # fmt: skip


def test_repeated_paragraphs_and_short_documents_are_left_out():
    seen: set[bytes] = set()
    document = [[f"Sentence number {n} of this document."] for n in range(5)]
    assert pydocs._unseen(document, seen).count("\n") == len(document) - 1
    assert pydocs._unseen(document, seen) == ""
    assert pydocs._unseen([["Only one sentence in here."]], seen) == ""


def test_reading_again_gives_the_same_record(monkeypatch):
    document = [[f"Sentence number {n} of this document."] for n in range(5)]
    monkeypatch.setattr(pydocs, "_topics", lambda: iter([document]))
    monkeypatch.setattr(pydocs, "_files", list)
    docs = pydocs.PythonDocs(num_workers=1)
    first = list(docs.texts()), docs.record()
    assert first[1]["documents"] == 1
    assert (list(docs.texts()), docs.record()) == first


@pytest.fixture(scope="module")
def some_docs() -> list[str]:
    """The language reference and a few modules: the whole takes 22 s of CPU."""
    docs = pydocs.PythonDocs(num_workers=1)
    docs._files = [file for file in docs._files if "/argparse" in file[0] or "/email/" in file[0]]
    return list(docs.texts())


def test_real_documentation(some_docs):
    assert len(some_docs) > 50
    text = "\n".join(some_docs)
    assert len(text) > 100_000
    letters = sum(character.isalpha() or character in " \n" for character in text)
    assert letters > 0.95 * len(text)
    assert all(">>>" not in document and "\n\n" not in document for document in some_docs)
    assert len(set(some_docs)) == len(some_docs)


def test_a_package_that_is_missing_is_passed_over(monkeypatch):
    monkeypatch.setattr(pydocs, "PACKAGES", ("no_such_package.inside", "email", "no.such"))
    files = [path for path, _ in pydocs._files()]
    monkeypatch.setattr(pydocs, "PACKAGES", ("email",))
    assert files == [path for path, _ in pydocs._files()]


def test_other_packages_are_not_read():
    files = [path for path, _ in pydocs._files()]
    assert any("/scipy/" in path for path in files)
    assert not any(
        f"/site-packages/{n}/" in path for path in files for n in ("torch", "transformers")
    )
    assert files == [path for path, _ in pydocs._files()]
