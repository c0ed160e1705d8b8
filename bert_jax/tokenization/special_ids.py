"""Ids of the special tokens: a class that rows, stores and objectives share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
