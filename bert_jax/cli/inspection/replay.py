"""A training batch as text: the model's input, and the tokens or labels that it had to predict."""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.artefacts.saved.runs import read_record
from bert_jax.config.mapping import build
from bert_jax.data.pairs import LABELS
from bert_jax.data.pipeline import ExampleStream
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir, open_workdir
from bert_jax.objectives.objective import Shown
from bert_jax.tasks.rows import NO_LABEL, Batch
from bert_jax.tasks.task import HeadKind, LabelSpec
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.saves import check_finetune_workdir
from bert_jax.training.finetune.setup import set_up
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, open_corpus, phase_stores, recorded_corpus
from bert_jax.training.pretrain.saves import read_config
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.workdir import refuse_other_run

_WIDTH = 98
LEGEND = (
    "{word} is masked, {word>other} replaced by a random token, {word=} kept; all are predicted."
)
TARGET_LEGEND = "A target (>) follows its source; its tokens after [CLS] and its end are predicted."


def replay_batch(
    workdir: Path | str, step: int, *, corpus: str | None = None, max_rows: int | None = None
) -> str:
    """Decode batch `step` of a pretraining run, with the masks that the batch had in training.

    `corpus` is the present location of the phase's corpus; None means the configured location.
    Raise a UserError if there is no run, the run lacks the step, or the corpus is not the run's.
    """
    config, phase, stores, stream = open_batches(open_workdir(workdir), step, corpus)
    batch = stream.batch(step)
    stream.wait_for_checks()
    objective = step_config(config, stores, phase).objective
    shown = objective.shown(objective.prepare(jax.tree.map(jnp.asarray, batch), config.seed))
    assert stores.train.path is not None  # `open_corpus` sets it
    tokenizer = load_tokenizer(stores.train.path / "tokenizer")
    return describe_batch(
        batch, shown, tokenizer, pairing=config.data.pairing, max_rows=max_rows,
        first_row=stream.first_row(step),
    )  # fmt: skip


def open_batches(
    work: WorkDir, step: int, corpus: str | None = None
) -> tuple[PretrainConfig, int, Corpus, ExampleStream]:
    """Return configuration, phase of `step`, corpus and batches; for errors see `replay_batch`."""
    config = read_config(work.local)
    if not 0 <= step < config.training.num_steps:
        raise UserError(
            f"--step is {step}; the run has batches 0 to {config.training.num_steps - 1}"
        )
    phase = config.training.phase_of(step)
    own = corpus or config.training.phases[phase].corpus
    stores = open_corpus(own or config.data.corpus, config.data)
    store, record = stores.train, read_record(work.local, "pretrain")
    texts = {} if own else phase_stores(config, store, only=phase)
    fingerprint = texts.get(phase, store).fingerprint
    there = {"the training corpus": (recorded_corpus(record, phase), fingerprint)}
    refuse_other_run(work, config, config, (), there)
    config = config.with_vocabulary(store.vocab_size)
    stream = ExampleStream(store, config.data, config.phases, config.seed, texts)
    return config, phase, stores, stream


def replay_task(workdir: Path | str, step: int, *, max_rows: int | None = None) -> str:
    """Decode batch `step` of a fine-tuning run, once for each seed.

    Trials that train together are a wave. `step` counts from 0 through all waves, and the seeds are
    the seeds of the step's wave. `max_rows` limits the rows of each seed. Raise a UserError if
    there is no run, the step is outside the run, or data or models have changed.
    """
    work = open_workdir(workdir)
    record = read_record(work.local, "finetune")
    config = build(FinetuneConfig, record["config"], where=f"{work.local / 'config.json'}")
    setup = set_up(config)
    check_finetune_workdir(work, config, setup.fingerprints)
    num_steps = setup.step.num_steps
    last = setup.schedule.total_steps - 1
    if not 0 <= step <= last:
        raise UserError(f"--step is {step}; the run has batches 0 to {last}")
    number, at = divmod(step, num_steps)
    trials: dict[int, list[int]] = {}  # trials of one seed have the same rows
    for trial, member in enumerate(setup.schedule.waves[number]):
        trials.setdefault(member.seed, []).append(trial)
    batch, task = next(setup.rows_of(number, at)), setup.task
    blocks = []
    for seed, equal in trials.items():
        rates = dict.fromkeys(f"{setup.schedule.waves[number][n].learning_rate:g}" for n in equal)
        trial = equal[0]
        kept = int((batch["weights"][trial] > 0).sum())  # rows without weight only fill the batch
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


def describe_batch(
    batch: Mapping[str, np.ndarray],
    shown: Shown | None,
    tokenizer: Tokenizer,
    *,
    pairing: str = "none",
    max_rows: int | None = None,
    first_row: int = 0,
    labels: Sequence[str] = (),
) -> str:
    """Decode a batch row by row, with masks marked, in lines of at most 98 characters.

    A new line starts at each sentence of a pair (A, B), each packed segment, and each target.
    Tokens that the tokenizer marks as parts of one word are joined.

    `batch` comes from `ExampleStream.batch`. `shown` has the model's input and the predicted
    positions; if it is None, the rows are decoded as they are before masking. `first_row` is the
    index of the batch's first row in the run's stream. `labels` has a label for each row, or none.
    """
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    inputs, predicted = arrays["tokens"], np.zeros(arrays["tokens"].shape, bool)
    if shown is not None:
        inputs, predicted = np.asarray(shown.tokens), np.asarray(shown.predicted)
    num_rows, length = arrays["tokens"].shape
    count = num_rows if max_rows is None else min(max_rows, num_rows)
    real = int((arrays["segment_ids"] != 0).sum())
    padding, to_predict, legend = num_rows * length - real, int(predicted.sum()), LEGEND
    shape = f"{length}"
    if "target_tokens" in arrays:
        targets = arrays["target_segment_ids"]
        to_predict, legend = int((targets != 0).sum()), TARGET_LEGEND
        shape += f" + {targets.shape[1]}"
        real, padding = real + to_predict, padding + targets.size - to_predict
    lines = [f"{num_rows} rows of {shape}: {real} tokens, {padding} padding"]
    if shown is not None:
        lines = [f"{lines[0]}, {to_predict} to predict.", legend]
    for row in range(count):
        one = {name: array[row] for name, array in arrays.items()}
        described = _describe_row(
            one, inputs[row], predicted[row], tokenizer, pairing, is_shown=shown is not None
        )
        if labels:
            described[0] = ", ".join(filter(None, (f"row {row}", described[0], labels[row])))
        else:
            described[0] = f"row {row}, stream {first_row + row}, {described[0]}"
        lines += ["", *described]
    if count < num_rows:
        lines += ["", f"({num_rows - count} more rows)"]
    return "\n".join(lines)


def _describe_row(
    row: Mapping[str, np.ndarray],
    inputs: np.ndarray,
    predicted: np.ndarray,
    tokenizer: Tokenizer,
    pairing: str,
    *,
    is_shown: bool,
) -> list[str]:
    """Return the lines of a row: a title, and a paragraph for each sentence, segment or target."""
    types, segments = row["type_ids"], row["segment_ids"]
    targets = row.get("target_segment_ids", np.zeros(0, segments.dtype))
    num_targets = int((targets != 0).sum())
    title = [f"{int((segments != 0).sum()) + num_targets} tokens"]
    label = LABELS.get(pairing, {}).get(int(row.get("pair_labels", -1)))
    num_segments = int(segments.max(initial=0))
    if label:
        title.append(label)
    if num_segments > 1:
        title.append(f"{num_segments} segments")
    if is_shown:
        title.append(f"{int(predicted.sum()) + num_targets} to predict")

    places = np.flatnonzero(segments)
    is_pair = bool(types.any())
    names = ["AB"[min(int(types[p]), 1)] if is_pair else str(int(segments[p])) for p in places]
    marked = _texts(names, row["tokens"][places], inputs[places], predicted[places], tokenizer)
    answers: dict[str, str] = {}
    if num_targets:
        places = np.flatnonzero(targets)
        names, written = [str(int(targets[p])) for p in places], row["target_tokens"][places]
        answers = _texts(names, written, written, np.zeros(places.size, bool), tokenizer)
    lines = [", ".join(title)]
    for name, text in marked.items():
        lines += _wrapped(name, text)
        lines += _wrapped(">", answers[name]) if name in answers else []
    return lines


def _wrapped(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{name:>4}  ", subsequent_indent=" " * 6,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _texts(
    names: Sequence[str],
    tokens: np.ndarray,
    inputs: np.ndarray,
    predicted: np.ndarray,
    tokenizer: Tokenizer,
) -> dict[str, str]:
    """Join all tokens that have the same name in `names` to one text, with masks marked."""
    specials = dataclasses.astuple(tokenizer.special_ids)
    after_special = True
    parts: dict[str, str] = {}
    lists = (each.tolist() for each in (tokens, inputs, predicted))
    for name, token, given, is_predicted in zip(names, *lists, strict=True):
        glued = bool(tokenizer.continues_word[token]) and not after_special
        after_special = token in specials
        text = _marked(tokenizer, token, given, is_predicted, glued)
        parts[name] = parts.get(name, "") + ("" if glued or name not in parts else " ") + text
    return parts


def _marked(tokenizer: Tokenizer, original: int, given: int, predicted: bool, glued: bool) -> str:
    text = _plain(tokenizer, original, glued)
    if not predicted:
        return text
    if given == tokenizer.special_ids.mask:
        return f"{{{text}}}"
    if given == original:
        return f"{{{text}=}}"
    return f"{{{text}>{_plain(tokenizer, given, glued)}}}"


def _plain(tokenizer: Tokenizer, token: int, glued: bool) -> str:
    """Return a token's text without the mark for a word start or a continuation.

    A mark without other text stays. The mark ## is removed only if `glued` (joined to a word).
    """
    text = tokenizer.id_to_token(token)
    if tokenizer.kind != "wordpiece":
        return text.removeprefix("▁").removeprefix("Ġ") or text
    return (text.removeprefix("##") if glued else text) or text


def label_texts(
    objective: HeadKind, spec: LabelSpec, tokenizer: Tokenizer, batch: Batch
) -> list[str]:
    """Format the label of each row for people. If the rows have no labels, all texts are empty.

    `batch` has the rows of one trial, without padding rows: labels (B, ...), tokens (B, L).
    """
    count = len(batch["tokens"])
    if (labels := batch.get("labels")) is None:
        return [""] * count
    names = np.array(spec.labels)

    def arcs(row: np.ndarray) -> list[str]:
        return [f"{arc // len(names)}:{names[arc % len(names)]}" for arc in row[row != NO_LABEL]]

    say: dict[str, Callable[..., str]] = {
        "single_label": lambda label, _: f"label {names[label]}",
        "multi_label": lambda chosen, _: f"labels {' '.join(names[chosen > 0]) or 'none'}",
        "regression": lambda score, _: f"score {score * spec.deviation + spec.mean:g}",
        "span": lambda span, tokens: f"answer {_answer(tokenizer, tokens, *span.tolist())}",
        "tags": lambda row, _: f"tags {' '.join(names[row[row != NO_LABEL]])}",
        "arcs": lambda row, _: f"heads {' '.join(arcs(row))}",
    }
    one = say.get(objective, lambda given, _: f"label {' '.join(f'{n:g}' for n in given.ravel())}")
    return list(map(one, labels, batch["tokens"]))


def _answer(tokenizer: Tokenizer, tokens: np.ndarray, first: int, last: int) -> str:
    if last <= 0:
        return "none"
    return " ".join(map(tokenizer.id_to_token, tokens[first : last + 1].tolist()))
