"""A batch of a fine-tuning run as text: the rows of each seed, and their labels."""

from pathlib import Path

import numpy as np

from bert_jax.artefacts.saved.runs import read_record
from bert_jax.cli.inspection.replay import describe_batch
from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.tasks.rows import NO_LABEL, Batch
from bert_jax.tasks.task import HeadKind, LabelSpec
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.saves import check_finetune_workdir
from bert_jax.training.finetune.setup import set_up


def replay_task(workdir: Path | str, step: int, *, max_rows: int | None = None) -> str:
    """Decode batch `step` of a fine-tuning run, once for each seed of its wave.

    Args:
        workdir: Work directory of a `bert-jax finetune` run.
        step: Number of the batch, from 0, counted through all waves.
        max_rows: Largest number of rows of a seed; None: all.

    Raises:
        UserError: No run there, a step outside the run, or data or models that have changed.
    """
    work = open_workdir(workdir)
    record = read_record(work.local, "finetune")
    config = build(FinetuneConfig, record["config"], where=f"{work.local / 'config.json'}")
    setup = set_up(config)
    check_finetune_workdir(work, config, setup.fingerprints)
    num_steps = setup.step.num_steps
    last = len(setup.waves) * num_steps - 1
    if not 0 <= step <= last:
        raise UserError(f"--step is {step}; the run has batches 0 to {last}")
    number, at = divmod(step, num_steps)
    trials: dict[int, list[int]] = {}  # trials of one seed have the same rows
    for trial, member in enumerate(setup.waves[number]):
        trials.setdefault(member.seed, []).append(trial)
    batch, task = next(setup.rows_of(number, at)), setup.task
    blocks = []
    for seed, equal in trials.items():
        rates = dict.fromkeys(f"{setup.waves[number][n].learning_rate:g}" for n in equal)
        trial = equal[0]
        kept = int((batch["weights"][trial] > 0).sum())  # the rest only fills the batch
        own = {name: array[trial, :kept] for name, array in batch.items()}
        labels = label_texts(task.objective, task.spec, task.tokenizer, own)
        group = own["tokens"].shape[1] if own["tokens"].ndim == 3 else 1
        rows = {
            name: own[name].reshape(-1, own[name].shape[-1])
            for name in ("tokens", "type_ids", "segment_ids")
        }
        labels = [label if n == 0 else "" for label in labels for n in range(group)]
        head = f"batch {at} of wave {number}, seed {seed}, learning rate {', '.join(rates)}"
        text = describe_batch(rows, None, task.tokenizer, labels=labels, max_rows=max_rows)
        blocks.append(f"{head}\n{text}")
    return "\n\n".join(blocks)


def label_texts(
    objective: HeadKind, spec: LabelSpec, tokenizer: Tokenizer, batch: Batch
) -> list[str]:
    """Write the label of each row for people; empty where the rows have none.

    Args:
        objective: Kind of prediction.
        spec: Names of the labels, and scale of the scores.
        tokenizer: Tokenizer of the rows.
        batch: Rows of one trial, without padding rows: labels (B, ...), tokens (B, L).
    """
    count = len(batch["tokens"])
    if (labels := batch.get("labels")) is None:
        return [""] * count
    names = np.array(spec.labels)
    if objective == "single_label":
        return [f"label {names[label]}" for label in labels]
    if objective == "multi_label":
        return [f"labels {' '.join(names[label > 0]) or 'none'}" for label in labels]
    if objective == "regression":
        return [f"score {label * spec.deviation + spec.mean:g}" for label in labels]
    if objective == "span":
        texts = zip(batch["tokens"], labels.tolist(), strict=True)
        return [f"answer {_answer(tokenizer, tokens, *span)}" for tokens, span in texts]
    if objective == "tags":
        return [f"tags {' '.join(names[row[row != NO_LABEL]])}" for row in labels]
    if objective == "arcs":
        arcs = ([divmod(arc, len(names)) for arc in row[row != NO_LABEL]] for row in labels)
        return [
            f"heads {' '.join([f'{head}:{names[relation]}' for head, relation in row])}"
            for row in arcs
        ]
    return [f"label {label:g}" for label in labels]


def _answer(tokenizer: Tokenizer, tokens: np.ndarray, first: int, last: int) -> str:
    if last <= 0:
        return "none"
    found = [tokenizer.id_to_token(token) for token in tokens[first : last + 1].tolist()]
    return " ".join(found)
