"""The class for the ids of the special tokens; data, models and objectives share the class."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
