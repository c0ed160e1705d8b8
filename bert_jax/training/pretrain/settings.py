"""Settings of the steps of a pretraining run, computed from the run's configuration.

The commands plan, status and evaluate need these settings without a run. A corpus, if given,
provides special tokens, word boundaries and the baseline of the loss.
"""

import math
from dataclasses import replace

import numpy as np

from bert_jax.data.phases import scaling, stages_from
from bert_jax.data.store import TokenStore
from bert_jax.distributed.parallel.sharding import check_batch_size
from bert_jax.errors import UserError
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.model.seq2seq.network import Network
from bert_jax.objectives.config import Given, NetworkConfig
from bert_jax.objectives.objective import Objective
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.loss_monitor import LossMonitor
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.steps.state import StepConfig


def with_architecture(
    config: PretrainConfig, model: ModelConfig, network: Network | None = None
) -> PretrainConfig:
    """Return the configuration with the architecture of `model` and `forces_end` of `network`.

    Vocabulary size, dropout rates and settings such as `remat` stay as configured.
    """
    fields, objective = {name: getattr(model, name) for name in ARCHITECTURE}, config.objective
    if isinstance(objective, NetworkConfig) and network is not None and network.forces_end:
        objective = replace(objective, forces_end=True)
    config = replace(config, model=replace(config.model, **fields), objective=objective)
    config.check_architecture()
    return config


def step_config(
    config: PretrainConfig, corpus: Corpus | None, phase: int = 0, *, evaluates: bool = False
) -> StepConfig:
    """Return the settings of a phase's train step or, if `evaluates`, of its evaluation step.

    An evaluation step masks at `masking.eval_rate`; the objective has no parts that only training
    needs, such as a teacher. `config` must have a vocabulary size. Without a corpus, special tokens
    are placeholders and there is no baseline. Raise a UserError if whole words are to be masked in
    a corpus in memory, without a tokenizer.
    """
    masking = config.masking_of(phase)
    if evaluates:
        masking = replace(masking, rate=masking.eval_rate, max_predictions=None)
    special_ids, baseline = SpecialIds(*range(5)), None
    continues_word = np.zeros(config.model.vocab_size, bool) if config.masking.whole_word else None
    if corpus is not None:
        store = corpus.train
        special_ids, baseline = store.special_ids, config.objective.baseline(store)
        if config.masking.whole_word:
            if store.path is None:
                raise UserError("masking.whole_word needs a corpus on disk, with a tokenizer")
            continues_word = load_tokenizer(store.path / "tokenizer").continues_word
    model, pairs, training = config.model_of(phase), config.has_pairs, config.training
    given = Given(model, masking, pairs, special_ids, continues_word, baseline)
    if evaluates:
        objective = config.objective.make(given).for_evaluation()
    else:
        objective = config.distil.taught(config.objective, given)
    return StepConfig(
        objective=objective, optimizer=config.optimizer, num_steps=training.num_steps,
        accumulation=config.accumulation_of(phase), gather=training.gather,
        reduce_dtype=training.reduce_dtype, seed=config.seed, guard=config.guard,
        phase_starts=training.phase_starts, rate=None if evaluates else config.phase_rate(phase),
    )  # fmt: skip


def objective_of(config: PretrainConfig, phase: int = 0) -> Objective:
    """Make the objective of a phase, without reading a corpus, to find shapes of parameters."""
    return step_config(config, None, phase).objective


def loss_monitor(
    config: PretrainConfig, objective: Objective, store: TokenStore | None = None
) -> LossMonitor:
    """Make the loss monitor of a run. Without a store, the rate of unknown tokens is 0."""
    unknown = 0 if store is None else int(store.unigram_counts[store.special_ids.unk])
    texts = [
        config.mixture_of(number) or phase.corpus or config.data.corpus
        for number, phase in enumerate(config.training.phases)
    ]
    first = texts[0] if config.mixture_of(0) else config.data.corpus
    same = next((n for n, text in enumerate(texts) if text != first), len(texts))
    known = math.inf if objective.baseline is None else objective.baseline
    return LossMonitor(
        metric=objective.metrics[0],
        baselines=tuple(known if number < same else math.inf for number in range(len(texts))),
        unknown_rate=unknown / max(1, store.num_tokens) if store else 0.0,
        phases=config.phases, warmup_steps=config.warmup_steps,
        peak_rates=tuple(config.peak_rate(number) for number in range(len(config.phases))),
        num_layers=config.model.num_layers, save_every=config.checkpoint.save_every_steps,
    )  # fmt: skip


def mixed_corpora(config: PretrainConfig) -> tuple[str, ...]:
    """List the corpora of all phases, in order; return () if no phase has a mixture."""
    phases = enumerate(config.training.phases)
    parts = [(config.mixture_of(number), phase.corpus) for number, phase in phases]
    if not any(mixture for mixture, _ in parts):
        return ()
    names = (
        name
        for mixture, own in parts
        for name in [part.corpus for part in mixture] or [own or config.data.corpus]
    )
    return tuple(dict.fromkeys(names))


def with_batch_unit(config: PretrainConfig, shards: int, kept: int = 0) -> PretrainConfig:
    """Return the configuration with a batch unit that divides batch warm-ups evenly over `shards`.

    `kept`, the unit of a run that has begun (else 0), stays if the configured unit divides `kept`.
    """
    unit = config.training.batch_unit
    if kept:
        unit = unit if kept % unit else kept
    else:
        warming = [n for n, phase in enumerate(config.phases) if phase.batch_warmup_steps]
        needed = {n: shards * config.accumulation_of(n) for n in warming}
        if any(rows % needed.get(n, 1) for n, rows in stages_from(config.phases, 0)):
            unit = math.lcm(unit, *needed.values())
    return replace(config, training=replace(config.training, batch_unit=unit))


def check_stages(config: PretrainConfig, shards: int, step: int = 0) -> None:
    """Raise a UserError unless all micro-batches after step `step` divide evenly over `shards`."""
    for number, rows in stages_from(config.phases, step):
        where, whole = f"training.phases[{number}].batch_size", config.phases[number].batch_size
        where += "" if rows == whole else f" {whole} in the batch warm-up"
        check_batch_size(rows, shards, config.accumulation_of(number), where)


def warmup_lines(config: PretrainConfig) -> list[str]:
    """Describe warm-ups that are long, were shortened, or were rounded to `training.batch_unit`."""
    unit, given = config.training.batch_unit, config.training.phases
    steps, optimizer = config.training.num_steps, config.optimizer
    lines = scaling("optimizer.warmup_steps", optimizer.warmup_steps or 0, steps)
    if (warmup := config.warmup_steps) > math.ceil(steps / 4):  # published recipes: up to 25%
        lines.append(
            f"Warning: the learning rate rises for {warmup:,} of {steps:,} steps, but 10% suits "
            "most runs. Lower optimizer.warmup_steps or optimizer.warmup_rate"
        )
    for number, phase in enumerate(config.phases):
        name = f"training.phases[{number}].batch_warmup_steps"
        lines += scaling(name, given[number].batch_warmup_steps, phase.num_steps)
        rows, wanted = (
            ", ".join(f"{rows:,}" for _, rows in each.stages[:-1])
            for each in (phase, replace(phase, unit=1))
        )
        if rows != wanted:
            said = f"steps of {rows} rows instead of {wanted}, as multiples of training.batch_unit"
            lines.append(f"batch warm-up of phase {number}: {said} {unit}")
    return lines
