"""Configuration of dependency parsing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParsingConfig:
    """Words with heads and relations, in CoNLL-U.

    Subtypes of relations (nsubj:pass) are learned and written, and do not count in scores.
    """

    train: str = ""
    """The file to train on."""
    dev: str = ""
    """The file to choose the best checkpoint by."""
    test: str = ""
    """A file that all runs are scored on once, after training; empty: there is none."""
    labels: tuple[str, ...] = ()
    """Relations in the order of the model's outputs; empty: those of the training file. A relation
    of another file that is not among them counts as a miss."""
