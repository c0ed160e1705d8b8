"""Clusters of vectors, and their agreement with the classes that people gave.

Sources: Arthur and Vassilvitskii 2007 (k-means++); Rosenberg and Hirschberg 2007 (V-measure).
"""

import numpy as np
from jaxtyping import Float, Int64, Integer

_MAX_STEPS = 100


def k_means(vectors: Float[np.ndarray, "N D"], clusters: int, seed: int) -> Int64[np.ndarray, " N"]:
    """Return the cluster of each vector: Lloyd's algorithm from k-means++'s centres.

    There must be as many vectors as clusters; fewer clusters come out where vectors are equal.
    """
    random = np.random.default_rng(seed)
    vectors = vectors.astype(np.float32)
    centres = vectors[random.integers(len(vectors))][None]
    nearest = _distances(vectors, centres)[:, 0]
    while len(centres) < clusters:
        total = nearest.sum(dtype=np.float64)
        chances = nearest / total if total > 0 else None  # None: all vectors are centres
        centre = vectors[random.choice(len(vectors), p=chances)][None]
        centres = np.concatenate([centres, centre])
        nearest = np.minimum(nearest, _distances(vectors, centre)[:, 0])
    before = np.full(len(vectors), -1)
    for _ in range(_MAX_STEPS):
        found = _distances(vectors, centres).argmin(1)
        if np.array_equal(found, before):
            break
        before = found
        sums = np.zeros_like(centres)
        np.add.at(sums, found, vectors)
        counts = np.bincount(found, minlength=clusters)[:, None]
        centres = np.where(counts > 0, sums / np.maximum(counts, 1), centres)  # an empty one stays
    return found


def v_measure(classes: Integer[np.ndarray, " N"], clusters: Integer[np.ndarray, " N"]) -> float:
    """Return the harmonic mean of homogeneity and completeness; 1 where the two agree."""
    _, rows = np.unique(classes, return_inverse=True)
    _, columns = np.unique(clusters, return_inverse=True)
    joint = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(joint, (rows, columns), 1 / len(rows))
    of_classes, of_clusters = _entropy(joint.sum(1)), _entropy(joint.sum(0))
    shared = of_classes + of_clusters - _entropy(joint)
    total = of_classes + of_clusters
    return 2 * max(shared, 0.0) / total if total > 0 else 1.0  # shared / each entropy, their mean


def _entropy(shares: np.ndarray) -> float:
    some = shares[shares > 0]
    return float(-np.sum(some * np.log(some)))


def _distances(
    vectors: Float[np.ndarray, "N D"], centres: Float[np.ndarray, "K D"]
) -> Float[np.ndarray, "N K"]:
    """Return squared Euclidean distances, at least 0."""
    products = vectors @ centres.T
    squares = (vectors**2).sum(1)[:, None] + (centres**2).sum(1)
    return np.maximum(squares - 2 * products, 0)
