"""The arguments of `bert-jax plan`, apart from what imports jax."""

import argparse
from pathlib import Path

EXAMPLE = (
    "bert-jax plan --config=configs/pretrain/bert_base.py --topology=v5e:16x16 --fast\n"
    "  bert-jax plan --config=configs/pretrain/bert_large.py --topology=v5e:4x4 \\\n"
    "      --topology=v5p:4x4x4 --phase=all --config.model.remat=dots --plot=plan.png"
)


def add_arguments(sub: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """Add the verb's arguments; with `needed` False, none is required (to list the fields)."""
    sub.add_argument(
        "--config",
        required=needed,
        metavar="FILE",
        help="as in pretrain; any field is set with --config.SECTION.FIELD=VALUE. "
        "data.corpus need not exist",
    )
    sub.add_argument(
        "--topology",
        required=needed,
        action="append",
        metavar="NAME",
        help="v5e:16x16, v5p:4x4x8, v4:2x2x1, v6e:8x8, tpu7x:4x4x4, v5e:1x1 (one chip), "
        "v5e:16x16,slices=2. May be repeated: one comparison at the end",
    )
    sub.add_argument(
        "--phase", default="0", metavar="N", help="of training.phases, or all (default: 0)"
    )
    sub.add_argument(
        "--batch-per-chip",
        type=int,
        metavar="N",
        help="rows a chip in a micro-batch, in place of the configured batch",
    )
    search = sub.add_mutually_exclusive_group()
    search.add_argument("--fit", action="store_true", help="find the largest batch per chip")
    search.add_argument(
        "--fast",
        action="store_true",
        help="compare the configured batch, a step of 0.5 M tokens in the fastest micro-batches, "
        "and the batch with the highest MFU",
    )
    sub.add_argument("--json", action="store_true", help="one JSON object on standard output")
    sub.add_argument("--plot", type=Path, metavar="FILE.png", help="draw memory and time")
    sub.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="compiled steps are kept here (default: ~/.cache/bert_jax/plan)",
    )
    sub.add_argument("--no-cache", action="store_true", help="neither read nor write the cache")
    sub.add_argument(
        "--fields", dest="fields_help", action="store_true", help="list all fields and stop"
    )
