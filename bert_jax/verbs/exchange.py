"""The verbs that take a model out or in, with their arguments; imports are made when one runs."""

import argparse
from collections.abc import Callable


def add(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the verbs.

    Args:
        verb: Of `cli`: (name, function, what it does, an example) to the verb's parser.
    """
