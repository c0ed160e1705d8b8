"""Evaluation of a translation run on a file of sources and a file of reference translations."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.data.corpus.pairs import open_pairs
from bert_jax.errors import UserError
from bert_jax.infer.forward import on_device
from bert_jax.infer.predictor import shape_for
from bert_jax.infer.translate import Translator, decoded
from bert_jax.model.seq2seq.network import Network, Side, Tree
from bert_jax.model.seq2seq.search import SearchConfig
from bert_jax.tasks.translation import best_constant, bleu, by_length, chrf
from bert_jax.terminal import progress_bar
from bert_jax.tokenization.tokenizer import make_row
from bert_jax.training.pretrain.corpus import open_corpus

LEAST_GAP = 0.1
"""Rise of the loss by wrong sources, in nats per token, below which a decoder ignores sources."""
_CAPTIONS = 10_000
_SEED = 20140901


def evaluate_pairs(
    workdir: str | Path,
    source_file: str,
    target_file: str,
    *,
    settings: SearchConfig,
    corpus: str | None = None,
) -> dict[str, Any]:
    """Translate a file of source sentences, and score the translations against reference sentences.

    Both files have one sentence per line. `corpus` replaces the run's corpus, whose targets are the
    candidates for the best constant translation (one text for all sources).

    Returns:
        `bleu` and `chrf` with intervals and signatures; `exact`, the share of translations that
            equal their reference; `floors`, the BLEU of copied sources and of the best constant
            translation; `ceiling`, the BLEU of references that the tokenizer encodes and decodes;
            `loss` and `loss_swapped` (see `losses`); scores `by_length` of the source; and counts.

    Raises:
        UserError: The model does not translate; the corpus has no pairs; a file cannot be read, has
            no lines or has an empty line; or the files have different numbers of lines.
    """
    sources, references = read_pairs(source_file, target_file)
    saved = on_device(read_model(workdir))
    saved.require("translate", "decoder")
    translator = Translator(saved, search=settings)
    with progress_bar(of="translation", unit="lines", total=len(sources)) as bar:
        parts = translator.parts({"text": sources}, most=translator.CHUNK, advance=bar.update)
        answers = [answer for part in parts for answer in translator.predict(part)]
    hypotheses = [answer["translation"] for answer in answers]
    ids = saved.tokenizer.encode_batch(references)
    found: dict[str, Any] = {"step": saved.origin.step, "pairs": len(sources)}
    for name, metric in (("bleu", bleu), ("chrf", chrf)):
        score = metric(hypotheses, references, with_interval=True)
        found |= {
            name: score.value, f"{name}_interval": score.interval,
            f"{name}_signature": score.signature,
        }  # fmt: skip
    found["exact"] = float(np.mean([a == b for a, b in zip(hypotheses, references, strict=True)]))
    captions = _training_targets(saved, corpus)
    constant = best_constant(references, captions) if captions else None
    found["floors"] = {
        "copy": bleu(sources, references).value,
        "constant": None if constant is None else constant.bleu,
        "constant_text": None if constant is None else constant.text,
    }
    spelled = [decoded(saved.tokenizer, each) for each in ids]
    found["ceiling"] = bleu(spelled, references).value
    found["loss"], found["loss_swapped"] = losses(saved, sources, ids)
    found["cut"] = translator.num_cut
    found["by_length"] = by_length(sources, hypotheses, references)
    return found


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
        fixed = "no constant translation is known: the corpus is missing (give --corpus)"
    else:
        fixed = f"{floors['constant']:.1f} for one text for all: {floors['constant_text']!r}"
    lines.append(f"{'floors':13} {copied}; {fixed}")
    lines.append(
        f"{'ceiling':13} {found['ceiling']:.1f} for references encoded and decoded by the tokenizer"
    )
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

    Raises:
        UserError: A file is unreadable or has no lines or an empty line, or the line counts differ.
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

    `saved` must be on a device. `targets` are token ids without special tokens.

    Returns:
        The loss, and the loss if each target gets the source of another pair (None if there is only
            one pair). The two losses are equal if the decoder ignores its source.
    """
    special, limit = saved.tokenizer.special_ids, saved.max_length
    rows = [
        make_row(saved.tokenizer, ids[: limit - 2]).ids
        for ids in saved.tokenizer.encode_batch(sources)
    ]
    inputs = [np.concatenate([[special.cls], ids[: limit - 1]]) for ids in targets]
    labels = [np.concatenate([ids[: limit - 1], [special.sep]]) for ids in targets]
    own = _mean_loss(saved, rows, inputs, labels)
    if len(rows) == 1:
        return own, None
    circle = np.random.default_rng(_SEED).permutation(len(rows))  # each moves to the next
    moved = {int(to): rows[at] for at, to in zip(circle, np.roll(circle, 1), strict=True)}
    return own, _mean_loss(saved, [moved[n] for n in range(len(rows))], inputs, labels)


def _mean_loss(
    saved: SavedModel,
    sources: Sequence[np.ndarray],
    inputs: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
) -> float:
    assert saved.network is not None
    longest = [max(map(len, pair)) for pair in zip(sources, inputs, strict=True)]
    order = np.argsort(longest, kind="stable")[::-1]
    total, at = 0.0, 0
    while at < len(order):
        size, length = shape_for(longest[order[at]], len(order) - at, saved.max_length)
        index = order[at : at + size]
        source, target, label = (
            _padded([side[n] for n in index], size, length) for side in (sources, inputs, labels)
        )
        real = Side(*map(jnp.asarray, source)), Side(*map(jnp.asarray, target))
        total += float(_summed(saved.network, saved.params, *real, jnp.asarray(label[0])))
        at += size
    return total / sum(map(len, labels))


@partial(jax.jit, static_argnums=0)
def _summed(
    network: Network, params: Tree, source: Side, target: Side, labels: Integer[Array, "B T"]
) -> Float[Array, ""]:
    logits = network.logits(params, source, target)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.where(target.segment_ids > 0, nats, 0.0).sum()


def _padded(rows: Sequence[np.ndarray], size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and segment ids (B, L), with padding rows up to `size`."""
    tokens, segments = np.zeros((2, size, length), np.int32)
    for n, row in enumerate(rows):
        tokens[n, : len(row)] = row
        segments[n, : len(row)] = 1
    return tokens, segments


def _training_targets(saved: SavedModel, corpus: str | None) -> list[str]:
    """Return some of the run's training targets, or an empty list if its corpus is missing."""
    name = corpus or saved.origin.config.get("data", {}).get("corpus", "")
    try:
        store = open_corpus(name).train
    except UserError:
        if corpus is not None:
            raise
        return []
    if store.num_sentences != 2 * store.num_documents:
        raise UserError(f"the corpus {name} holds no pairs of texts")
    shard = store.shards[0]
    step = -(-shard.num_documents // _CAPTIONS)
    offsets = shard.sentence_offsets
    places = [(offsets[n], offsets[n + 1]) for n in range(1, shard.num_sentences, 2 * step)]
    return [decoded(saved.tokenizer, shard.tokens[start:end]) for start, end in places]
