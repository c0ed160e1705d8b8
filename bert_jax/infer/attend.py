"""Attention weights of a text, and a self-contained HTML page that draws them."""

import base64
import hashlib
import html
import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

import bert_jax
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.infer import forward
from bert_jax.infer.fill_mask import MaskFiller
from bert_jax.infer.translate import best_tokens
from bert_jax.model.heads import layer_outputs
from bert_jax.model.seq2seq.network import Side
from bert_jax.tasks.rows import Rows, eval_batches
from bert_jax.tasks.translation import decoded
from bert_jax.tokenization.masks import encode_masked, token_text
from bert_jax.tokenization.tokenizer import TokenRow, make_row, replace_surrogates

MAX_TOKENS = 256
"""Largest number of tokens in a page, including special tokens (13 MB of BERT-base's weights)."""

_SCRIPTS = ("choose.js", "lines.js", "map.js")
_LENGTH_STEP = 16  # rows are padded to a multiple of 16, so that few lengths are compiled
_TITLE_CHARS = 60


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention weights of a text, or of a pair of texts, in every layer and head."""

    tokens: list[str]
    """Tokens of the row, in a form that people can read."""
    weights: Float[np.ndarray, "N H L L"]
    """Weights by layer, head, attending token and attended token, in float32."""
    page: str
    """HTML page that draws the weights of the chosen layers and heads as lines between tokens and
    as heat maps. Its content security policy forbids loading anything. The page stores the square
    root of each weight in 8 bits, so the error of a weight w is at most 0.004 * sqrt(w)."""

    def save(self, path: str | Path) -> None:
        """Write the page to a file. An existing file is replaced."""
        replace_file(Path(path).expanduser(), self.page.encode())

    def __repr__(self) -> str:
        layers, heads, count = self.weights.shape[:3]
        return f"Attention of {count} tokens in {layers} layers of {heads} heads; .save(FILE.html)"

    def _repr_html_(self) -> str:
        """Return an HTML frame with the page. Notebooks call this method to show the object."""
        style = 'style="width: 100%; height: 40em; border: 0"'
        return f'<iframe srcdoc="{html.escape(self.page)}" {style}></iframe>'


def attention(saved: SavedModel, text: str, text_b: str | None = None) -> Attention:
    """Compute the attention weights of a text, and make a page that draws them.

    The text may contain masks, written as for `MaskFiller`. If the model has a masked-LM head, the
    page shows its predictions for the masks. `text_b` is the second text of a pair. For a
    translation model, `text_b` is a translation of the text; None means that the model translates.
    Raise a UserError if a text has no tokens or too many, or the network has no attention.
    """
    text = replace_surrogates(text)
    text_b = None if text_b is None else replace_surrogates(text_b)
    fills: dict[int, str] = {}
    if saved.network is None:
        row, words = _row(saved, text, text_b)
        weights, config = _weights(saved, row), saved.config
        windows = [config.window(config.layer_kind(n).letter) for n in range(len(weights))]
        fills = _fills(saved, row)
    else:
        row, words, text_b = _translation(saved, text, text_b)
        weights = translation_weights(saved, row)
        windows = [None] * len(weights)
    tokenizer = saved.tokenizer
    special = tokenizer.special_ids
    if tokenizer.kind != "fast":
        tokens = [tokenizer.id_to_token(int(i)) for i in row.ids]
    else:  # byte-level BPE spells tokens in bytes, so show the text that each token stands for
        tokens = [
            word or token_text(int(i), tokenizer).strip() or "␣"
            for word, i in zip(words, row.ids, strict=True)
        ]
    layers, heads, count = weights.shape[:3]
    data = {
        "layers": layers, "heads": heads, "windows": windows, "tokens": tokens, "words": words,
        "special": [int(i in (special.cls, special.sep)) for i in row.ids],
        "second_start": row.second_start, "fills": fills,
        "weights": base64.b64encode(quantized(weights).tobytes()).decode(),
    }  # fmt: skip
    of = f"{layers} layer{'s' * (layers != 1)} of {heads} head{'s' * (heads != 1)}"
    if local := layers - windows.count(None):
        of += f", {local} of them local ({saved.config.local_window} tokens on each side)"
    of += f" · {count} tokens"
    if saved.network is not None:
        of += (
            f", {row.second_start} of the source. The row of a target token shows what the decoder "
            "attended to, in the source and in the target so far, when it wrote the next token"
        )
    return Attention(tokens, weights, _page(data, replace_surrogates(saved.name), of, text, text_b))


def quantized(weights: Float[np.ndarray, "N H L L"]) -> UInt8[np.ndarray, "N H L L"]:
    """Encode the weights' square roots in 8 bits; without roots, small weights would become 0."""
    return np.rint(255 * np.sqrt(weights)).astype(np.uint8)


def _row(saved: SavedModel, text: str, text_b: str | None) -> tuple[TokenRow, list[str]]:
    """Return the row of a text or a pair, and the text of each token ("" for special tokens)."""
    parts = [("text", text)] if text_b is None else [("text", text), ("second text", text_b)]
    ids: list[np.ndarray] = []
    words: list[list[str]] = []
    for name, part in parts:
        found = encode_masked(part, saved.tokenizer)
        _check_tokens(name, part, len(found.ids))
        ids.append(found.ids)
        words.append([part[start:end] for start, end in found.offsets])
    row = make_row(saved.tokenizer, *ids)
    _check_length(saved, "text", len(row.ids))
    of_row = [*[""] * saved.tokenizer.special_ids.opens, *words[0]]
    if len(words) > 1:
        of_row += [*[""] * (row.second_start - len(of_row)), *words[1]]
    return row, [*of_row, ""]


def _check_tokens(name: str, text: str, count: int) -> None:
    if not count:
        raise UserError(f"the {name} {text!r} has no tokens; give a text with at least one word")


def _check_length(saved: SavedModel, name: str, count: int, most: int = 0) -> None:
    limit = most or min(MAX_TOKENS, saved.max_length)
    if count > limit:
        who = "a page shows" if limit == MAX_TOKENS else f"{saved.name} takes"
        raise UserError(
            f"the {name} has {count} tokens, including special tokens, but {who} at most "
            f"{limit}; give a shorter text"
        )


def _translation(
    saved: SavedModel, text: str, target: str | None
) -> tuple[TokenRow, list[str], str]:
    """Return source and target as one row, the text of each token, and the target's text."""
    tokenizer, special, text = saved.tokenizer, saved.tokenizer.special_ids, text.strip()
    found = tokenizer.encode(text)
    _check_tokens("text", text, len(found.ids))
    source = make_row(tokenizer, found.ids).ids
    words = [*[""] * special.opens, *(text[start:end] for start, end in found.offsets), ""]
    _check_length(saved, "text", len(source))
    if target is None:
        ids = best_tokens(saved, source)
        target, spelled = decoded(tokenizer, ids), [""] * len(ids)
    else:
        ids, offsets = tokenizer.target.encode(target)
        spelled = [target[start:end] for start, end in offsets]
    _check_length(saved, "translation", len(ids) + 1)
    row = np.concatenate([source, [special.cls], ids]).astype(np.int32)
    _check_length(saved, "text with its translation", len(row), MAX_TOKENS)
    return TokenRow(row, len(source)), [*words, "", *spelled], target


def translation_weights(saved: SavedModel, row: TokenRow) -> Float[np.ndarray, "N H L L"]:
    """Return all attention weights of a translation, one matrix (L, L) per layer and head.

    Rows and columns are first the tokens of the source, then the inputs of the decoder. A matrix
    combines layer n of the encoder (source to source) and of the decoder (target to source, and
    target to target). Absent weights are 0. Raise a UserError if the network has no attention.
    """
    assert saved.network is not None
    start, count = row.second_start, len(row.ids)
    sides = [
        Side(jnp.asarray(part[None]), jnp.ones((1, len(part)), jnp.int32))
        for part in (row.ids[:start], row.ids[start:])
    ]
    found = jax.jit(saved.network.weights)(saved.params, *sides)
    source, target = slice(0, start), slice(start, count)
    placed = (
        (found.encoder, source, source), (found.decoder, target, target),
        (found.cross, target, source),
    )  # fmt: skip
    parts = [(np.asarray(part)[:, 0], at, to) for part, at, to in placed if part is not None]
    if not parts:
        raise UserError(f"{saved.name}: the network has no attention, so there is nothing to draw")
    layers, heads = (max(part.shape[axis] for part, _, _ in parts) for axis in (0, 1))
    weights = np.zeros((layers, heads, count, count), np.float32)
    for part, rows, columns in parts:
        weights[: len(part), : part.shape[1], rows, columns] = part
    return weights


def _weights(saved: SavedModel, row: TokenRow) -> Float[np.ndarray, "N H L L"]:
    count = len(row.ids)
    length = min(-(-count // _LENGTH_STEP) * _LENGTH_STEP, saved.config.num_positions)
    rows = Rows([row.ids], np.array([row.second_start], np.int32))
    ((_, batch),) = eval_batches(rows, (length,), 1, saved.tokenizer.special_ids.pad)
    # A model with one sentence type, such as RoBERTa, reads both texts as that type.
    type_ids = np.minimum(batch["type_ids"], np.int32(max(saved.config.num_types, 1) - 1))
    arrays = (jnp.asarray(a) for a in (batch["tokens"], type_ids, batch["segment_ids"]))
    found = layer_outputs(saved.config, saved.params, *arrays, with_weights=True)
    assert found.weights is not None
    return np.asarray(found.weights)[:, 0, :, :count, :count]


def _fills(saved: SavedModel, row: TokenRow) -> dict[int, str]:
    """Return the page's text for each mask position: candidates, or a remark without a head."""
    at = np.flatnonzero(row.ids == saved.tokenizer.special_ids.mask)
    if not len(at):
        return {}
    if "fill-mask" not in saved.verbs:
        return dict.fromkeys(at.tolist(), "this model has no head that fills masks")
    filler = MaskFiller(forward.on_device(saved))
    (output,) = filler.outputs(Rows([row.ids], np.array([row.second_start], np.int32)))
    return {
        n: ", ".join(f"{each['token']} {100 * each['probability']:.1f}\xa0%" for each in mask)
        for n, mask in zip(at.tolist(), filler.candidates(len(at), output), strict=True)
    }


def _page(data: dict[str, Any], model: str, facts: str, text: str, text_b: str | None) -> str:
    files = resources.files("bert_jax.infer") / "attend_page"
    page, style, *scripts = (
        (files / name).read_text("utf-8") for name in ("page.html", "page.css", *_SCRIPTS)
    )
    script = "".join(scripts)
    # The policy allows only this style and this script, so no text or token can run or load code.
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    )
    title = text if len(text) <= _TITLE_CHARS else f"{text[:_TITLE_CHARS]}…"
    second = "" if text_b is None else f'  <p class="text" dir="auto">{_html(text_b)}</p>\n'
    values = {
        "policy": policy,
        "version": html.escape(bert_jax.__version__),
        "title": _html(title),
        "style": style,
        "text": _html(text),
        "text_b": second,
        "fills": "".join(
            f'  <p class="fill">Token {n + 1}, {_html(data["tokens"][n])}: '
            f"<bdi>{_html(fill)}</bdi></p>\n"
            for n, fill in data["fills"].items()
        ),
        "model": _html(model),
        "facts": facts,
        # Inside a script element, only "<" can begin the element's end or a comment.
        "data": json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda field: values[field[1]], page)


def _digest(source: str) -> str:
    """Return the hash by which a content security policy allows a script or style element."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _html(text: str) -> str:
    """Escape text for HTML. Control characters, which HTML forbids, become U+FFFD."""
    return html.escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", "\ufffd", text))
