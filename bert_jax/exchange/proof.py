# ruff: noqa: RUF001 (texts of many scripts)
"""Outputs of a model on texts of many scripts, for comparing a written model with its source."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.files.staging import write_synced
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import (
    ReplacedHead,
    encode,
    pair_logits,
    pool,
    vocabulary_logits,
    with_params,
)
from bert_jax.model.task_heads import TaskHeadConfig, apply_task
from bert_jax.saved.model import SavedModel
from bert_jax.tokenization.tokenizer import Tokenizer, make_row, num_special

PARITY = "parity.json"
TOLERANCE = 1e-4
"""Largest absolute difference of two outputs in float32 that passes."""
_ROWS = 8
"""Compared at a time: the scores of a multilingual vocabulary take 130 MB a row of both sides."""

PROOF_TEXTS: tuple[str, ...] = (
    "The river froze early that year, and the ferry stayed on the far bank until April.",
    "Paris is the capital of France; Canberra, not Sydney, is Australia's.",
    'She didn\'t say "no" -- she said "not yet", which isn\'t the same.',
    "À Noël, l'élève a reçu un cœur en sucre, naïf mais très ému.",
    "El niño preguntó: ¿cuándo vendrá el pingüino? ¡Mañana!",
    "Das Straßenfest in Köln fiel größtenteils ins Wasser; Überschwemmungen überall.",
    "Ostrý nůž leží na stole, žluťoučký kůň úpěl ďábelské ódy.",
    "Zażółć gęślą jaźń, powiedział Łukasz.",
    "İstanbul'da ILIK bir akşam: Iğdır'dan gelen çiğ köfte, ışık ve ıslık.",
    "Tiếng Việt có nhiều dấu: ngã, hỏi, nặng, sắc, huyền.",
    "Η Οδύσσεια αρχίζει με τον ΟΔΥΣΣΕΥΣ μακριά από την Ιθάκη.",
    "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "Її їжак з'їв ґрушу біля Києва.",
    "اللغة العربية تُكتب من اليمين إلى اليسار، أليس كذلك؟",
    "השועל קפץ מעל הכלב הָעָצֵל.",
    "फ़र्श पर पानी गिरा था, इसलिए वह धीरे-धीरे चला।",
    "ঢাকা বাংলাদেশের রাজধানী।",
    "தமிழ் மொழி மிகப் பழமையானது.",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "黄河之水天上来，奔流到海不复回。",
    "臺灣的夏天很熱，𠮷野家也賣冰。",
    "吾輩は猫である。ｶﾀｶﾅとカタカナ、全角ＡＢＣ１２３。",
    "한국어는 띄어쓰기가 중요하다. 각국의 말씀",
    "ქართული ანბანი და հայոց այբուբենը",
    "👩‍👩‍👧‍👦 family, 🇳🇴 flag, 👍🏽 thumb, ☕️ and a plain ☺",
    "cafe\u0301 and caf\u00e9, A\u030angstro\u0308m, q\u0323\u0307, x\u0302\u0303",
    "ﬁne ﬂuﬀ, ½ of Ⅷ, x² + H₂O, ㎏ and ™, … ‥",
    "3.14159, 1,000,000 and 0x1F; 12/05/1998 at 17:45, +44 20 7946 0958, -40°C",
    "https://example.org/a_b?q=%20x&y=[1]#top or mail first.last+tag@example.com",
    "def f(x: int) -> str: return f\"{x!r:>10}\\n\"  # TODO: <br/> & {'a': [1, 2]}",
    "$E=mc^2$, \\frac{1}{2} ~ ^ ` | \\ @ § ¶ € £ ¥ ₹",
    "",
    " ",
    "   leading,  double\tand\ntrailing\r\nspace \u00a0 \u2009 \u3000 ",
    "soft\u00adhyphen, zero\u200bwidth, joined\u200dup, \ufeffmark, \u202eright to left\u202c",
    "bell\x07 null\x00 escape\x1b[0m delete\x7f next\x85line para\u2029graph",
    "replacement \ufffd private \ue000 unassigned \U0003fffd last \U0010ffff",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 2,
    "a" * 120,
    "!?!?!?...,,,;;;---___***###",
    "The [MASK] of [CLS] and [SEP] with [PAD] or [UNK] spelled out, and <0x41>, <s>, ▁x ▁ .",
    "iPhone McDonald NASA O'Neill e-mail x86_64 ALLCAPS lowercase MiXeD",
)
"""Own sentences: scripts, accents, composed and not, digits, addresses, code, what is invisible,
the empty text, long words, special tokens spelled out."""


def texts_for(tokenizer: Tokenizer) -> list[str]:
    """Return the proof's texts, and one with the tokens that were added to a vocabulary."""
    added = [token.content for token in getattr(tokenizer, "added", ())[:20]]
    marked = f"The river{' froze'.join(added)}early. {' '.join(added)}"
    return [*PROOF_TEXTS, marked] if added else list(PROOF_TEXTS)


def same_spans(
    text: str, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], *, exact: bool
) -> bool:
    """Whether the tokens of a text come from the same characters.

    Args:
        text: Encoded text.
        ours: Spans (start, end); an empty one is of white space alone and is not compared.
        theirs: The same, of the same tokens.
        exact: Whether white space at the ends of theirs counts.
    """
    return len(ours) == len(theirs) and all(
        tuple(mine) == (tuple(other) if exact else _solid(text, *other))
        for mine, other in zip(ours, theirs, strict=True)
        if mine[0] < mine[1]
    )


def _solid(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a span without the white space at its ends."""
    start += len(text[start:end]) - len(text[start:end].lstrip())
    return start, start + len(text[start:end].strip())


class ProofFailedError(RuntimeError):
    """Failure of a proof: a written model does not compute the same as its source."""

    exit_code = 1


class Batch(NamedTuple):
    """Rows of one length, each array (B, L) int32."""

    tokens: np.ndarray
    type_ids: np.ndarray
    segment_ids: np.ndarray
    """1, and 0 for padding; outputs there mean nothing."""


def proof_rows(saved: SavedModel, texts: Sequence[str] = PROOF_TEXTS) -> list[list[int]]:
    """Return a row for each text, cut to the model's length, and then rows of two texts each."""
    tokenizer = saved.tokenizer
    length = min(saved.max_length, saved.config.num_positions, 128)
    room = length - num_special(tokenizer, pair=False)
    half = (length - num_special(tokenizer, pair=True)) // 2
    ids = tokenizer.encode_batch(list(texts))
    rows = [make_row(tokenizer, found[:room]) for found in ids]
    rows += [
        make_row(tokenizer, first[:half], second[:half])
        for first, second in zip(ids[0::2], ids[1::2], strict=False)
    ]
    return [row.ids.tolist() for row in rows]


def batch_of(saved: SavedModel, rows: Sequence[Sequence[int]], length: int | None = None) -> Batch:
    """Rows padded to one length, the longest's where none is given.

    What comes after the first separator and is not padding has the second type, as in a pair of
    texts; where the model has one type alone, all have the first.
    """
    special = saved.tokenizer.special_ids
    length = length or max(map(len, rows))
    tokens = np.full((len(rows), length), special.pad, np.int32)
    segment_ids = np.zeros_like(tokens)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
        segment_ids[number, : len(row)] = 1
    separators = np.cumsum(tokens == special.sep, axis=1) - (tokens == special.sep)
    second = (separators > 0) & (segment_ids > 0) & (saved.config.num_types > 1)
    return Batch(tokens, second.astype(np.int32), segment_ids)


def logits_of(
    saved: SavedModel, rows: Sequence[Sequence[int]], length: int | None = None
) -> dict[str, np.ndarray]:
    """Compute our model's outputs in float32 (see `batch_of` for types and padding).

    Args:
        saved: The model.
        rows: B rows of token ids, special tokens included.
        length: L, to which they are padded; default: the longest row's.

    Returns:
        `hidden` (B, L, D), the last states; and of these what the model has: `pooled` (B, D), `mlm`
        (B, L, V) over the vocabulary without its padding, `nsp` (B, 2), `rtd` (B, L, 1), `head`
        (B, C) or (B, L, C).
    """
    batch = batch_of(saved, rows, length)
    parts = tuple(part for part in ("mlm", "nsp", "rtd") if part in saved.params)
    head = None if saved.outputs is None else saved.outputs.head
    # Training may compute in fewer bits, and its kernels take some lengths alone.
    config = dataclasses.replace(saved.config, dtype="float32", attention_impl="xla")
    with jax.default_matmul_precision("highest"):  # accelerators compute with less by default
        found = outputs_of(config, head, parts, saved.has_pooler, saved.params, batch)
    return {name: np.asarray(array) for name, array in found.items()}


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def outputs_of(
    config: ModelConfig,
    head: TaskHeadConfig | None,
    parts: tuple[str, ...],
    pooler: bool,
    params: Any,
    batch: Batch,
) -> dict[str, jax.Array]:
    """Return the outputs of `logits_of` as a function that can be traced.

    Args:
        config: The architecture.
        head: Head of a fine-tuned model.
        parts: Wanted parts of `mlm`, `nsp` and `rtd`.
        pooler: Whether the pooled first token is.
        params: Encoder, with the wanted parts and the entry `head` beside.
        batch: The rows.
    """
    inputs: tuple[Any, Any, Any] = batch
    hidden = encode(config, params, *inputs)
    found = {"hidden": hidden.astype("float32")}
    if pooler:
        found["pooled"] = pool(config, params, hidden).astype("float32")
    if "mlm" in parts:
        found["mlm"] = vocabulary_logits(config, params, hidden)[..., : config.vocab_size]
    if "nsp" in parts and "pooler" in params["encoder"]:
        found["nsp"] = pair_logits(config, params, hidden)
    if "rtd" in parts:
        found["rtd"] = with_params(params["rtd"], ReplacedHead, config)(hidden)[..., None]
    if head is not None:
        found["head"] = apply_task(config, head, params, *inputs)
    return found


def row_batches(rows: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
    """Rows, some at a time; all batches have the same number, so that one shape is compiled.

    The last rows come once more where they do not fill a batch.
    """
    starts = range(0, len(rows), _ROWS)
    return [rows[max(0, min(start, len(rows) - _ROWS)) :][:_ROWS] for start in starts]


def keep_worst(worst: dict[str, float], found: Mapping[str, float]) -> None:
    """Raise the differences in `worst` to those of `found` that are larger."""
    for name, gap in found.items():
        worst[name] = max(gap, worst.get(name, 0.0))


def differences(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], segment_ids: np.ndarray
) -> dict[str, float]:
    """Return the largest absolute difference of each output that both have; padding does not count.

    A value that is not finite in one of them makes an infinite difference.
    """
    found = {}
    for name in ours.keys() & theirs.keys():
        first, second = (np.asarray(a[name], np.float32) for a in (ours, theirs))
        if first.shape != second.shape:
            raise ProofFailedError(f"{name} is {second.shape}, of the source {first.shape}")
        if first.shape[:2] == segment_ids.shape and first.ndim > 2:
            first, second = first[segment_ids > 0], second[segment_ids > 0]
        with np.errstate(invalid="ignore"):  # infinity less infinity
            gap = np.abs(first - second)
        found[name] = float(gap.max(initial=0)) if np.isfinite(gap).all() else float("inf")
    return dict(sorted(found.items()))


def write_parity(directory: Path, content: Mapping[str, Any]) -> None:
    """Write `parity.json`."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_synced(directory / PARITY, text.encode())
