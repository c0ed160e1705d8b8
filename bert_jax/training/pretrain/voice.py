"""Reports of a pretraining run: printed lines, columns of metrics, and the loss curve."""

import dataclasses
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import bert_jax
from bert_jax.artefacts.exchange.export import refusal_lines
from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.config.mapping import to_dict
from bert_jax.data.phases import Phase, described
from bert_jax.data.pipeline import ExampleStream
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.objectives.objective import Objective, num_params
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.settings import warmup_lines
from bert_jax.training.progress import Moment
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run.loss_curve import PROBE, draw_loss_curve
from bert_jax.training.run.telemetry import duration, readout
from bert_jax.training.run_plan import Result, Saves, Scores

_REDRAW_SECONDS = 60.0
_log = logging.getLogger("bert_jax")


@dataclass(eq=False)
class PretrainVoice:
    """Reporter of a pretraining run: its printed lines, columns of metrics and loss curve."""

    summary: Sequence[str]
    """Lines about model, text, phases and devices."""
    origins: Sequence[str]
    """Lines about the checkpoint and the models that the run starts from."""
    work: WorkDir
    objective: Objective
    phases: Sequence[Phase]
    seen: Callable[[int], dict[str, Any]]
    """Function that returns how much text was read up to a step (see `MixedCorpora.seen`)."""
    saves: Saves
    drawn: float = -math.inf

    def about(self, step: int, restored: bool) -> tuple[list[str], str]:
        """Return lines that describe the run, and the message of the event `start`."""
        continued = [f"continues from step {step:,}"] if step and self.saves.newest() else []
        lines = [*self.summary, *continued, *self.origins]
        return lines, "; ".join([lines[0], *lines[-2:]])

    def columns(self, wave: int, step: int) -> dict[str, Any]:
        """Return columns that tell how much text was read up to a step."""
        return self.seen(step)

    def scored(self, at: Moment, scores: Sequence[Scores | None]) -> list[str]:
        """Describe the held-out loss and the scores of probes."""
        if time.monotonic() - self.drawn > _REDRAW_SECONDS:
            self.draw()
        text = readout(self.objective.metrics, at.scores, "eval", self.objective.baseline)
        found = [f"held-out text at step {at.step:,}: {text}"] if text else []
        if "eval/bleu" in at.scores:
            bleu, chrf = (at.scores[f"eval/{name}"] for name in ("bleu", "chrf"))
            found.append(f"translations at step {at.step:,}: BLEU {bleu:.1f}, chrF {chrf:.1f}")
        return found + [
            f"probe {name.removeprefix(PROBE)} at step {at.step:,}: {value:.4g}"
            for name, value in at.scores.items()
            if name.startswith(PROBE)
        ]

    def closing(self, result: Result, clock: Clock, signal: str) -> tuple[str, Iterable[str]]:
        """Draw the loss curve and describe how the run ended."""
        self.draw()
        metrics, num_steps = self.objective.metrics, sum(phase.num_steps for phase in self.phases)
        checkpoint = f"{result.workdir}/checkpoints/{result.step}"
        if not result.finished:
            line = (
                f"{signal}: stopped after step {result.step:,} of {num_steps:,}, saved in "
                f"{checkpoint}. The same command continues the run"
            )
            return line, [line]
        spent = ", ".join(f"{name} {duration(s)}" for name, s in clock.spent.items() if s >= 1)
        rest = f" (not in steps: {spent})" if spent else ""
        lines = [
            f"step {result.step:,} of {num_steps:,} reached; {duration(result.seconds)} since this "
            f"start, {100 * clock.goodput:.0f}% of it in steps{rest}"
        ]
        for label, values, name in (
            ("training", result.train_metrics, "train"),
            ("held-out", result.eval_metrics, "eval"),
        ):
            if text := readout(metrics, values, name, result.baseline):
                lines.append(f"{label} {text}")
        lines += [
            f"checkpoint  {checkpoint}",
            f"metrics     {result.workdir}/metrics.jsonl, {result.workdir}/tensorboard",
            f"loss curve  {result.workdir}/loss.png",
        ]
        return lines[0], lines

    def draw(self) -> None:
        """Draw the loss curve (process 0 only)."""
        if jax.process_index() != 0:
            return
        self.drawn = time.monotonic()
        path, name = self.work.local / "loss.png", Path(self.work.name).name
        file, objective = self.work.local / "metrics.jsonl", self.objective
        try:
            draw_loss_curve(
                file, objective.metrics, objective.baseline, path, title=name, phases=self.phases
            )
        except (OSError, UserError) as error:
            _log.warning("%s cannot be drawn: %s", path, error)


def summary(
    config: PretrainConfig,
    workdir: str,
    corpus: Corpus,
    stream: ExampleStream,
    mesh: Mesh,
    objective: Objective,
) -> list[str]:
    """Describe a run, one line for each subject."""
    model, store, device = config.model, corpus.train, jax.devices()[0]
    held_out = "no held-out text, so no evaluation"
    if corpus.heldout is not None:
        held_out = f"{corpus.heldout.num_tokens:,} tokens held out"
    phases, warnings = [], []
    epochs: dict[Path | None, float] = defaultdict(float)
    for number, phase in enumerate(config.phases):
        corpora = stream.corpora(number)
        text = corpora[0].rows.store
        given, parts = config.training.phases[number], []
        for each, count in zip(corpora, stream.rows_of_corpora(number), strict=True):
            rows = each.order.num_rows / config.data.num_passes
            epochs[each.rows.store.path] += count / rows
            part = f"{count / phase.num_rows:.1%} {each.name} ({count / rows:.2f} epochs)"
            alone = f"{count / rows:.2f} epochs of {rows:,.0f} rows"
            parts.append(alone if len(corpora) == 1 else part)
        clause, warning = stream.plan(number).losses(text.shards[0])
        own = f"text {text.path} ({text.num_tokens:,} tokens)" if given.corpus else ""
        said = [", ".join(parts), described(dataclasses.asdict(given)), own, clause]
        phases.append(
            f"phase    {phase.num_steps:,} steps of {phase.batch_size:,} rows of {phase.length} "
            f"tokens: {'; '.join(filter(None, said))}"
        )
        warnings += [warning] if warning else []
    warnings += [
        f"Warning: {count:,.0f} epochs of {path or 'the corpus'}; above 40 a model "
        "learns the text by heart rather than the language. Add text or train fewer steps"
        for path, count in epochs.items()
        if count > 40  # more repetitions add next to nothing (Muennighoff et al. 2023)
    ]
    goal = []
    if objective.baseline is not None:
        metric = objective.metrics[0]
        goal.append(
            f"goal     a {metric.title} below {objective.baseline:.3f} nats, the {metric.baseline} "
            "of the corpus"
        )
    tokenizer = store.path and load_tokenizer(store.path / "tokenizer")
    exports = refusal_lines(planned_models(config, objective, tokenizer)) if tokenizer else []
    processes = jax.process_count()
    return [
        f"bert_jax {bert_jax.__version__}, work directory {workdir}",
        f"model    {num_params(objective):,} parameters: {model.num_layers} layers, "
        f"{model.hidden_dim} wide, vocabulary {model.vocab_size:,}",
        f"corpus   {store.num_tokens:,} tokens in {store.num_documents:,} documents; {held_out}",
        *phases,
        *warmup_lines(config),
        *warnings,
        *goal,
        *exports,
        f"devices  {mesh.size} ({device.device_kind}) of {processes} "
        f"process{'es' if processes > 1 else ''}, as "
        + " x ".join(f"{name} {size}" for name, size in mesh.shape.items()),
    ]


def planned_models(
    config: PretrainConfig, objective: Objective, tokenizer: Tokenizer
) -> dict[str, SavedModel]:
    """Return the models that a run will save, by part, with logical axes in place of arrays."""
    origin = Origin("pretrain", config=to_dict(config))
    network, models = config.objective.network, config.objective.models
    return {
        part: SavedModel(
            model, axes, None, tokenizer, Path(), model.num_positions, part, origin, network(model)
        )
        for part, (model, axes) in models(config.model, objective.axes()).items()
    }
