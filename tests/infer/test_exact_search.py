"""Exact search against numpy: blocks, ties, a file of half precision."""

import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.infer import exact_search as search


def expected(queries, documents, k):
    scores = queries.astype(np.float32) @ documents.astype(np.float32).T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, axis=1), order


def made(queries, documents):
    """Vectors of small whole numbers: products are exact, and many are equal."""
    rng = np.random.default_rng(0)
    shapes = (queries, 4), (documents, 4)
    return [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("k", [1, 7, 100])
def test_blocks_and_ties(monkeypatch, k):
    monkeypatch.setattr(search, "BLOCK", 4)
    monkeypatch.setattr(search, "QUERIES", 8)
    queries, documents = made(19, 70)
    scores, indices = search.top_k(queries, documents, k)
    wanted = expected(queries, documents, k)
    np.testing.assert_array_equal(indices, wanted[1])
    np.testing.assert_array_equal(scores, wanted[0])


def test_a_mapped_file_of_half_precision(tmp_path):
    queries, documents = made(3, 70)
    np.save(tmp_path / "vectors.npy", documents.astype(np.float16))
    stored = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    scores, indices = search.top_k(queries, stored, 9)
    np.testing.assert_array_equal(indices, expected(queries, documents, 9)[1])
    assert scores.dtype == np.float32


def test_nothing_to_search():
    queries, documents = made(3, 0)
    scores, indices = search.top_k(queries, documents, 5)
    assert scores.shape == indices.shape == (3, 0)
    assert search.top_k(queries[:0], made(1, 5)[1], 3)[1].shape == (0, 3)


def test_k_may_be_any_number_above_that_of_the_documents():
    queries, documents = made(3, 5)
    scores, indices = search.top_k(queries, documents, 1 << 40)
    np.testing.assert_array_equal(indices, expected(queries, documents, 5)[1])
    assert scores.shape == (3, 5)


def test_k_is_at_least_1():
    queries, documents = made(3, 5)
    with pytest.raises(UserError, match="k is 0"):
        search.top_k(queries, documents, 0)
