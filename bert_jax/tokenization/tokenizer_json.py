"""Reading a `tokenizer.json` that is no WordPiece: byte-level BPE, and pieces with "▁" for a space.

Such a file can describe any pipeline, and the library behind it runs what it says. Only parts on
the lists of `tokenizer_parts` are taken, each in a canonical form, and the tokenizer is built anew
from those.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.tokenization.tokenizer import CONFIG_NAME, MAX_FILE_BYTES, MAX_TOKENS, AddedToken
from bert_jax.tokenization.tokenizer_parts import ROBERTAS, Reading
from bert_jax.untrusted.json_file import read_json_object, short
from bert_jax.untrusted.whole_file import read_text

MAP_NAME = "special_tokens_map.json"
ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_OTHER_ROLES = {"cls_token": "bos_token", "sep_token": "eos_token"}
_USUAL = {
    "pad_token": ("<pad>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]"),
    "cls_token": ("<s>", "[CLS]"),
    "sep_token": ("</s>", "[SEP]"),
    "mask_token": ("<mask>", "[MASK]"),
}


@dataclass(frozen=True)
class Pipeline:
    """All that determines ids.

    Attributes:
        kind: `byte_level_bpe`, `bpe` or `unigram`.
        vocab: tokens in the order of their ids, special ones included.
        scores: of `unigram`, a logarithm for each token; else empty.
        merges: of the others, pairs in the order of their priority; else empty.
        normalizer: parts as in the file, in order.
        pre_tokenizer: the same.
        byte_fallback: characters without a token become their bytes.
        fuse_unk: characters without a token in a row become one.
        unk_in_model: those characters become the unknown token; else they are left out.
        roles: tokens for padding, unknown, beginning, separator, mask.
        specials: other added tokens, kept whole where a text spells them.
        eats_space: `roles` that take the space before them, where Transformers reads them.
        num_between: separators between the two texts of a row.
        trim_offsets: in Transformers, offsets of byte-level BPE leave out spaces; here all do.
    """

    kind: str
    vocab: tuple[str, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]
    normalizer: tuple[dict[str, Any], ...]
    pre_tokenizer: tuple[dict[str, Any], ...]
    byte_fallback: bool
    fuse_unk: bool
    unk_in_model: bool
    roles: tuple[str, ...]
    specials: tuple[AddedToken, ...] = ()
    eats_space: tuple[str, ...] = ()
    num_between: int = 1
    trim_offsets: bool = False


def read_pipeline(path: Path) -> Pipeline:
    """From `tokenizer.json`, or from `vocab.json` with `merges.txt`, and what lies beside it.

    Raises:
        UserError: the file is not sound, has parts that are not on the lists, or no special tokens.
    """
    config = _beside(path, CONFIG_NAME)
    if path.name == "vocab.json":
        whole = _from_two_files(path, config)
    else:
        whole = read_json_object(path, max_bytes=MAX_FILE_BYTES)
    reading = Reading(f"{path}")
    model = reading.mapping("model", whole.get("model"))
    kind = reading.one_of("model.type", model.get("type"), ("BPE", "Unigram"))
    normalizer = reading.parts("normalizer", whole.get("normalizer"), "normalizers")
    pre_tokenizer = reading.parts("pre_tokenizer", whole.get("pre_tokenizer"), "pretokenizers")
    normalizer = tuple(reading.normalizer(part) for part in normalizer)
    pre_tokenizer = tuple(reading.pre_tokenizer(part) for part in pre_tokenizer)
    names = [part["type"] for part in pre_tokenizer]
    byte_level = names == ["ByteLevel"]
    if not byte_level and names not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        reading.refuse(
            f"pre_tokenizer is {', '.join(names) or 'missing'}; ByteLevel, Metaspace, or "
            "WhitespaceSplit and Metaspace can be read"
        )
    if byte_level and kind == "Unigram":
        reading.refuse("pre_tokenizer is ByteLevel and the model Unigram; ByteLevel goes with BPE")
    vocab: list[str]
    scores: list[float] = []
    merges: list[tuple[str, str]] = []
    if kind == "Unigram":
        vocab, scores = reading.unigram(model)
        unknown = model.get("unk_id")
        in_model = unknown is not None
    else:
        vocab, merges = reading.bpe(model)
        unknown = model.get("unk_token")
        in_model = unknown is not None
    added = reading.added(with_added_beside(path, config, whole.get("added_tokens"), vocab), vocab)
    scores += [0.0] * (len(vocab) - len(scores)) if kind == "Unigram" else []
    ids = {token: id for id, token in enumerate(vocab)}
    if len(ids) != len(vocab):
        twice = next(token for id, token in enumerate(vocab) if ids[token] != id)
        reading.refuse(f"the token {twice[:80]!r} has two ids; each needs one")
    roles = _roles(path, config, ids, reading)
    unk = ids[roles[1]] if kind == "Unigram" else roles[1]
    if in_model and (type(unknown) is not type(unk) or unknown != unk):
        reading.refuse(
            f"model.{'unk_id' if kind == 'Unigram' else 'unk_token'} is {unknown!r:.80}, "
            f"unk_token is {roles[1][:80]!r} with the id {ids[roles[1]]}; they must agree"
        )
    reading.never_made(roles, merges, kind)
    return Pipeline(
        kind="byte_level_bpe" if byte_level else kind.lower(),
        vocab=tuple(vocab),
        scores=tuple(scores),
        merges=tuple(merges),
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        byte_fallback=reading.flag("model.byte_fallback", model.get("byte_fallback")),
        fuse_unk=reading.flag("model.fuse_unk", model.get("fuse_unk")),
        unk_in_model=in_model,
        roles=roles,
        specials=tuple(token for token in added if token.content not in roles),
        eats_space=tuple(t.content for t in added if t.lstrip and t.content in roles),
        num_between=ROBERTAS
        if path.name == "vocab.json"
        else reading.num_between(whole.get("post_processor"), roles),
        trim_offsets=byte_level and reading.trims_offsets(whole.get("post_processor")),
    )


def with_added_beside(
    path: Path, config: Mapping[str, Any], found: object, vocab: Sequence[str]
) -> object:
    """Return the field `added_tokens` of a `tokenizer.json`, with tokens of the files beside.

    Args:
        path: the tokenizer's file.
        config: the content of `tokenizer_config.json`.
        found: the field.
        vocab: tokens in the order of their ids.
    """
    if not isinstance(found, list | None):
        return found
    numbered = _beside(path, "added_tokens.json")
    entries = list(found or ())
    for source in (config, _beside(path, MAP_NAME)):
        listed = source.get("added_tokens_decoder")
        for id, token in listed.items() if isinstance(listed, dict) else ():
            if isinstance(token, dict) and id.isdecimal():
                entries.append(token | {"id": int(id)})
        for field in ("additional_special_tokens", "extra_special_tokens"):
            names = source.get(field)
            names = list(names.values()) if isinstance(names, dict) else names
            for name in names if isinstance(names, list) else ():
                token = name if isinstance(name, dict) else {"content": name}
                entries.append({**token, "id": None, "special": True})
    entries += [{"content": name, "id": id, "normalized": True} for name, id in numbered.items()]
    ids: dict[str, Any] = {token: id for id, token in enumerate(vocab)} | numbered
    merged: dict[str, Any] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            return entries  # refused by whoever reads them
        merged.setdefault(entry["content"], dict(entry))
    last = max([len(vocab) - 1, *(e["id"] for e in merged.values() if type(e.get("id")) is int)])
    for name, entry in merged.items():
        if "id" in entry and entry["id"] is None:  # of no list with ids: as in the vocabulary
            entry["id"] = ids.get(name, last + 1)
            last += entry["id"] == last + 1
    return list(merged.values())


def _beside(path: Path, name: str) -> dict[str, Any]:
    file = path.with_name(name)
    return read_json_object(file, max_bytes=MAX_FILE_BYTES) if file.is_file() else {}


def _from_two_files(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `tokenizer.json` of RoBERTa's older pair of files."""
    merges = path.with_name("merges.txt")
    if not merges.is_file():
        raise UserError(f"{path} has no merges.txt beside it; a byte-level BPE needs both")
    lines = read_text(merges, max_bytes=MAX_FILE_BYTES).removesuffix("\n").split("\n")
    if len(lines) > MAX_TOKENS:
        raise UserError(f"{merges} has more than {MAX_TOKENS:,} lines; that is no list of merges")
    lines = [line.removesuffix("\r") for line in lines[lines[0].startswith("#version") :]]
    vocab = read_json_object(path, max_bytes=MAX_FILE_BYTES)
    prefix = config.get("add_prefix_space", False)
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": lines},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": prefix},
        "post_processor": {"type": "ByteLevel", "trim_offsets": config.get("trim_offsets")},
        "added_tokens": [
            {"content": token, "id": vocab[token], "special": True, "lstrip": token == "<mask>"}
            for names in _USUAL.values()
            for token in names[:1]
            if token in vocab
        ],
    }


def _roles(
    path: Path, config: Mapping[str, Any], ids: Mapping[str, int], reading: Reading
) -> tuple[str, ...]:
    """Return the special tokens: as the files beside say, else by the usual names."""
    sources = (config, _beside(path, MAP_NAME))
    found: list[str] = []
    for role in ROLES:
        stated = None
        for name in (role, _OTHER_ROLES.get(role, role)):
            for source in sources:
                value = source.get(name)
                value = value.get("content") if isinstance(value, dict) else value
                stated = value if stated is None else stated
        if stated is None:
            stated = next((token for token in _USUAL[role] if token in ids), None)
        if not isinstance(stated, str) or stated not in ids:
            reading.refuse(
                f"{role} is {short(stated)}; a token of the vocabulary is needed, named in "
                f"{CONFIG_NAME} or {MAP_NAME}"
            )
        found.append(stated)
    if len(set(found)) != len(found):
        reading.refuse(f"the special tokens {', '.join(t[:40] for t in found)} must be different")
    return tuple(found)
