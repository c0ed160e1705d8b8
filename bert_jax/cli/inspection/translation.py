"""Evaluation of a translation run on a file of sources and a file of reference translations."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.artefacts.exchange.proof import batch_of
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.data.corpus.pairs import open_pairs
from bert_jax.data.pair_packing import some_pairs
from bert_jax.errors import UserError
from bert_jax.infer.forward import on_device
from bert_jax.infer.predictor import shape_for
from bert_jax.infer.translate import Translator
from bert_jax.model.seq2seq.network import Tree
from bert_jax.model.seq2seq.search import SearchConfig
from bert_jax.objectives.objective import Batch, Scalars
from bert_jax.objectives.translation import Translation
from bert_jax.tasks.reports.intervals import intervals
from bert_jax.tasks.translation import best_constant, by_length, decoded, quality
from bert_jax.terminal import progress_bar
from bert_jax.tokenization.tokenizer import make_row, num_special
from bert_jax.training.finetune.evaluate import Scored, check_runs, differences
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.start import check_tokenizer

LEAST_GAP = 0.1
"""Loss increase with wrong sources, in nats per token, below which a decoder ignores sources."""
_CAPTIONS = 10_000
_SEED = 20140901


def evaluate_pairs(
    workdir: str | Path,
    source_file: str,
    target_file: str,
    *,
    settings: SearchConfig,
    corpus: str | None = None,
    versus: Sequence[str | Path] = (),
    other_seeds: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """Translate a file of source sentences, and score the translations against reference sentences.

    Both files have one sentence per line. The best constant translation, one text for all sources,
    is a target of `corpus` (None: the run's corpus). `versus` are the runs of another model: one
    for `workdir` and one for each of `other_seeds`, in this order. Raise a UserError if a model
    does not translate; the runs cannot be paired; the corpus has no pairs; a file cannot be read,
    has no lines or has an empty line; or the files have different numbers of lines.

    Returns:
        `bleu` and `chrf` with intervals and signatures; `exact`, the share of translations that
            equal their reference; `floors`, the BLEU of copied sources and of the best constant
            translation; `ceiling`, the BLEU of references that the tokenizer encodes and decodes;
            `loss` and `loss_swapped` (see `losses`); scores `by_length` of the source; counts; and,
            given `versus`, `differences` from its scores (see `finetune.evaluate.differences`).
    """
    check_runs([workdir, *other_seeds], versus)
    sources, references = read_pairs(source_file, target_file)
    copied = quality(sources, references).values["bleu"]  # fails early if sacreBLEU is missing
    saved, hypotheses, num_cut = _translated(workdir, sources, settings)
    ids = saved.tokenizer.target.encode_batch(references)
    found: dict[str, Any] = {"step": saved.origin.step, "pairs": len(sources)}
    ours = quality(hypotheses, references)
    ends = intervals(ours.grounds).found
    for name, signature in ours.signatures.items():
        found[name], found[f"{name}_interval"] = ours.values[name], ends.get(name)
        found[f"{name}_signature"] = signature
    if versus:
        more, theirs = (
            [quality(_translated(run, sources, settings)[1], references) for run in runs]
            for runs in (other_seeds, versus)
        )
        # The number of exact translations says nothing about differences in BLEU.
        mine, other = (
            [Scored(each.values, each.grounds._replace(right=None)) for each in side]
            for side in ([ours, *more], theirs)
        )
        found["differences"] = differences(mine, other, "seeds" if more else "sentences")
    found["exact"] = float(np.mean([a == b for a, b in zip(hypotheses, references, strict=True)]))
    captions = _training_targets(saved, corpus, f"{workdir}")
    text, constant = best_constant(references, captions) if captions else (None, None)
    found["floors"] = {"copy": copied, "constant": constant, "constant_text": text}
    spelled = [decoded(saved.tokenizer, each) for each in ids]
    found["ceiling"] = quality(spelled, references).values["bleu"]
    found["loss"], found["loss_swapped"] = losses(saved, sources, ids)
    return found | {"cut": num_cut, "by_length": by_length(sources, hypotheses, references)}


def _translated(
    workdir: str | Path, sources: Sequence[str], settings: SearchConfig
) -> tuple[SavedModel, list[str], int]:
    """Read a model, and translate; return the model, the translations, and how many are cut."""
    saved = on_device(read_model(workdir))
    saved.require("translate", "decoder")
    translator = Translator(saved, search=settings)
    with progress_bar(of="translation", unit="lines", total=len(sources)) as bar:
        found = translator.translated(sources, bar.update)
    return saved, found, translator.num_cut


def translation_lines(found: dict[str, Any]) -> list[str]:
    """Format the result of `evaluate_pairs` as readable lines."""
    lines = [f"{found['pairs']:,} pairs, step {found['step']:,}"]
    for name, title in (("bleu", "BLEU"), ("chrf", "chrF")):
        signature = found[f"{name}_signature"]
        ends = found[f"{name}_interval"]
        said = "95%: {:.1f} to {:.1f}".format(*ends) if ends else "no interval: few pairs or errors"
        lines.append(f"{title:13} {found[name]:.1f}  ({said})  {signature}")
    lines.append(f"{'exact':13} {100 * found['exact']:.1f}% of translations equal the reference")
    floors = found["floors"]
    copied = f"{floors['copy']:.1f} for copies of the sources"
    if floors["constant"] is None:
        fixed = "no constant translation is known: no corpus with this tokenizer (give --corpus)"
    else:
        fixed = f"{floors['constant']:.1f} for one constant text: {floors['constant_text']!r}"
    lines.append(f"{'floors':13} {copied}; {fixed}")
    known = f"{found['ceiling']:.1f} for references encoded and decoded by the tokenizer"
    lines.append(f"{'ceiling':13} {known}")
    if not found["ceiling"]:
        lines.append(
            "Note: BLEU needs texts of at least four words, but no reference has four; look at "
            "exact and chrF instead"
        )
    loss, swapped = found["loss"], found["loss_swapped"]
    lines.append(f"{'loss':13} {loss:.3f} nats per target token")
    if swapped is not None:
        gap = swapped - loss
        lines.append(
            f"{'swapped':13} {swapped:.3f} with the sources of other pairs: {gap:z.3f} more"
        )
        if gap < LEAST_GAP:
            lines.append(
                f"Warning: wrong sources raise the loss by {gap:z.3f} nats per token, less than "
                f"{LEAST_GAP}. The decoder ignores its source"
            )
    if found["cut"]:
        lines.append(f"{'cut':13} {found['cut']:,} translations at the limit (--max-length-rate)")
    lines += ["", f"{'source words':13} {'pairs':>7} {'BLEU':>6} {'chrF':>6}"]
    for row in found["by_length"]:
        lines.append(f"{row['words']:13} {row['pairs']:7,} {row['bleu']:6.1f} {row['chrf']:6.1f}")
    return lines


def read_pairs(source_file: str, target_file: str) -> tuple[list[str], list[str]]:
    """Read two files with one sentence per line, as `open_pairs` does.

    Raise a UserError if a file is unreadable or empty or has empty lines, or line counts differ.
    """
    sources, targets = list[str](), list[str]()
    for number, source, target in open_pairs([source_file, target_file]).pairs():
        for file, side, line in ((source_file, sources, source), (target_file, targets, target)):
            if not line:
                raise UserError(f"{file}, line {number} is empty; remove it from both files")
            side.append(line)
    if not sources:
        raise UserError(f"{source_file} has no lines")
    return sources, targets


def losses(
    saved: SavedModel, sources: Sequence[str], targets: Sequence[np.ndarray]
) -> tuple[float, float | None]:
    """Compute the mean loss of target tokens in nats, with end tokens and without label smoothing.

    `saved` must be on a device. `targets` are token ids without special tokens. Sources and targets
    are cut to the length that the model takes; a target that is cut has no end token.

    Return the loss, and the loss if each target gets the source of another pair (None if there is
    only one pair). The two losses are equal if the decoder ignores its source.
    """
    tokenizer, limit = saved.tokenizer, saved.max_length
    room, begin = limit - num_special(tokenizer, pair=False), tokenizer.special_ids.cls
    rows = [make_row(tokenizer, ids[:room]).ids.tolist() for ids in tokenizer.encode_batch(sources)]
    # The longest inputs have one place more than the model takes: the last id is only a label.
    inputs = [[begin, *ids[:limit].tolist()] for ids in targets]
    own = _mean_loss(saved, rows, inputs)
    if len(rows) == 1:
        return own, None
    circle = np.random.default_rng(_SEED).permutation(len(rows))  # every source moves one place
    moved = {int(to): rows[at] for at, to in zip(circle, np.roll(circle, 1), strict=True)}
    return own, _mean_loss(saved, [moved[n] for n in range(len(rows))], inputs)


def _mean_loss(
    saved: SavedModel, sources: Sequence[list[int]], inputs: Sequence[list[int]]
) -> float:
    assert saved.network is not None
    objective = Translation(saved.network.model, saved.network, saved.tokenizer.special_ids)
    longest = [max(map(len, pair)) for pair in zip(sources, inputs, strict=True)]
    order = np.argsort(longest, kind="stable")[::-1]
    sums: dict[str, float] = defaultdict(float)
    at = 0
    while at < len(order):
        size, length = shape_for(longest[order[at]], len(order) - at, saved.max_length)
        index = order[at : at + size]
        source, target = (
            batch_of(saved, [*(side[n] for n in index), *[[]] * (size - len(index))], places)
            for side, places in ((sources, length), (inputs, length + 1))
        )
        rows = {**source._asdict(), "target_tokens": target.tokens}
        rows["target_segment_ids"] = target.segment_ids
        for name, each in _sums(objective, saved.params, rows).items():
            sums[name] += float(each)
        at += size
    return objective.metrics[0].of(sums)


@partial(jax.jit, static_argnums=0)
def _sums(objective: Translation, params: Tree, rows: Batch) -> Scalars:
    """Return the sums of metrics; `rows` has one place more for targets than for sources."""
    length = rows["tokens"].shape[1]
    prepared = objective.prepare(rows, 0)  # before the cut: the last kept place has a label
    inputs = {name: array[:, :length] for name, array in prepared.items()}
    return objective.forward(params, inputs, None, None).sums


def _training_targets(saved: SavedModel, corpus: str | None, directory: str) -> list[str]:
    """Return some targets of `corpus`, by default of the corpus on which the run was trained.

    Return [] if the corpus of the run is missing or has another tokenizer. If `corpus` is missing
    or has another tokenizer, raise a UserError.
    """
    name = corpus or saved.origin.config.get("data", {}).get("corpus", "")
    try:
        store = open_corpus(name).train
        check_tokenizer(saved, store.tokenizer_fingerprint, "--corpus", directory)
    except UserError:
        if corpus is not None:
            raise
        return []
    return [decoded(saved.tokenizer, ids) for _, ids in some_pairs(store.shards[0], _CAPTIONS)]
