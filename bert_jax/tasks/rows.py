"""Rows of token ids with labels, the input of a training step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float32, Int32, Int64

NO_LABEL = -1
"""Label of positions without a tag."""

Batch = dict[str, np.ndarray]
"""Rows of one length as arrays, with a leading axis of trials (M) where several are trained.

tokens, type_ids, segment_ids: (..., B, L) int32, or (..., B, G, L) where G rows belong together;
    segment_ids are 1, and 0 for padding.
labels: as in `Rows` with a leading axis B, tags (..., B, L) padded with `NO_LABEL`; absent where
    the rows have none.
text_ids: (..., B, G) int32, as in `Rows`; absent where the rows have none.
weights: (..., B) float32, `Rows.weights` or 1, and 0 for rows that only fill the batch: copies of
    a real row.
row_index: (..., B) uint32, 0 to B - 1: names the rows for dropout.
"""


@dataclass(frozen=True, eq=False)
class Rows:
    """N examples of `group` rows, unpadded; each row has its own length n."""

    tokens: Sequence[Int32[np.ndarray, " _"]]
    """N * group arrays (n,): [CLS] ... [SEP]. Rows of an example follow one another; of several,
    a row without tokens stands for none."""
    second_start: Int32[np.ndarray, " rows"]
    """Position in a row where type 1 begins; n for a row without a second part."""
    labels: np.ndarray | Sequence[Int32[np.ndarray, " _"]] | None = None
    """Labels to predict, None where they are not known. By kind of head: single_label: (N,) int32;
    multi_label: (N, K) float32 of 0 and 1; regression: (N,) float32, standardised; span: (N, 2)
    int32, positions of the first and the last token; tags: N arrays (n,) int32 with `NO_LABEL`
    where a position has none; arcs: the same, the position of a word's head times the number of
    relations plus the relation; choice: (N,) int32, number of the right row of the group."""
    group: int = 1
    """Rows of an example, such as a query with its documents, or a question with its choices."""
    text_ids: Int32[np.ndarray, " rows"] | None = None
    """Number of each row's text: equal texts have equal numbers."""
    weights: Float32[np.ndarray, " N"] | None = None
    """Weight of each row in the loss, above 0; None: 1 each."""

    def __post_init__(self) -> None:
        """Refuse lists without exactly one entry a row."""
        if self.group < 1 or len(self.tokens) % self.group:
            raise ValueError(f"{len(self.tokens)} rows in groups of {self.group}")
        for name in ("second_start", "text_ids"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != len(self.tokens):
                raise ValueError(f"{len(self.tokens)} rows, {len(entries)} entries in {name}")
        if self.labels is not None and len(self.labels) != len(self):
            raise ValueError(f"{len(self)} rows, {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.tokens) // self.group

    @cached_property
    def row_lengths(self) -> Int64[np.ndarray, " rows"]:
        """Tokens of each row."""
        return np.fromiter((len(ids) for ids in self.tokens), np.int64, len(self.tokens))

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """Tokens of the longest row of each example."""
        if self.group == 1:
            return self.row_lengths
        return self.row_lengths.reshape(-1, self.group).max(axis=1)

    @property
    def has_tags(self) -> bool:
        """Whether the labels are one array a row."""
        return self.labels is not None and not isinstance(self.labels, np.ndarray)
