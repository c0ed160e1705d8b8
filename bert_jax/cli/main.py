"""The `bert-jax` command. Each verb is a class that is imported only when the verb is used.

Exit codes:
    0    done, or SIGTERM stopped a run after everything was saved
    1    a check failed, a plan does not fit, or nobody reads a run's output
    2    the input is wrong, and the user can correct it
    3    several saves failed in a row
    4    the loss is not finite or has a spike
    5    no checkpoint is intact
    6    no progress for too long, or a bucket or another process cannot be reached
    7    another run has taken over the work directory
    8    fine-tuning learned nothing
    9    a device computed or kept wrong bits
    130  ended by Ctrl-C
    143  ended by SIGTERM
"""
# PYTHON_ARGCOMPLETE_OK

import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import bert_jax
from bert_jax.cli.compile_cache import keep_programs
from bert_jax.cli.kept_pages import keep_pages
from bert_jax.cli.verbs.options import Parser, Verb, read
from bert_jax.errors import UserError, report_error, suggestion
from bert_jax.terminal import safe_streams

VERBS = {
    "": {
        "start": "starting", "pretrain": "runs", "finetune": "runs", "evaluate": "evaluation",
        "predict": "runs", "export": "exchange", "search": "search", "plan": "runs",
        "demo": "starting",
    },
    "text": {
        "tokenizer": "corpora", "corpus": "corpora", "tfds": "corpora", "inspect": "accounting",
        "contamination": "accounting",
    },
    "runs": {"status": "runs", "verify": "runs", "replay": "runs", "lineage": "accounting",
             "record": "recording"},
    "models": {"average": "exchange", "import": "exchange", "grow": "exchange"},
    "answers": dict.fromkeys(
        ("fill-mask", "classify", "tag", "answer", "translate", "embed", "attend"), "inference"
    ),
    "search by vectors": {"index": "search", "mine": "search"},
}  # fmt: skip
"""Groups of verbs in the order of the help. Each verb maps to the module that defines it."""
MODULES = {name: module for group in VERBS.values() for name, module in group.items()}
_OLD = {"train": "pretrain"}
_HELP = """\
usage: bert-jax [-h] [--version] VERB ...

Pretrain and fine-tune BERT-style encoders in JAX.
{verbs}
Start with `bert-jax demo`. `bert-jax VERB --help` explains a verb; `bert-jax pretrain --fields` and
`bert-jax finetune --fields` list the fields of a configuration."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    with safe_streams():
        if argv is not None:
            return _main(argv)
        if "_ARGCOMPLETE" in os.environ:
            _complete()
        # JAX and Flax make many long-lived objects: collect garbage rarely, and not at exit.
        gc.set_threshold(500_000, 20, 100)
        if not {*VERBS["text"], *VERBS["search by vectors"]} & set(sys.argv[1:2]):  # no training
            keep_pages()
        try:
            return _main(sys.argv[1:])
        finally:
            gc.freeze()


def verb_class(name: str) -> type[Verb]:
    """Import the class of a verb. If the verb is unknown, raise a UserError with a suggestion."""
    if name not in MODULES:
        if new := _OLD.get(name):
            raise UserError(f"this verb was renamed to {new}")
        hint = suggestion(name, MODULES, "; did you mean {}?")
        raise UserError(f"there is no such verb{hint} (bert-jax --help lists all verbs)")
    module = importlib.import_module(f"bert_jax.cli.verbs.{MODULES[name]}")
    found: type[Verb] = getattr(module, name.title().replace("-", ""))
    return found


def _main(argv: Sequence[str]) -> int:
    name = argv[0] if argv else "VERB"
    if name in ("-h", "--help", "--version"):
        print(f"bert_jax {bert_jax.__version__}" if name == "--version" else _help())
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hide XLA's start-up notes
    keep_programs()
    before, code = None, int(name in ("start", "demo", "record"))  # see BrokenPipeError
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _terminate)
    try:
        verb = verb_class(name)
        lists = "--fields" in argv and "fields" in verb.__dataclass_fields__
        code = _print_fields(verb, argv[1:]) if lists else read(verb, name, argv[1:])()
        print(end="", flush=True)  # a closed pipe may show only here
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except (Exception, KeyboardInterrupt) as error:
        if (known := report_error(error, name)) is None:
            raise
        return known
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _help() -> str:
    """List the verbs, each with the first line of its docstring."""
    lines = []
    for title, group in VERBS.items():
        lines += ["", f"{title}:"] if title else [""]
        for name in group:
            line = (verb_class(name).__doc__ or "").partition("\n")[0].rstrip(".")
            lines.append(f"  {name:14} {line}")
    return _HELP.format(verbs="\n".join([*lines, ""]))


def _print_fields(verb: Any, argv: Sequence[str]) -> int:
    """Print the fields of the --config file's configuration, or of the default configuration."""
    from bert_jax.config.command_line import fields_help, load_config, overridden

    given, fields = Parser(verb, lax=True, prog="bert-jax").parse_known_args(argv)
    if "config" in given:
        config = load_config(verb.kind(), given.config, fields)
    else:
        config = overridden(verb.kind()(), fields)
    print(fields_help(config))
    return 0


def _complete() -> None:
    """Print completions for a shell, and exit; needs argcomplete (the extra `completion`)."""
    import argcomplete

    parser = Parser(prog="bert-jax")
    parser.add_argument("--version", action="store_true")
    verbs = parser.add_subparsers()
    for name in MODULES:
        verbs.add_parser(name, verb=verb_class(name))
    argcomplete.autocomplete(parser)


def _terminate(number: int, frame: object) -> None:
    """Exit on SIGTERM through all `finally` blocks, which remove half-written files."""
    # `timeout` sends SIGTERM twice; the second one must not interrupt the clean-up.
    signal.signal(number, signal.SIG_IGN)
    os.write(2, b"bert-jax: ended by SIGTERM\n")  # `print` may need a lock that is held
    sys.exit(128 + number)
