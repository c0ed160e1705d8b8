"""The `bert-jax` command: one verb each, imported when it is used.

Exit codes: 0 done (or a run stopped by SIGTERM with everything saved), 1 a check that failed, or a
plan that does not fit, 2 input that the user can correct, 3 several saves in a row that failed, 4 a
step that is not finite or a spike, 5 no intact checkpoint, 6 nothing was completed for too long
or the other processes did not come, 7 another run has taken the work directory over, 8 fine-tuning
that learned nothing, 130 and 143 ended by Ctrl-C and SIGTERM.
"""

import argparse
import gc
import math
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bert_jax
from bert_jax.cli.verbs import (
    accounting,
    contamination,
    corpora,
    evaluation,
    exchange,
    inference,
    runs,
    search,
)
from bert_jax.cli.verbs.options import Parser
from bert_jax.errors import UserError, report_error
from bert_jax.terminal import safe_streams

_TEXTS = ("texts", "text", "text_b", "context", "prefix", "query")
"""Arguments that are no paths, whatever they begin with."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    with safe_streams():
        if argv is not None:
            return _main(argv)
        # The objects of JAX and Flax stay: look through them rarely, and not once more at the end.
        gc.set_threshold(500_000, 20, 100)
        try:
            return _main(sys.argv[1:])
        finally:
            gc.freeze()


def _main(argv: Sequence[str]) -> int:
    parser = _parser(needed="--fields" not in argv)
    arguments, rest = parser.parse_known_args(argv)
    for several in ("texts", "checkpoints"):
        if hasattr(arguments, several):
            rest = _take_behind(getattr(arguments, several), rest)
    if rest and not getattr(arguments, "takes_fields", False):
        parser.error(f"unknown argument {rest[0]!r} (see bert-jax {arguments.verb} --help)")
    _expand_home(arguments, rest)
    arguments.command_line = shlex.join(["bert-jax", *argv])
    if getattr(arguments, "fields_help", False):
        arguments.run = runs.print_fields
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's start-up notes
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _terminate)
    try:
        _refuse_infinite(arguments)
        code: int = arguments.run(arguments)
        return code
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if (known := report_error(error, arguments.verb)) is None:
            raise
        return known
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _take_behind(taken: list[str], rest: list[str]) -> list[str]:
    """Move arguments behind an option from `rest` to `taken`; argparse looks before it alone."""
    at = rest.index("--") if "--" in rest else len(rest)
    before, after = rest[:at], rest[at + 1 :]
    unknown = [each for each in before if each[:1] == "-" and each != "-" and " " not in each]
    if not unknown:
        taken += before + after
    return unknown


def _expand_home(arguments: argparse.Namespace, fields: Sequence[str]) -> None:
    """Put the home directory in the place of a ~ that a path or the value of a field begins with.

    A shell does so at the beginning of a word alone, and not in `--out=~/x`.
    """

    def expanded(value: Any) -> Any:
        if isinstance(value, list):
            return [expanded(each) for each in value]
        if not isinstance(value, str | Path) or not f"{value}".startswith("~"):
            return value
        return type(value)(os.path.expanduser(value))

    for name, value in vars(arguments).items():
        if name not in _TEXTS:
            setattr(arguments, name, expanded(value))
    parts = [field.partition("=") for field in fields]
    arguments.fields = [f"{expanded(name)}{equals}{expanded(v)}" for name, equals, v in parts]


def _refuse_infinite(arguments: argparse.Namespace) -> None:
    for name, value in vars(arguments).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name.replace('_', '-')} is {value}; give a finite number")


def _terminate(number: int, frame: object) -> None:
    """SIGTERM leaves through every `finally`, so that nothing half-written stays."""
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends two: the second would cut that short
    os.write(2, b"bert-jax: ended by SIGTERM\n")  # not print, whose lock may be held
    sys.exit(128 + number)


def _parser(*, needed: bool = True) -> Parser:
    """Make the parser; with `needed` False, the fields of a run are listed without a run."""
    parser = Parser(
        prog="bert-jax",
        description="Pretrain and fine-tune BERT-style encoders in JAX.",
        epilog="Start with `bert-jax demo`. `bert-jax VERB --help` explains a verb; `bert-jax "
        "pretrain --fields` and `bert-jax finetune --fields` list the fields of a configuration.",
    )
    parser.add_argument("--version", action="version", version=f"bert_jax {bert_jax.__version__}")
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(
        name: str, run: Callable[[argparse.Namespace], int], text: str, example: str = ""
    ) -> Parser:
        sub = subparsers.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  {example}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        return sub

    sub = verb(
        "demo", runs.demo,
        "pretrain a small BERT on the documentation that Python carries, or train a small model "
        "that translates number words to digits",
    )  # fmt: skip
    sub.option(
        "--workdir",
        "directory to write (default: work/demo, with --translation work/demo_translation)",
        type=Path,
    )
    sub.option(
        "--recipe",
        "of the BERT: modern: rotary positions, norms before the blocks and Muon, about 3 minutes "
        "on 2 cores (the default); bert: the architecture and optimizer of 2018, about 6 minutes",
        choices=["modern", "bert"],
    )
    sub.flag(
        "--translation",
        "French number words to digits: 20,000 pairs to learn from, 2,000 unseen numbers to "
        "translate, and a page of attention; about a minute on 2 cores",
    )
    sub.option("--config", "configuration file in the place of a recipe's", metavar="FILE")

    corpora.add(verb)
    contamination.add(verb)

    sub = verb(
        "train", runs.train,
        "train what `objective` names (masked words, replaced tokens, translation), or continue a "
        "run in its work directory; `pretrain` is the same",
        "bert-jax train --config=configs/translate/multi30k_small.py --workdir=work/ende \\\n"
        "      --config.data.corpus=work/en-de\n"
        "  bert-jax train --config=configs/translate/transformer_base.py --workdir=work/warm \\\n"
        "      --config.data.corpus=work/en-de --config.init=work/modern",
    )  # fmt: skip
    _add_training(sub, needed=needed)
    sub = verb(
        "pretrain", runs.train,
        "pretrain, or continue a run in its work directory; `train` is the same",
        "bert-jax pretrain --config=configs/pretrain/bert_tiny.py --workdir=work/tiny \\\n"
        "      --config.data.corpus=work/corpus --config.training.num_steps=20000\n"
        "  bert-jax pretrain --config=configs/pretrain/modern_tiny.py --workdir=work/modern \\\n"
        "      --config.data.corpus=work/corpus '--config.training.phases[1].corpus=work/long'\n"
        "  bert-jax pretrain --config=bert_tiny --workdir=work/decay \\\n"
        "      --branch-from=work/tiny@15000 --config.data.corpus=work/corpus \\\n"
        "      --config.training.num_steps=20000 --config.optimizer.schedule=wsd",
    )  # fmt: skip
    _add_training(sub, needed=needed)

    sub = verb(
        "finetune", runs.finetune,
        "fine-tune on texts with labels, tagged words or questions; one run or a sweep of them",
        "bert-jax finetune --config=configs/finetune/glue.py:mrpc --config.init=work/tiny \\\n"
        "      --config.task.data=glue_data --workdir=work/mrpc\n"
        "  bert-jax finetune --config=configs/finetune/table.py --config.init=work/tiny \\\n"
        "      --config.task.train=reviews.csv --config.sweep.seeds=5 --workdir=work/reviews",
    )  # fmt: skip
    _add_run(sub, needed=needed)

    sub = verb(
        "plan", runs.plan, "compile the train step for a TPU slice, on a machine without one",
        "bert-jax plan --config=configs/pretrain/bert_base.py --topology=v5e:16x16 --fast\n"
        "  bert-jax plan --config=configs/pretrain/bert_large.py --topology=v5e:4x4 \\\n"
        "      --topology=v5p:4x4x4 --phase=all --config.model.remat=dots --plot=plan.png",
    )  # fmt: skip
    _add_plan(sub, needed=needed)

    sub = verb(
        "status", runs.status,
        "say how far a run is, what it has saved, where its time went and what went wrong",
        "bert-jax status work/tiny",
    )  # fmt: skip
    sub.add_argument("workdir")
    sub.flag("--json", "print one JSON object instead")
    sub.option(
        "--png", "the loss curve; default: loss.png of a local run", type=Path, metavar="FILE"
    )

    sub = verb(
        "verify", runs.verify, "read all checkpoints of a run back and say which are intact",
        "bert-jax verify work/tiny",
    )  # fmt: skip
    sub.add_argument("workdir")
    sub.option("--step", "only the checkpoint of this step", type=int)
    sub.flag("--json", "print a JSON list instead")

    evaluation.add(verb)

    sub = verb(
        "predict", runs.predict, "predict with a fine-tuned model",
        "bert-jax predict work/reviews --data new.csv --out predictions",
    )  # fmt: skip
    sub.option("workdir", "of a fine-tuning run")
    sub.option(
        "--data",
        "a file with the columns that the model was trained on, labels may be missing; of GLUE "
        "also a split, for example test",
        required=True, metavar="FILE",
    )  # fmt: skip
    sub.option("--out", "directory to write", required=True, type=Path, metavar="DIR")

    sub = verb(
        "replay", runs.replay, "print a batch of a run, decoded, with its masks",
        "bert-jax replay work/tiny --step 100",
    )  # fmt: skip
    sub.add_argument("workdir")
    sub.option("--step", "number of the batch, from 0", required=True, type=int)
    sub.option("--rows", "print at most so many rows", type=int)
    sub.option("--corpus", "default: that of the run")

    inference.add(verb)
    search.add(verb)
    exchange.add(verb)
    accounting.add(verb)
    return parser


def _add_run(sub: Parser, *, needed: bool) -> None:
    sub.set_defaults(takes_fields=True)
    sub.option(
        "--config",
        "a Python file with get_config(), optionally FILE:ARGUMENT. Any field is set with "
        "--config.SECTION.FIELD=VALUE; --fields lists them",
        required=needed, metavar="FILE",
    )  # fmt: skip
    sub.option(
        "--workdir",
        "where checkpoints and metrics go, local or gs://BUCKET/DIR; made if missing",
        required=needed, metavar="DIR",
    )  # fmt: skip
    sub.option(
        "--distributed",
        "join the other processes of a pod, a Slurm job or launch/local.py: where the environment "
        "names some, always, never",
        "auto", choices=["auto", "on", "off"],
    )  # fmt: skip
    sub.option("--join-timeout", "how long to wait for them", 300, metavar="SECONDS")
    sub.option(
        "--stopped-code",
        "exit code when SIGTERM ended the run, saved, before its last step; launchers that start "
        "it again pass 75; Ctrl-C on one process ends with 130",
        0, metavar="CODE",
    )  # fmt: skip
    sub.flag("--fields", "list all fields with their defaults and stop", dest="fields_help")


def _add_training(sub: Parser, *, needed: bool) -> None:
    """Add the options of `train` and `pretrain`."""
    _add_run(sub, needed=needed)
    sub.add_argument(
        "--branch-from",
        default="",
        metavar="WORKDIR[@STEP]",
        help="go on from a checkpoint of another run, with its whole state, in a work directory "
        "and under a configuration of its own, which must be that run's for the steps before; "
        "without @STEP from the newest that was read back. The checkpoint stays for ever",
    )


def _add_plan(sub: Parser, *, needed: bool) -> None:
    sub.set_defaults(takes_fields=True)
    sub.option(
        "--config",
        "as in pretrain; any field is set with --config.SECTION.FIELD=VALUE. data.corpus need not "
        "exist",
        required=needed, metavar="FILE",
    )  # fmt: skip
    sub.option(
        "--topology",
        "v5e:16x16, v5p:4x4x8, v4:2x2x1, v6e:8x8, tpu7x:4x4x4, v5e:1x1 (one chip), "
        "v5e:16x16,slices=2. May be repeated: one comparison at the end",
        required=needed, action="append", metavar="NAME",
    )  # fmt: skip
    sub.option("--phase", "of training.phases, or all", "0", metavar="N")
    sub.option(
        "--batch-per-chip", "rows a chip in a micro-batch, in place of the configured batch",
        type=int, metavar="N",
    )  # fmt: skip
    search = sub.add_mutually_exclusive_group()
    search.add_argument("--fit", action="store_true", help="find the largest batch per chip")
    search.add_argument(
        "--fast",
        action="store_true",
        help="compare the configured batch, a step of 0.5 M tokens in the fastest micro-batches, "
        "and the batch with the highest MFU",
    )
    sub.flag("--json", "one JSON object on standard output")
    sub.option("--plot", "draw memory and time", type=Path, metavar="FILE.png")
    sub.option(
        "--cache", "compiled steps are kept here (default: ~/.cache/bert_jax/plan)",
        type=Path, metavar="DIR",
    )  # fmt: skip
    sub.flag("--no-cache", "neither read nor write the cache")
    sub.flag("--fields", "list all fields and stop", dest="fields_help")


if __name__ == "__main__":
    sys.exit(main())
