"""Everything that a pretraining run decides before its first step, as one immutable value."""

from collections.abc import Callable
from itertools import accumulate, pairwise

from bert_jax.artefacts.saved.model import SavedModel, digest_of
from bert_jax.data.pipeline import ExampleStream
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.distributed.parallel.sharding import make_mesh, num_batch_shards
from bert_jax.files.remote import WorkDir
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import (
    Corpus,
    MixedCorpora,
    evaluation_config,
    phase_stores,
    step_config,
)
from bert_jax.training.pretrain.evaluate import HeldOut
from bert_jax.training.pretrain.pretraining import (
    HeldOutScorer,
    PretrainSaves,
    PretrainVoice,
    TextBatches,
    directory_of,
)
from bert_jax.training.pretrain.probes import Probe
from bert_jax.training.pretrain.start.branch import open_branch
from bert_jax.training.pretrain.start.initial_model import resolve_init
from bert_jax.training.pretrain.start.stages import begun, check_stages, with_batch_unit
from bert_jax.training.pretrain.start.teacher import (
    resolve_teacher,
    starts_from_teacher,
    student_start,
)
from bert_jax.training.pretrain.workdir import check_workdir
from bert_jax.training.run_plan import Policy, RunPlan, Scorer, Stage
from bert_jax.training.sweep.statistics import Trial


def resolve_pretraining(
    config: PretrainConfig,
    work: WorkDir,
    corpus: Corpus,
    initial: Callable[[], SavedModel] | None = None,
    branch_from: str = "",
) -> RunPlan:
    """Read everything that the configuration names, and refuse everything that does not fit."""
    store = corpus.train
    branch = open_branch(branch_from, work)
    config, start = resolve_init(
        config, work, initial, store.tokenizer_fingerprint, branch.config if branch else None
    )
    config, teacher = resolve_teacher(config, store.tokenizer_fingerprint)
    mesh = make_mesh(config.mesh)
    unit, step = by_first(lambda: begun(work, branch))
    shards = num_batch_shards(mesh)
    config = with_batch_unit(config, shards, unit)
    config = config.with_vocabulary(store.vocab_size)
    training, numbers = config.training, range(len(config.phases))
    texts = phase_stores(config, store)
    digest = digest_of(teacher.params) if teacher else ""
    check_workdir(work, config, store, texts, digest)
    check_stages(config, shards, step)
    steps = [step_config(config, corpus, number) for number in numbers]
    trial = Trial(config.init, config.optimizer.learning_rate, config.seed)
    saves = PretrainSaves(
        config, work, corpus, texts, mesh, steps[0], start, teacher, digest, branch, trial
    )
    if branch is not None:
        branch.check(config, store, texts, saves.saved)
    if teacher and start is None and starts_from_teacher(config, work):
        saves.initial = start = student_start(config, teacher)
    mixed = MixedCorpora(config)
    examples = ExampleStream(
        store, config.data, config.phases, config.seed, mixed.named(texts, config)
    )
    for number in numbers:
        examples.plan(number)
    every, marks = training.eval_every_steps, {*training.phase_starts, training.num_steps}
    scorers: list[Scorer] = []
    if corpus.heldout is not None:
        evaluations = [evaluation_config(config, corpus, number) for number in numbers]
        held_out = HeldOut(config, corpus.heldout, evaluations, mesh, mixed.heldout())
        scorers.append(
            HeldOutScorer(held_out, lambda step: bool(every and step % every == 0) or step in marks)
        )
    files = store.path and store.path / "tokenizer"
    scorers += [
        Probe(config, number, files, saves.abstract.params, work)
        for number in range(len(training.probes))
    ]
    ends = list(accumulate((phase.num_steps for phase in config.phases), initial=0))
    return RunPlan(
        name=directory_of(work),
        mesh=mesh,
        stages=tuple(
            Stage(range(*bounds), step, (trial,))
            for bounds, step in zip(pairwise(ends), steps, strict=True)
        ),
        batches=TextBatches(examples, mesh),
        scorers=tuple(scorers),
        saves=saves,
        voice=PretrainVoice(config, work, corpus, examples, mixed, saves),
        policy=Policy(
            log_every=training.log_every_steps,
            scores_start=start is not None and bool(scorers),
            save_every=config.checkpoint.save_every_steps,
            saves_end=True,
            stops_diverged=config.guard.on_divergence == "stop",
        ),
    )
