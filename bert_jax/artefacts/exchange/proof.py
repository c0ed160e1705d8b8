# ruff: noqa: RUF001 (texts of many scripts)
"""Comparison of a written model with its source by their outputs for texts in many scripts."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.artefacts.formats.entries import named
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.model import heads
from bert_jax.model.config import ModelConfig
from bert_jax.model.embedding import EmbeddingConfig, finish, mapped, pool_tokens
from bert_jax.model.seq2seq.network import Network, Side
from bert_jax.model.task_heads import TaskHeadConfig, head_logits
from bert_jax.tokenization.tokenizer import Tokenizer, make_row, num_special

TOLERANCE = 1e-4
"""Largest absolute difference between two float32 outputs that a proof accepts."""

ONLY_OURS = "only bert_jax's own reading was compared"
NOT_INSTALLED = (
    f"transformers and torch are not both installed (the extra bert_jax[parity]); {ONLY_OURS}"
)
"""Reason in reports on a proof that ran without Transformers."""

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
"""Texts written for this package, with many scripts, precomposed and combining accents, digits,
addresses, code, invisible characters, the empty text, long words and spelled-out special tokens."""


def texts_for(tokenizer: Tokenizer) -> list[str]:
    """Return `PROOF_TEXTS` and, if the tokenizer has added tokens, one more text that spells them.

    If there are more than 20 added tokens, the text has only the first ten and the last ten.
    """
    contents = [token.content for token in getattr(tokenizer, "added", ())]
    added = contents[:10] + contents[10:][-10:]
    marked = f"The river{' froze'.join(added)}early. {' '.join(added)}"
    return [*PROOF_TEXTS, marked] if added else list(PROOF_TEXTS)


def same_spans(
    text: str, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], *, exact: bool
) -> bool:
    """Return true if two lists of spans (start, end) cover the same characters, token by token.

    Tokens that are only white space are skipped; their spans in `ours` are empty. If `exact` is
    false, white space at the ends of the spans in `theirs` is ignored.
    """

    def solid(start: int, end: int) -> tuple[int, int]:  # the span without white space at its ends
        start += len(text[start:end]) - len(text[start:end].lstrip())
        return start, start + len(text[start:end].strip())

    return len(ours) == len(theirs) and all(
        tuple(mine) == (tuple(other) if exact else solid(*other))
        for mine, other in zip(ours, theirs, strict=True)
        if mine[0] < mine[1]
    )


class ProofFailedError(RuntimeError):
    """Failure of a proof: a written model differs from its source, for example in its outputs."""

    exit_code = 1


class Batch(NamedTuple):
    """Token sequences that are padded to one length; each array is (B, L) int32."""

    tokens: np.ndarray
    type_ids: np.ndarray
    segment_ids: np.ndarray
    """Mask: 1 for tokens, 0 for padding. Outputs at padding are meaningless."""


class Sides(NamedTuple):
    """Source texts and target texts for a translation model, with teacher forcing."""

    source: Batch
    target: Batch

    @property
    def segment_ids(self) -> np.ndarray:
        """Mask (B, T) of the targets: 1 for tokens, 0 for padding."""
        return self.target.segment_ids


def proof_rows(saved: SavedModel) -> list[list[int]]:
    """Return the token ids of input rows: a row for each proof text, then a row for each text pair.

    The first and second text are a pair, the third and fourth, and so on. Rows are truncated to the
    model's maximum length, or to 128 tokens if that is less.
    """
    tokenizer = saved.tokenizer
    length = min(saved.max_length, saved.config.num_positions, 128)
    room = length - num_special(tokenizer, pair=False)
    half = (length - num_special(tokenizer, pair=True)) // 2
    ids = tokenizer.encode_batch(PROOF_TEXTS)
    rows = [make_row(tokenizer, found[:room]) for found in ids]
    pairs = zip(ids[0::2], ids[1::2], strict=False)
    rows += [make_row(tokenizer, first[:half], second[:half]) for first, second in pairs]
    return [row.ids.tolist() for row in rows]


def batch_of(saved: SavedModel, rows: Sequence[Sequence[int]], length: int | None = None) -> Batch:
    """Pad rows of token ids to `length`, by default the length of the longest row.

    Tokens after the first separator have type 1 if the model has types; all others have type 0.
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


def inputs_of(saved: SavedModel, rows: Sequence[Sequence[int]], length: int) -> Batch | Sides:
    """Pad rows of token ids to an input of `logits_of`.

    A translation model gets arbitrary targets: for row i, row i - 1 without its last token, [SEP].
    """
    batch = batch_of(saved, rows, length)
    if saved.network is None:
        return batch
    return Sides(batch, batch_of(saved, [row[:-1] for row in (*rows[-1:], *rows[:-1])], length))


def logits_of(saved: SavedModel, inputs: Batch | Sides) -> dict[str, np.ndarray]:
    """Compute the outputs of a model with this package, in float32.

    For an encoder, return the last hidden states, `hidden` (B, L, D), and an output for each part
    that the model has: `pooled` (B, D), `mlm` (B, L, V), `nsp` (B, 2), `rtd` (B, L, 1), `head` (B,
    C), (B, L, C) or (B, L, L, C), and `embedding` (B, D). For a translation model, return only
    `logits` (B, T, V), which predict the next target token. V leaves out vocabulary padding.
    """
    with jax.default_matmul_precision("highest"):  # accelerators use a lower one by default
        if isinstance(inputs, Sides):
            return {"logits": np.asarray(_logits(exact(saved.network), saved.params, *inputs))}
        # A training run may use a lower precision, and kernels that support only some lengths.
        config = dataclasses.replace(saved.config, dtype="float32", attention_impl="xla")
        found = outputs_of(config, saved.head, saved.params, inputs, saved.embedding)
        return {name: np.asarray(array) for name, array in found.items()}


def exact_config(config: ModelConfig) -> ModelConfig:
    """Return `config` with float32, restricted to operations that every platform has."""
    # Layers are unrolled: in an exported program a loop would copy their weights at every call.
    return dataclasses.replace(
        config, dtype="float32", attention_impl="xla", remat="none", scan_unroll=config.num_layers
    )


def exact(network: Network | None) -> Network:
    """Return a translation network with `exact_config` applied to its configuration."""
    assert network is not None
    return dataclasses.replace(network, model=exact_config(network.model))


@partial(jax.jit, static_argnums=0)
def _logits(network: Network, params: Any, source: Batch, target: Batch) -> jax.Array:
    both = (source, target)
    first, second = (Side(jnp.asarray(x.tokens), jnp.asarray(x.segment_ids)) for x in both)
    return network.logits(params, first, second)[..., : network.model.vocab_size]


@partial(jax.jit, static_argnums=(0, 1, 4))
def outputs_of(
    config: ModelConfig, head: TaskHeadConfig | None, params: Any, batch: Batch,
    embedding: EmbeddingConfig | None = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """Compute the outputs that `logits_of` lists for an encoder; JAX can trace this function."""
    inputs: tuple[Any, Any, Any] = batch
    hidden = heads.encode(config, params, *inputs)
    found = {"hidden": hidden}
    if "pooler" in params["encoder"]:
        found["pooled"] = heads.pool(config, params, hidden)
    if "mlm" in params:
        logits = heads.vocabulary_projection(config, params, hidden).logits()
        found["mlm"] = logits[..., : config.vocab_size]
    if "nsp" in params and "pooled" in found:
        found["nsp"] = heads.pair_logits(config, params, hidden)
    if "rtd" in params:
        replaced = heads.with_params(params["rtd"], heads.ReplacedHead, config)
        found["rtd"] = replaced(hidden)[..., None]
    if head is not None:
        pooled = head.kind == "classification" and config.pooler
        if "pooled" in found or not pooled:
            found["head"] = head_logits(config, head, params, hidden, inputs[2])
    if embedding is not None:
        vectors = pool_tokens(embedding.pooling, hidden, inputs[2] > 0, params, config)
        found["embedding"] = finish(embedding, mapped(vectors, params))
    return {name: array.astype(jnp.float32) for name, array in found.items()}


def row_batches(
    rows: Sequence[Sequence[int]], size: int = 8
) -> list[tuple[Sequence[Sequence[int]], int]]:
    """Split rows into batches of equal size; return each with the length to pad its rows to.

    All batches have the length of the longest row, so that JAX compiles only once. The last
    batch repeats earlier rows if necessary. Batches are small because, with a multilingual
    vocabulary, the logits of the model and its source take 130 MB per row.
    """
    starts = range(0, len(rows), size)
    length = max(map(len, rows))
    return [(rows[max(0, min(start, len(rows) - size)) :][:size], length) for start in starts]


def compare(
    saved: SavedModel,
    batches: Iterable[tuple[Sequence[Sequence[int]], int]],
    *programs: Callable[[Any], Mapping[str, np.ndarray]],
    optional: Iterable[str] = (),
) -> list[dict[str, float]]:
    """Return, for each program, the largest absolute differences from `saved`, by output name.

    `batches` has the rows of token ids in each batch, with the length to pad them to. A program
    maps a result of `inputs_of` to outputs with the names of `logits_of`; it may lack `optional`
    outputs. Raise a ProofFailedError if it lacks another output, or an output has a wrong shape.
    """
    largest: list[dict[str, float]] = [{} for _ in programs]
    for rows, length in batches:
        batch = inputs_of(saved, rows, length)
        source = logits_of(saved, batch)
        for gaps, program in zip(largest, programs, strict=True):
            found = program(batch)
            if lacking := source.keys() - found.keys() - set(optional):
                names = ", ".join(sorted(lacking))
                raise ProofFailedError(f"the compared model has no output {names}")
            for name, gap in differences(source, found, batch.segment_ids).items():
                gaps[name] = max(gap, gaps.get(name, 0.0))
    return largest


def compare_shapes(
    saved: SavedModel, rows: Sequence[Sequence[int]],
    program: Callable[[Batch], Mapping[str, np.ndarray]], *, optional: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Compare a program with `saved` on batches of several shapes; see `compare`.

    All rows come in batches of 16, then two rows with extra padding, then only the longest row.
    Return `differences`, the largest of each output, and `shapes`, the (B, L) of all batches.
    """
    longest = max(rows, key=len)
    padded = min(len(longest) + 5, saved.config.num_positions)
    batches = [*row_batches(rows, 16), (rows[:2], padded), ([longest], len(longest))]
    (found,) = compare(saved, batches, program, optional=optional)
    shapes = dict.fromkeys((len(some), length) for some, length in batches)
    return {"differences": found, "shapes": [list(shape) for shape in shapes]}


def check_differences(
    found: dict[str, float],
    tolerance: float,
    failure: str = "the written model and its source compute different outputs",
) -> None:
    """Raise ProofFailedError if a difference exceeds the tolerance or is not a number."""
    above = {name: gap for name, gap in found.items() if not gap <= tolerance}
    if above:
        said = ", ".join(f"{name} {gap:.2e}" for name, gap in above.items())
        raise ProofFailedError(
            f"{failure}: the largest differences are {said}, but at most {tolerance:.0e} is "
            "allowed (--tolerance). No files were kept"
        )


def differences(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], segment_ids: np.ndarray
) -> dict[str, float]:
    """Return the largest absolute difference of each output that both mappings have.

    Padding is ignored. A difference is infinite if a value of the output is not finite. If the two
    arrays of an output have different shapes, ProofFailedError is raised.
    """
    found = {}
    for name in ours.keys() & theirs.keys():
        first, second = (np.asarray(a[name], np.float32) for a in (ours, theirs))
        if first.shape != second.shape:
            raise ProofFailedError(f"output {name} has the shape {second.shape}, not {first.shape}")
        if first.shape[:2] == segment_ids.shape and first.ndim > 2:
            read = segment_ids > 0
            if first.shape[2:-1] == segment_ids.shape[1:]:  # scores of pairs of tokens
                read = read[:, :, None] & read[:, None]
            first, second = first[read], second[read]
        with np.errstate(invalid="ignore"):  # infinity minus infinity is invalid
            gap = np.abs(first - second)
        found[name] = float(gap.max(initial=0)) if np.isfinite(gap).all() else float("inf")
    return dict(sorted(found.items()))


def unequal(first: Any, second: Any, *, vocab_size: int | None = None) -> list[str]:
    """Return the names of arrays that only one tree has, or that differ in shape, dtype or bits.

    If `vocab_size` is given, rows that pad the vocabulary are ignored.
    """
    one, other = (named(tree, vocab_size) for tree in (first, second))

    def bits(array: np.ndarray | None) -> Any:
        return array if array is None else (array.shape, array.dtype, array.tobytes())

    return sorted(n for n in one.keys() | other.keys() if bits(one.get(n)) != bits(other.get(n)))
