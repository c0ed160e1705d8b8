"""Ids of the special tokens, in a class that data, models and objectives share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens. A decoder starts with `cls`."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int

    @property
    def opens(self) -> bool:
        """Whether [CLS] begins a row; false for Marian, whose pad, cls and mask are one token."""
        return not self.pad == self.cls == self.mask
