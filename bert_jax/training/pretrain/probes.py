"""Probes of a pretraining run: its current model, fine-tuned on a small task or translating."""

import dataclasses
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.artefacts.exchange.proof import batch_of
from bert_jax.artefacts.exchange.searches import SEARCHES, translated
from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.artefacts.saved.runs import read_record
from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import build, to_dict
from bert_jax.data.pair_packing import some_pairs
from bert_jax.data.shard import Shard
from bert_jax.distributed.parallel.sharding import replicated
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.model.config import ModelConfig
from bert_jax.model.embedding import EmbeddingConfig
from bert_jax.model.task_heads import starting_params
from bert_jax.tasks.translation import decoded, quality
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import make_row, num_special
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.saves import FinetuneSaves
from bert_jax.training.finetune.setup import set_up, with_rates
from bert_jax.training.finetune.start import fitted, starting_vectors, to_start_from
from bert_jax.training.finetune.train import resolve_finetuning
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.progress import Moment
from bert_jax.training.run.loss_curve import PROBE
from bert_jax.training.run_plan import Scorer, Scores
from bert_jax.training.start import Start
from bert_jax.training.steps.state import made_once
from bert_jax.training.steps.step import make_train_step

_AT_ONCE = 32
"""Number of sources that are translated at a time."""


class _OfRun(Scorer):
    """Scorer that uses the run's current model as if it had been read from a checkpoint."""

    def __init__(
        self, config: PretrainConfig, files: Path | None, where: str, kind: str = "an encoder"
    ) -> None:
        """Read the tokenizer in `files`; None means that the corpus is in memory.

        Raise a UserError that begins with `where` if files or a model of the `kind` are missing.
        """
        self._run, network = config, config.objective.network(config.model)
        if files is None or (network is None) != (kind == "an encoder"):
            what = f"objective.name is {config.objective.name!r}"
            what = what if files else "the corpus is in memory, without tokenizer files"
            raise UserError(f"{where}; it needs {kind} and its tokenizer, but {what}")
        self._files, self._tokenizer = files, load_tokenizer(files)

    def _saved(self, model: ModelConfig, params: Any) -> SavedModel:
        model, params = next(iter(self._run.objective.models(model, params).values()))
        model = dataclasses.replace(model, attention_impl="auto")
        return SavedModel(
            model, params, None, self._tokenizer, self._files, model.num_positions, "the run",
            Origin("pretrain", config=to_dict(self._run)),
            network=self._run.objective.network(model),
        )  # fmt: skip

    def _current(self, model: ModelConfig, params: Any) -> SavedModel:
        """Return the current model, with parameters copied to the memory of each process."""
        everywhere = jax.tree.map(lambda leaf: replicated(leaf.sharding.mesh), params)
        params = jax.jit(lambda tree: tree, out_shardings=everywhere)(params)
        return self._saved(model, jax.device_get(params))


class Translations(_OfRun):
    """Scorer that translates held-out sources by greedy search, for BLEU and chrF.

    Long sources are cut. References are decoded from the corpus. All processes agree on scores.
    """

    def __init__(self, config: PretrainConfig, pairs: Shard, files: Path | None, due: Scorer):
        """Choose the pairs to translate whenever the scorer `due` is due."""
        number = config.training.eval_translations
        where = f"training.eval_translations is {number}"
        super().__init__(config, files, where, "a model that translates")
        sources, targets = zip(*some_pairs(pairs, number), strict=True)
        room = config.model.num_positions - num_special(self._tokenizer, pair=False)
        self._rows = [make_row(self._tokenizer, ids[:room]).ids.tolist() for ids in sources]
        self._references = [decoded(self._tokenizer, ids) for ids in targets]
        quality(self._references, self._references)  # raises now if sacreBLEU is missing
        self._due = due

    def after(self, step: int) -> bool:
        """Return true if the scorer `due` is due after `step`."""
        return self._due.after(step)

    def score(self, params: Any, at: Moment, alive: Callable[[str], None]) -> list[Scores]:
        """Translate the sources, and score the translations."""
        saved = self._current(self._run.model_of(at.stage), params)
        longest = max(map(len, self._rows))
        steps, found = min(2 * longest + 10, saved.config.num_positions), []
        for begin in range(0, len(self._rows), _AT_ONCE):
            rows = self._rows[begin : begin + _AT_ONCE]
            rows += rows[:1] * (_AT_ONCE - len(rows))  # one shape to compile
            found += translated(saved, batch_of(saved, rows, longest), SEARCHES["greedy"], steps)
            alive("some translations")
        texts = [decoded(self._tokenizer, np.array(ids)) for ids in found[: len(self._rows)]]
        return [Scores(quality(texts, self._references).values)]


class Probe(_OfRun):
    """Scorer that fine-tunes a copy of the current encoder by a recipe and scores it on dev."""

    def __init__(
        self, config: PretrainConfig, number: int, files: Path | None, params: Any, work: WorkDir
    ):
        """Read the recipe and the data of probe `number`.

        `files` is the directory of the corpus's tokenizer; None if the corpus is in memory.
        `params` are the run's parameters as abstract arrays. A probe writes nothing to `work`.
        Raise a UserError if the recipe cannot be read or used, or its task does not suit the model.
        """
        self.given, self._work = config.training.probes[number], work
        self.name = Path(self.given.recipe).stem
        where = f"training.probes[{number}].recipe is {self.given.recipe!r}"
        super().__init__(config, files, where)
        recipe, width = _recipe(self.given.recipe, where), config.model.hidden_dim
        recipe = with_rates(recipe, width, num_rows=1 << 30)  # so many rows that there is no sweep
        self._config = dataclasses.replace(recipe, init="the run")
        nothing = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), params)

        def prepared(model: ModelConfig) -> tuple[Any, Any, Any]:
            setup = set_up(self._config, lambda *_, **__: self._saved(model, nothing))
            step = dataclasses.replace(setup.step, num_steps=self.given.num_steps)
            schedule = dataclasses.replace(setup.schedule, num_steps=self.given.num_steps)
            setup = dataclasses.replace(setup, step=step, schedule=schedule)
            plan = resolve_finetuning(self._config, setup, work)
            return setup, plan, make_train_step(step, plan.mesh)

        self._models = [config.model_of(n) for n in range(len(config.phases))]
        self._of_stages = made_once(self._models, prepared)

    def after(self, step: int) -> bool:
        """Return true if the probe is due after `step`. After the last step, it always is."""
        return step % self.given.every_steps == 0 or step == self._run.training.num_steps

    def score(self, params: Any, at: Moment, alive: Callable[[str], None]) -> list[Scores]:
        """Fine-tune the encoder and score it on dev. If a logit is not finite, the score is NaN."""
        setup, plan, step = self._of_stages[at.stage]
        known = to_start_from(self._current(self._models[at.stage], params))
        model, head = setup.objective.model, setup.objective.config
        if isinstance(head, EmbeddingConfig):
            start = fitted(starting_vectors(head, known), setup.objective, setup.task)
        else:
            start = starting_params(model, head, known.params)
        setup = dataclasses.replace(setup, start=Start(inits={"the run": start}))
        now = FinetuneSaves(self._config, setup, plan.mesh, self._work).begin(0, plan.stages[0])
        for batch in islice(plan.batches.stream(0), self.given.num_steps):
            now.state, _ = step(now.state, batch, *plan.stages[0].settings)
            alive(f"a step of probe {self.name}")
        (scores,) = plan.scorers[0].score(now.state.params, now, alive)
        metric = setup.task.metric
        name = f"{PROBE.removeprefix('eval/')}{self.name}/{metric}"
        return [Scores({name: scores.values.get(metric, math.nan)})]


def _recipe(name: str, where: str) -> FinetuneConfig:
    """Read a recipe from a file or from the work directory of a fine-tuning run."""
    if Path(name).is_dir():
        record = read_record(Path(name), "finetune")
        config = build(FinetuneConfig, record["config"], where=f"{name}/config.json")
        # Few rows make a sweep of rates in fine-tuning, but a probe has one rate.
        sweep = dataclasses.replace(config.sweep, learning_rates=())
        config = dataclasses.replace(config, sweep=sweep)
    else:
        config = load_config(FinetuneConfig, name)
    empty = FinetuneConfig(config.task)
    names = "sweep", "distil", "reinitialise"
    wrong = [name for name in names if getattr(config, name) != getattr(empty, name)]
    if wrong or config.task.folds:
        raise UserError(
            f"{where}, which sets {' and '.join(wrong or ['task.folds'])}; a probe is a single run "
            "from the current encoder. Leave these fields out of the recipe"
        )
    return dataclasses.replace(config, task=config.task.located())
