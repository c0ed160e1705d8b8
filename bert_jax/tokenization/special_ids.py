"""Ids of the special tokens, in a class that data, models and objectives share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
