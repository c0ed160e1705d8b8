"""The verbs that ask a model, with their arguments; imports are made when one runs."""

import argparse
from collections.abc import Callable

from bert_jax.errors import UserError


def add(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the verbs.

    Args:
        verb: Of `cli`: (name, function, what it does, an example) to the verb's parser.
    """
    sub = verb(
        "fill-mask",
        fill_mask,
        "fill the [MASK]s of texts with a pretrained model",
        'bert-jax fill-mask work/tiny "The capital of France is [MASK]."',
    )
    sub.add_argument("workdir")
    sub.add_argument("texts", nargs="+", metavar="TEXT", help="a text with one [MASK] or more")
    sub.add_argument("--top", type=int, default=5, help="candidates a mask (default: %(default)s)")


def fill_mask(arguments: argparse.Namespace) -> int:
    """Fills masks."""
    from bert_jax.infer import MaskFiller, format_candidates

    if arguments.top < 1:
        raise UserError(f"--top is {arguments.top}; it must be at least 1")
    filled = MaskFiller.load(arguments.workdir).fill(arguments.texts, arguments.top)
    for text, masks in zip(arguments.texts, filled, strict=True):
        print(text)
        for candidates in masks:
            print(f"    {format_candidates(candidates)}")
    return 0
