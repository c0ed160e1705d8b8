"""Verbs that plan, train and inspect runs. Each verb imports its modules only when it runs."""

import contextlib
import dataclasses
import json
import logging
import shutil
import sys
import traceback
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from bert_jax.cli.verbs import groups
from bert_jax.cli.verbs.options import Directory, RunPlace, Verb
from bert_jax.errors import UserError, report_error, signal_code

if TYPE_CHECKING:
    from bert_jax.planning.profile import Profile
    from bert_jax.training.run_plan import Result, RunPlan


class Configured(Verb):
    """Options for the configuration of a run."""

    config: Annotated[str, "FILE"]
    """Name of a configuration or path of a Python file, such as bert_tiny or my/bert.py. An
    argument may follow a colon, as in glue:mrpc. --config.SECTION.FIELD=VALUE sets any field."""
    fields: bool = False
    """List all fields of a configuration with their defaults and stop."""

    CONFIGURED: ClassVar[bool] = True

    @classmethod
    def kind(cls) -> type[Any]:
        """Return the class of the configuration."""
        from bert_jax.training.pretrain.config import PretrainConfig

        return PretrainConfig

    def loaded(self) -> Any:
        """Read the configuration. Raise a UserError if it is faulty or for another verb."""
        from bert_jax.config.command_line import load_config

        try:
            return load_config(self.kind(), self.config, self.overrides)
        except UserError:
            other = Pretrain if isinstance(self, Finetune) else Finetune
            fitting = []
            for kind in (self.kind(), other.kind()):
                with contextlib.suppress(UserError):
                    fitting.append(type(load_config(kind, self.config)))
            if fitting != [other.kind()]:
                raise
            raise UserError(
                f"--config={self.config} is a recipe for `bert-jax {other.__name__.lower()}`"
            ) from None


class Run(Configured):
    """Options of a verb that runs a training in a work directory."""

    workdir: RunPlace
    """Directory for checkpoints and metrics, local or gs://BUCKET/DIR; created if missing."""
    distributed: Literal["auto", "on", "off"] = "auto"
    """Whether to join the other processes of a TPU pod, a Slurm job or launch/local.py. auto joins
    them if the environment names any."""
    join_timeout: Annotated[int, "SECONDS"] = 300
    """Time to wait for the other processes of the run."""
    stopped_code: Annotated[int, "CODE"] = 0
    """Exit code if SIGTERM stops the run before its last step. The run is saved first. Launchers
    that restart stopped runs set 75. Ctrl-C on a run of one process always gives 130."""
    dry_run: bool = False
    """Check everything, print the configuration in full and the files to be written, and stop."""
    check: bool = False
    """Compare versions, chips, directories, data and a step on all hosts, save nothing and stop."""
    quiet: bool = False
    """Print only warnings and errors."""
    track: tuple[Literal["wandb", "trackio"], ...] = ()
    """Experiment tracker that shows the metrics, too: Weights & Biases or trackio; may be repeated.
    WANDB_PROJECT and TRACKIO_PROJECT name the project (default: bert_jax)."""
    profile: Annotated[str, "FIRST:LAST"] = ""
    """Steps to trace, such as 20:25; FIRST >= 2. WORKDIR/profile gets the time per code line."""

    @property
    def profiler(self) -> "Profile | None":
        """Profiler of the steps that --profile gives; None without this option."""
        if not self.profile:
            return None
        from bert_jax.planning.profile import Profile

        return Profile(self.profile)

    def planned(self, config: Any) -> "RunPlan":
        """Make the plan of the run, without writing anything."""
        raise NotImplementedError

    def trained(self, config: Any, **options: Any) -> "Result":
        """Train, with options of `train`."""
        raise NotImplementedError

    def __call__(self) -> int:
        from bert_jax.distributed.parallel import processes
        from bert_jax.training.run.goodput import Clock, process_age
        from bert_jax.training.run.trackers import check_installed

        name = type(self).__name__.lower()
        if not Path(self.workdir).name:
            raise UserError(f"--workdir is {self.workdir!r}; name a directory for this run")
        config = self.loaded()
        check_installed(self.track)
        # Orbax's threads log the traceback of a failed save; the loop raises the error itself.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        try:
            processes.join(self.distributed, self.join_timeout, devices=not self.check)
            if self.check:
                from bert_jax.training.check import check_hosts

                check_hosts(self.workdir, cache(lambda: self.planned(config)), self.join_timeout)
                return 0
            if self.dry_run:
                plan = self.planned(config)
                if profiler := self.profiler:
                    profiler(plan)
                _print_plan(plan)
                return 0
            clock, echo = Clock(age=process_age()), _print_warning if self.quiet else None
            result = self.trained(
                config, clock=clock, echo=echo, track=self.track, profiler=self.profiler
            )
        except BaseException as error:
            if label := processes.label():  # with several processes, do not wait for the others
                if (code := report_error(error, f"{name}, {label}")) is None:
                    traceback.print_exc()
                processes.leave(1 if code is None else code)
            if isinstance(error, BrokenPipeError) and not self.dry_run:  # `main` would end with 0
                return 1
            raise
        if result.finished:
            return 0
        if result.stopped_by == "SIGINT":  # Ctrl-C; with several processes it acts as SIGTERM
            saved = f"interrupted, saved. To continue:\n  {self.command_line}"
            print(f"bert-jax {name}: {saved}", file=sys.stderr)
        return signal_code(result.stopped_by, self.stopped_code)


class Pretrain(Run):
    r"""Pretrain an encoder or train a translator, or continue a run.

    The field `objective` sets the task: masked words, replaced tokens or translation.

    $ bert-jax pretrain --config=bert_tiny --workdir=work/tiny \
        --config.data.corpus=work/corpus --config.training.num_steps=20000
    $ bert-jax pretrain --config=modern_tiny --workdir=work/modern \
        --config.data.corpus=work/corpus '--config.training.phases[1].corpus=work/long'
    $ bert-jax pretrain --config=bert_tiny --workdir=work/decay \
        --branch-from=work/tiny@15000 --config.data.corpus=work/corpus \
        --config.training.num_steps=20000 --config.optimizer.schedule=wsd
    $ bert-jax pretrain --config=multi30k_small --workdir=work/ende \
        --config.data.corpus=work/en-de
    $ bert-jax pretrain --config=transformer_base --workdir=work/warm \
        --config.data.corpus=work/en-de --config.init=work/modern
    """

    branch_from: Annotated[str, "WORKDIR[@STEP]"] = ""
    """Checkpoint of another run, which this run continues with all its state in a new work
    directory. Up to the checkpoint's step, both configurations must be equal. Without @STEP, the
    newest checkpoint read back intact is taken. The other run never deletes this checkpoint."""

    def planned(self, config: Any) -> "RunPlan":
        """Make the plan of the run; it may continue a run in the work directory."""
        from bert_jax.files.remote import open_workdir
        from bert_jax.training.pretrain.corpus import open_corpus
        from bert_jax.training.pretrain.train import resolve_pretraining

        corpus = open_corpus(config.data.corpus, config.data)
        work = open_workdir(self.workdir)
        return resolve_pretraining(config, work, corpus, branch_from=self.branch_from)

    def trained(self, config: Any, **options: Any) -> "Result":
        """Train the objective that the section `objective` names."""
        from bert_jax.training.pretrain.train import train

        return train(config, self.workdir, branch_from=self.branch_from, **options)


class Finetune(Run):
    r"""Fine-tune on labelled texts, tagged words or questions.

    The configuration asks for one run, a sweep of several runs, or a cross-validation.

    $ bert-jax finetune --config=glue:mrpc --config.init=work/tiny \
        --config.task.data=glue_data --workdir=work/mrpc
    $ bert-jax finetune --config=table --config.init=work/tiny \
        --config.task.train=reviews.csv --config.sweep.seeds=5 --workdir=work/reviews
    """

    @classmethod
    def kind(cls) -> type[Any]:
        """Return the class of the configuration."""
        from bert_jax.training.finetune.config import FinetuneConfig

        return FinetuneConfig

    def planned(self, config: Any) -> "RunPlan":
        """Make the plan of the run or, for a cross-validation, of its first fold."""
        from bert_jax.files.remote import open_workdir
        from bert_jax.training.finetune.folds import check_folds
        from bert_jax.training.finetune.saves import check_finetune_workdir
        from bert_jax.training.finetune.setup import set_up
        from bert_jax.training.finetune.train import resolve_finetuning

        check_folds(config, self.workdir)
        task = config.task.located()
        task = dataclasses.replace(task, fold=task.fold or min(task.folds, 1))
        config = dataclasses.replace(config, task=task)
        setup, work = set_up(config), open_workdir(self.workdir)
        check_finetune_workdir(work, setup.config, setup.fingerprints)
        return resolve_finetuning(setup.config, setup, work)

    def trained(self, config: Any, **options: Any) -> "Result":
        """Fine-tune, or continue an unfinished run. Raise an error if nothing was learned."""
        from bert_jax.training.finetune.folds import finetune_folds
        from bert_jax.training.finetune.voice import NothingLearnedError

        result = finetune_folds(config, self.workdir, **options)
        if result.unlearned:
            raise NothingLearnedError(result.unlearned)
        return result


def _print_warning(line: str) -> None:
    if line.startswith("Warning"):
        print(line, file=sys.stderr)


def _print_plan(plan: "RunPlan") -> None:
    """Print the configuration of a plan, what it does, and which files it writes."""
    from bert_jax.config.mapping import to_dict

    lines, _ = plan.voice.about(0, restored=False)
    print(json.dumps(to_dict(plan.saves.config), indent=2))
    for title, told in (("", lines), (f"to be written in {plan.name}:", plan.saves.described())):
        print("\n".join(["", *filter(None, [title]), *told]))
    print(f"\n{plan.num_steps:,} steps; nothing has been written")


class Plan(Configured, groups.Plot, groups.Json):
    r"""Predict memory and time of training on TPUs, without a TPU.

    The train step is compiled for a TPU slice, but not run. The corpus that data.corpus names need
    not exist. --plot draws the result.

    $ bert-jax plan --config=bert_base --topology=v5e:16x16 --batch-per-chip=fast
    $ bert-jax plan --config=bert_large --topology=v5e:4x4 \
        --topology=v5p:4x4x4 --phase=all --config.model.remat=dots --plot=plan.png
    """

    topology: tuple[Annotated[str, "NAME"], ...]
    """TPU slice, as the kind of chip and the number of chips in each dimension: v5e:16x16,
    v5p:4x4x8, v4:2x2x1, v6e:8x8, tpu7x:4x4x4, v5e:1x1 (one chip), v5e:16x16,slices=2 (two slices).
    May be repeated; a table at the end then compares the slices."""
    phase: Annotated[str, "N"] = "0"
    """Index of the phase to plan in training.phases, counted from 0, or all."""
    batch_per_chip: Annotated[str, "N"] = ""
    """Number of rows per chip in a micro-batch, which replaces the configured batch. fit finds the
    largest number that fits. fast compares the configured batch, a batch of 0.5 million tokens in
    the fastest micro-batches, and the batch with the highest MFU (model FLOPs utilization)."""
    cache: Directory | None = None
    """Cache of compiled steps (default: ~/.cache/bert_jax/plan); none turns the cache off."""

    def __call__(self) -> int:
        from bert_jax.planning.command import run_plan
        from bert_jax.planning.compile import default_cache

        batch = self.batch_per_chip
        if batch not in ("", "fit", "fast") and not batch.isdecimal():
            raise UserError(f"--batch-per-chip is {batch!r}; give a number, 'fit' or 'fast'")
        return run_plan(
            self.loaded(), self.topology, phase=self.phase, batch=batch, as_json=self.json,
            plot=self.plot,
            cache=None if self.cache == Path("none") else self.cache or default_cache(),
        )  # fmt: skip


class Status(groups.OfRun, groups.Plot, groups.Json):
    """Print a run's progress, the use of its time, and its errors.

    $ bert-jax status work/tiny
    """

    diagnose: bool = False
    """Test a pretraining run for causes of a high loss. Tests run the model and read the corpus."""

    def __call__(self) -> int:
        from bert_jax.artefacts.saved.runs import is_finetuning
        from bert_jax.cli.inspection.status import finetune_status, pretrain_status, redraw
        from bert_jax.cli.inspection.status_lines import finetune_lines, pretrain_lines
        from bert_jax.files.remote import open_workdir

        work = open_workdir(self.workdir)
        width = min(shutil.get_terminal_size().columns, 110)
        if is_finetuning(work.local):
            if self.diagnose or self.plot is not None:
                raise UserError(
                    f"{self.workdir} holds a fine-tuning run, but --plot and --diagnose are for "
                    "pretraining: fine-tuning draws statistics.png at its end, and has no unigram "
                    "entropy and no random weights to compare with. Leave the option out"
                )
            finetuning = finetune_status(work)
            self.show(dataclasses.asdict(finetuning), finetune_lines(finetuning, width=width))
            return 0
        found, diagnosed, causes = pretrain_status(work), dict[str, Any](), list[str]()
        if self.diagnose:
            from bert_jax.cli.inspection.diagnose import diagnosis

            diagnosed, causes = diagnosis(work)
        picture = self.draw(partial(redraw, work.local, found), work, "loss.png")
        if self.json:
            self.show(dataclasses.asdict(found) | diagnosed, ())
        else:
            plain = not sys.stdout.isatty()
            colours = getattr(sys.stdout, "unescaped", sys.stdout)  # see `terminal.Escaping`
            lines = pretrain_lines(found, width=width, plain=plain)
            print("\n".join([*lines, *causes]), file=colours)
            if picture:
                print(f"\nloss curve  {picture}")
        return 0


class Verify(groups.OfRun, groups.Checkpoint, groups.Json):
    """Read back all checkpoints of a run and report the intact ones.

    $ bert-jax verify work/tiny
    """

    def __call__(self) -> int:
        from bert_jax.artefacts.saved.runs import named_steps
        from bert_jax.distributed.checkpoint.verify import audit, audit_report
        from bert_jax.files.remote import open_workdir

        work = open_workdir(self.workdir)
        verdicts = audit(work.checkpoints, named_steps(work, self.step, None), progress=True)
        self.show([dataclasses.asdict(verdict) for verdict in verdicts], audit_report(verdicts))
        intact = [verdict.intact for verdict in verdicts]
        return 0 if all(intact) else 1 if any(intact) else 5


class Predict(groups.OfRun, groups.IntoDirectory):
    """Predict the labels of a whole file with a fine-tuned model.

    $ bert-jax predict work/reviews --data new.csv --out predictions
    """

    data: Annotated[str, "FILE"]
    """File with the training data's columns (labels are optional) or, for GLUE, a split's name."""

    def __call__(self) -> int:
        from bert_jax.training.finetune.evaluate import predict_finetuned

        for path in predict_finetuned(self.workdir, self.data, self.out):
            print(path)
        return 0


class Replay(groups.OfRun, groups.StoreRows):
    """Print a training batch as text, with its masks or labels.

    $ bert-jax replay work/tiny --step 100
    """

    step: int
    """Index of the batch, counted from 0."""

    def __call__(self) -> int:
        from bert_jax.artefacts.saved.runs import is_finetuning
        from bert_jax.cli.inspection.replay import replay_batch, replay_task
        from bert_jax.files.remote import open_workdir

        finetunes = is_finetuning(open_workdir(self.workdir).local)
        needed = f"a run of pretraining, but {self.workdir} is a fine-tuning run"
        self.only_with(needed, not finetunes, "--corpus")
        if finetunes:
            print(replay_task(self.workdir, self.step, max_rows=self.rows))
            return 0
        print(replay_batch(self.workdir, self.step, corpus=self.corpus, max_rows=self.rows))
        return 0
