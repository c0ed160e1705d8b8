"""Verbs that prepare, train and inspect runs; imports are made when a verb runs.

A verb takes the parsed arguments and returns the exit code.
"""

import argparse
import dataclasses
import json
import logging
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_jax.cli.verbs.evaluation import check_rows
from bert_jax.errors import UserError, report_error


def demo(arguments: argparse.Namespace) -> int:
    """Run all steps on text that is there."""
    from bert_jax.cli.demo import masked_words, number_words

    if arguments.translation:
        if arguments.recipe:
            raise UserError(
                f"--recipe {arguments.recipe} is a recipe of the BERT that fills masks; leave it "
                "out with --translation, or choose a network with --config=translate/numbers.py:"
                "recurrent"
            )
        workdir = arguments.workdir or Path("work/demo_translation")
        return number_words.run_demo(arguments.config or number_words.CONFIG, workdir)
    recipe = masked_words.RECIPES[arguments.recipe or "modern"]
    if arguments.config:
        recipe = masked_words.RECIPES["bert"]._replace(config=arguments.config)
    return masked_words.run_demo(recipe, arguments.workdir or Path("work/demo"))


def train(arguments: argparse.Namespace) -> int:
    """Train what the section `objective` names, or continue a run."""
    from bert_jax.artefacts.saved.reading import read_model
    from bert_jax.training.pretrain.train import train
    from bert_jax.training.run.goodput import Clock, process_age

    def run(config: Any) -> str:
        clock = Clock(age=process_age())
        return train(
            config,
            arguments.workdir,
            initial=lambda: read_model(config.init),
            branch_from=arguments.branch_from,
            clock=clock,
        ).stopped_by

    return _run(arguments, run)


def finetune(arguments: argparse.Namespace) -> int:
    """Fine-tune a sweep or the folds of the data, or continue them."""
    from bert_jax.training.finetune.folds import cross_validate
    from bert_jax.training.finetune.progress import NothingLearnedError
    from bert_jax.training.finetune.train import finetune
    from bert_jax.training.run.goodput import Clock, process_age

    def run(config: Any) -> str:
        if config.task.folds and not config.task.fold:
            return cross_validate(config, arguments.workdir, clock=Clock(age=process_age()))
        result = finetune(config, arguments.workdir, clock=Clock(age=process_age()))
        if result.unlearned:
            raise NothingLearnedError(result.unlearned)
        return result.stopped_by

    return _run(arguments, run)


def _config_class(verb: str) -> type[Any]:
    if verb == "finetune":
        from bert_jax.training.finetune.config import FinetuneConfig

        return FinetuneConfig
    from bert_jax.training.pretrain.config import PretrainConfig

    return PretrainConfig


def _run(arguments: argparse.Namespace, train: Callable[[Any], str]) -> int:
    """Join the other processes and train; `train` returns the name of a signal that stopped it."""
    from bert_jax.config.command_line import load_config
    from bert_jax.distributed.parallel import processes

    if not Path(arguments.workdir).name:
        raise UserError(f"--workdir is {arguments.workdir!r}; name a directory for this run")
    config = load_config(_config_class(arguments.verb), arguments.config, arguments.fields)
    # Orbax's threads log the traceback of a failed save; the loop raises the error itself.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        processes.join(arguments.distributed, arguments.join_timeout)
        stopped_by = train(config)
    except BaseException as error:
        if label := processes.label():  # one of several, whose errors must not wait for the others
            if (code := report_error(error, f"{arguments.verb}, {label}")) is None:
                traceback.print_exc()
            processes.leave(1 if code is None else code)
        raise
    if stopped_by == "SIGINT":  # Ctrl-C; of several processes all stop by SIGTERM
        saved = f"interrupted, saved. To continue:\n  {arguments.command_line}"
        print(f"bert-jax {arguments.verb}: {saved}", file=sys.stderr)
        return 130
    return arguments.stopped_code if stopped_by else 0


def plan(arguments: argparse.Namespace) -> int:
    """Compile for TPUs that are not there."""
    from bert_jax.artefacts.saved.reading import read_model
    from bert_jax.config.command_line import load_config
    from bert_jax.plan.command import run_plan
    from bert_jax.plan.compile import default_cache
    from bert_jax.training.pretrain.config import PretrainConfig
    from bert_jax.training.pretrain.start.initial_model import with_architecture
    from bert_jax.training.pretrain.start.teacher import resolve_teacher

    config = load_config(PretrainConfig, arguments.config, arguments.fields)
    if config.init:
        initial = read_model(config.init).config
        config = with_architecture(config, initial).with_vocabulary(initial.vocab_size)
    config, _ = resolve_teacher(config)
    return run_plan(
        config, arguments.topology, phase=arguments.phase, batch_per_chip=arguments.batch_per_chip,
        fit=arguments.fit, fast=arguments.fast, as_json=arguments.json, plot=arguments.plot,
        cache=None if arguments.no_cache else arguments.cache or default_cache(),
    )  # fmt: skip


def print_fields(arguments: argparse.Namespace) -> int:
    """List the fields of a configuration."""
    from bert_jax.config.command_line import fields_help, load_config, overridden

    cls = _config_class(arguments.verb)
    if arguments.config:
        config = load_config(cls, arguments.config, arguments.fields)
    else:
        config = overridden(cls(), arguments.fields)
    print(fields_help(config))
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Say how a run is doing; only its picture is written."""
    from bert_jax.artefacts.saved.runs import is_finetuning
    from bert_jax.cli.inspection.status import finetune_status, pretrain_status, redraw
    from bert_jax.cli.inspection.status_lines import finetune_lines, pretrain_lines
    from bert_jax.files.remote import open_workdir

    work = open_workdir(arguments.workdir)
    if is_finetuning(work.local):
        if arguments.png is not None:
            raise UserError(
                f"{arguments.workdir} holds a fine-tuning run; --png is for pretraining. Its "
                "picture is statistics.png, made at the end"
            )
        finetuning = finetune_status(work)
        if arguments.json:
            print(json.dumps(dataclasses.asdict(finetuning), indent=2))
        else:
            width = min(shutil.get_terminal_size().columns, 110)
            print("\n".join(finetune_lines(finetuning, width=width)))
        return 0
    found = pretrain_status(work)
    picture, trouble = arguments.png, ""
    if picture is None and work.mirror is None:
        picture = work.local / "loss.png"
    if picture is not None:
        trouble = redraw(work.local, found, picture)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        plain = not sys.stdout.isatty()
        width = min(shutil.get_terminal_size().columns, 110)
        colours = getattr(sys.stdout, "unescaped", sys.stdout)  # of `terminal.Escaping`
        print("\n".join(pretrain_lines(found, width=width, plain=plain)), file=colours)
        if picture and not trouble:
            print(f"\nloss curve  {picture}")
    if trouble:
        print(f"bert-jax status: no picture: {trouble}", file=sys.stderr)
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Read all checkpoints back."""
    from bert_jax.distributed.checkpoint.verify import audit, audit_report
    from bert_jax.files.remote import open_workdir

    work = open_workdir(arguments.workdir)
    verdicts = audit(work.checkpoints, only=arguments.step, progress=sys.stderr.isatty())
    if arguments.json:
        print(json.dumps([dataclasses.asdict(verdict) for verdict in verdicts], indent=2))
    else:
        print("\n".join(audit_report(verdicts)))
    if all(verdict.intact for verdict in verdicts):
        return 0
    return 1 if any(verdict.intact for verdict in verdicts) else 5


def predict(arguments: argparse.Namespace) -> int:
    """Predict with a fine-tuned model."""
    from bert_jax.training.finetune.evaluate import predict_finetuned

    for path in predict_finetuned(arguments.workdir, arguments.data, arguments.out):
        print(path)
    return 0


def replay(arguments: argparse.Namespace) -> int:
    """Print a batch."""
    from bert_jax.artefacts.saved.runs import is_finetuning
    from bert_jax.files.remote import open_workdir

    check_rows(arguments.rows)
    if is_finetuning(open_workdir(arguments.workdir).local):
        from bert_jax.cli.inspection.replay_task import replay_task

        if arguments.corpus is not None:
            raise UserError(
                f"--corpus is for pretraining; {arguments.workdir} holds a fine-tuning run"
            )
        print(replay_task(arguments.workdir, arguments.step, max_rows=arguments.rows))
        return 0
    from bert_jax.cli.inspection.replay import replay_batch

    batch = replay_batch(
        arguments.workdir, arguments.step, corpus=arguments.corpus, max_rows=arguments.rows
    )
    print(batch)
    return 0
