"""Reading a `tokenizer.json` that is no WordPiece: byte-level BPE, and pieces with "▁" for a space.

Such a file can describe any pipeline, and the library behind it runs what it says. Only parts on
the lists here are taken, each in a canonical form, and the tokenizer is built anew from those.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bert_jax.data.tokenizer import CONFIG_NAME, MAX_FILE_BYTES, MAX_TOKEN_CHARS, MAX_TOKENS
from bert_jax.errors import UserError
from bert_jax.untrusted.json_file import read_json_object
from bert_jax.untrusted.whole_file import read_text

SPACE = "▁"
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
_ROBERTAS = 2
"""Separators between two texts."""
_MAX_PARTS = 16
_MAX_CHARSMAP = 1 << 20
"""Bytes; XLM-R's, of all of Unicode, has 240,000."""
_MAX_REPLACED = 256
"""Bytes that such a map may make of one character; NFKC makes 33 at most."""
_PLAIN = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents", "Lowercase")
# One character or class, once or repeated: takes time in proportion to the text.
_LINEAR = re.compile(r"(?:\\s|\\n|[^\\\[\](){}*+?.|^$]|\[[^\]\\^]{1,64}\])(?:\+|\{[1-9],\})?")


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
        specials: other tokens that text never becomes.
        eats_space: special tokens that take the space before them, where Transformers reads them.
        num_between: separators between the two texts of a row.
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
    specials: tuple[str, ...] = ()
    eats_space: tuple[str, ...] = ()
    num_between: int = 1


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
    reading = _Reading(f"{path}")
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
    added = reading.added(whole.get("added_tokens"), vocab)
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
    specials = tuple(t for t in added if t not in roles)
    reading.never_made((*roles, *specials), merges, kind)
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
        specials=specials,
        eats_space=tuple(token for token, eats in added.items() if eats),
        num_between=_ROBERTAS
        if path.name == "vocab.json"
        else reading.num_between(whole.get("post_processor"), roles),
    )


def _beside(path: Path, name: str) -> dict[str, Any]:
    file = path.with_name(name)
    return read_json_object(file, max_bytes=MAX_FILE_BYTES) if file.is_file() else {}


def _from_two_files(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What `tokenizer.json` would be of RoBERTa's older pair of files."""
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
        "added_tokens": [
            {"content": token, "id": vocab[token], "special": True, "lstrip": token == "<mask>"}
            for names in _USUAL.values()
            for token in names[:1]
            if token in vocab
        ],
    }


def _roles(
    path: Path, config: Mapping[str, Any], ids: Mapping[str, int], reading: "_Reading"
) -> tuple[str, ...]:
    """Which token does what: as the files beside say, else by the usual names."""
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
                f"{role} is {_short(stated)}; a token of the vocabulary is needed, named in "
                f"{CONFIG_NAME} or {MAP_NAME}"
            )
        found.append(stated)
    if len(set(found)) != len(found):
        reading.refuse(f"the special tokens {', '.join(t[:40] for t in found)} must be different")
    return tuple(found)


class _Reading:
    """Checks of the parts of one file."""

    def __init__(self, where: str) -> None:
        self.where = where

    def refuse(self, what: str) -> NoReturn:
        raise UserError(f"{self.where}: {what}")

    def mapping(self, name: str, found: object) -> dict[str, Any]:
        if not isinstance(found, dict):
            raise UserError(f"{self.where}: {name} is {_short(found)}; an object is needed")
        return found

    def one_of(self, name: str, found: object, right: tuple[Any, ...]) -> Any:
        for value in right:
            if type(found) is type(value) and found == value:
                return value
        raise UserError(
            f"{self.where}: {name} is {_short(found)}; {' or '.join(map(repr, right))} is needed"
        )

    def flag(self, name: str, found: object, default: bool = False) -> bool:
        return default if found is None else bool(self.one_of(name, found, (True, False)))

    def text(self, name: str, found: object, most: int) -> str:
        if not isinstance(found, str) or len(found) > most:
            raise UserError(
                f"{self.where}: {name} is {_short(found)}; a text of at most {most:,} characters "
                "is needed"
            )
        return found

    def parts(self, name: str, found: object, members: str) -> tuple[dict[str, Any], ...]:
        """A part, or those of a sequence of parts."""
        if found is None:
            return ()
        part = self.mapping(name, found)
        if part.get("type") != "Sequence":
            return (part,)
        listed = part.get(members)
        if not isinstance(listed, list) or len(listed) > _MAX_PARTS:
            self.refuse(f"{name}.{members} is {_short(listed)}; a list of at most {_MAX_PARTS}")
        return tuple(self.mapping(f"{name}.{members}[{i}]", each) for i, each in enumerate(listed))

    def normalizer(self, part: Mapping[str, Any]) -> dict[str, Any]:
        kind = part.get("type")
        if kind in _PLAIN:
            return {"type": kind}
        if kind == "Strip":
            sides = ("strip_left", "strip_right")
            return {"type": kind} | {s: self.flag(f"normalizer.{s}", part.get(s)) for s in sides}
        if kind == "Prepend":
            return {
                "type": kind,
                "prepend": self.text("normalizer.prepend", part.get("prepend"), 1),
            }
        if kind == "Replace":
            pattern = self.mapping("normalizer.pattern", part.get("pattern"))
            # No more than a character: several such parts would multiply a text's length.
            content = self.text("normalizer.content", part.get("content"), 1)
            if set(pattern) == {"String"}:
                pattern = {"String": self.text("normalizer.pattern", pattern["String"], 80)}
            elif set(pattern) == {"Regex"}:
                regex = self.text("normalizer.pattern", pattern["Regex"], 80)
                if not _LINEAR.fullmatch(regex):
                    self.refuse(f"normalizer.pattern {regex!r} is no repeated character")
                pattern = {"Regex": regex}
            if len(pattern) != 1 or not next(iter(pattern.values())):
                self.refuse(f"normalizer.pattern is {_short(pattern)}; a String or a Regex")
            return {"type": kind, "pattern": pattern, "content": content}
        if kind == "Precompiled":
            return {"type": kind, "precompiled_charsmap": self.charsmap(part)}
        return self.refuse(
            f"normalizer.type is {_short(kind)}; {', '.join(_PLAIN)}, Strip, Prepend, Replace or "
            "Precompiled is needed"
        )

    def charsmap(self, part: Mapping[str, Any]) -> str:
        """SentencePiece's map of characters: a trie, then what they become, ended by 0 each."""
        name = "normalizer.precompiled_charsmap"
        encoded = self.text(name, part.get("precompiled_charsmap"), _MAX_CHARSMAP * 4 // 3 + 4)
        try:
            raw = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UserError(f"{self.where}: {name} is not base64 ({error})") from error
        size = int.from_bytes(raw[:4], "little")
        texts = raw[4 + size :]
        if len(raw) < 8 or size % 4 or not 0 < size <= len(raw) - 4 or len(raw) > _MAX_CHARSMAP:
            self.refuse(f"{name} is not sound: {len(raw):,} bytes, {size:,} of them a trie")
        if max(map(len, texts.split(b"\0"))) > _MAX_REPLACED:
            self.refuse(f"{name} makes more than {_MAX_REPLACED} bytes of one character")
        return encoded

    def pre_tokenizer(self, part: Mapping[str, Any]) -> dict[str, Any]:
        kind = part.get("type")
        if kind == "WhitespaceSplit":
            return {"type": kind}
        if kind == "ByteLevel":
            self.one_of("pre_tokenizer.use_regex", part.get("use_regex", True), (True,))
            prefix = part.get("add_prefix_space", True)
            return {
                "type": kind,
                "add_prefix_space": self.flag("pre_tokenizer.add_prefix_space", prefix),
                "trim_offsets": True,
                "use_regex": True,
            }
        if kind == "Metaspace":
            self.one_of("pre_tokenizer.replacement", part.get("replacement"), (SPACE,))
            prefix = self.flag(
                "pre_tokenizer.add_prefix_space", part.get("add_prefix_space"), default=True
            )
            scheme = part.get("prepend_scheme", "always" if prefix else "never")
            return {
                "type": kind,
                "replacement": SPACE,
                "prepend_scheme": self.one_of(
                    "pre_tokenizer.prepend_scheme", scheme, ("always", "first", "never")
                ),
                "split": self.flag("pre_tokenizer.split", part.get("split"), default=True),
            }
        return self.refuse(
            f"pre_tokenizer.type is {_short(kind)}; ByteLevel, Metaspace or WhitespaceSplit is "
            "needed"
        )

    def num_between(self, found: object, roles: tuple[str, ...]) -> int:
        """Separators between two texts; 1 where nothing puts special tokens into rows."""
        parts = self.parts("post_processor", found, "processors")
        makers = [part for part in parts if part.get("type") != "ByteLevel"]  # of offsets alone
        if not makers:
            return 1
        cls, sep = roles[2:4]
        rows = {number: [cls, "A", *[sep] * number, "B", sep] for number in (1, 2)}
        made = [name for maker in makers for name in self._pair(maker)]
        for number, row in rows.items():
            if made == row:
                return number
        return self.refuse(
            f"post_processor makes {' '.join(made)[:80]!r} of two texts A and B; "
            f"{' or '.join(repr(' '.join(row)) for row in rows.values()):.200} is needed"
        )

    def _pair(self, maker: Mapping[str, Any]) -> list[str]:
        """A row of the texts A and B, by the names of its tokens."""
        kinds = ("BertProcessing", "RobertaProcessing", "TemplateProcessing")
        kind = self.one_of("post_processor.type", maker.get("type"), kinds)
        if kind != "TemplateProcessing":
            cls, sep = (
                f"{pair[0] if isinstance(pair, list) and pair else pair}"
                for pair in (maker.get("cls"), maker.get("sep"))
            )
            return [cls, "A", *[sep] * (1 if kind == "BertProcessing" else _ROBERTAS), "B", sep]
        pair = maker.get("pair")
        if not isinstance(pair, list) or len(pair) > _MAX_PARTS:
            self.refuse(f"post_processor.pair is {_short(pair)}; a list of at most {_MAX_PARTS}")
        return [
            f"{token.get('id')}"
            for piece in pair
            for token in self.mapping("post_processor.pair", piece).values()
            if isinstance(token, dict)
        ]

    def unigram(self, model: Mapping[str, Any]) -> tuple[list[str], list[float]]:
        pairs = model.get("vocab")
        if not isinstance(pairs, list) or not 0 < len(pairs) <= MAX_TOKENS:
            self.refuse(f"model.vocab is {_short(pairs)}; a list of 1 to {MAX_TOKENS:,} pairs")
        tokens: list[str] = []
        scores: list[float] = []
        for i, pair in enumerate(pairs):
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[1]) not in (int, float):
                self.refuse(f"model.vocab[{i}] is {_short(pair)}; a token and a number are needed")
            if not abs(pair[1]) < 1e30:
                self.refuse(f"model.vocab[{i}] has the score {pair[1]!r:.40}; it must be finite")
            tokens.append(self.token(f"model.vocab[{i}]", pair[0]))
            scores.append(float(pair[1]))
        return tokens, scores

    def bpe(self, model: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, str]]]:
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            self.one_of(f"model.{name}", model.get(name) or "", ("",))
        if model.get("dropout") not in (None, 0):
            self.refuse(f"model.dropout is {_short(model['dropout'])}; ids must not be random")
        self.one_of("model.ignore_merges", model.get("ignore_merges") or False, (False,))
        found = self.mapping("model.vocab", model.get("vocab"))
        if len(found) > MAX_TOKENS:
            self.refuse(f"model.vocab has {len(found):,} tokens; the limit is {MAX_TOKENS:,}")
        tokens: list[str] = [""] * len(found)
        for token, id in found.items():
            self.token(f"model.vocab[{token[:80]!r}]", token)
            if type(id) is not int or not 0 <= id < len(tokens) or tokens[id]:
                self.refuse(
                    f"model.vocab[{token[:80]!r}] is {_short(id)}; the {len(tokens):,} tokens need "
                    f"the ids 0 to {len(tokens) - 1}, each once"
                )
            tokens[id] = token
        listed = model.get("merges")
        if not isinstance(listed, list) or len(listed) > MAX_TOKENS:
            self.refuse(f"model.merges is {_short(listed)}; a list of at most {MAX_TOKENS:,}")
        merges: dict[tuple[str, str], None] = {}
        for i, merge in enumerate(listed):
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(pair, list) or len(pair) != 2 or not all(
                isinstance(part, str) for part in pair
            ):  # fmt: skip
                self.refuse(f"model.merges[{i}] is {_short(merge)}; two tokens are needed")
            missing = [t for t in (*pair, "".join(pair)) if t not in found]
            if missing:
                self.refuse(f"model.merges[{i}]: {missing[0][:80]!r} is not in model.vocab")
            merges[pair[0], pair[1]] = None
        if len(merges) != len(listed):
            self.refuse("model.merges has a pair twice")
        return tokens, list(merges)

    def token(self, name: str, found: object) -> str:
        if not isinstance(found, str) or not 0 < len(found) <= MAX_TOKEN_CHARS:
            raise UserError(
                f"{self.where}: {name} is {_short(found)}; a token of 1 to {MAX_TOKEN_CHARS} "
                "characters is needed"
            )
        return found

    def added(self, found: object, vocab: list[str]) -> dict[str, bool]:
        """Added special tokens, and whether each takes the space before it; extends `vocab`."""
        result: dict[str, bool] = {}
        if found is None:
            return result
        if not isinstance(found, list) or len(found) > MAX_TOKENS:
            self.refuse(f"added_tokens is {_short(found)}; a list is needed")
        entries = [self.mapping(f"added_tokens[{i}]", each) for i, each in enumerate(found)]
        for i, entry in enumerate(entries):
            if type(entry.get("id")) is not int:
                self.refuse(f"added_tokens[{i}].id is {_short(entry.get('id'))}; a number")
        for i, entry in sorted(enumerate(entries), key=lambda pair: pair[1]["id"]):
            content = self.token(f"added_tokens[{i}].content", entry.get("content"))
            id = entry["id"]
            if entry.get("special") is not True:
                self.refuse(
                    f"added_tokens[{i}] is {content[:80]!r}, which is matched in text before the "
                    "model sees it; only special tokens may be added"
                )
            if id == len(vocab) < MAX_TOKENS:
                vocab.append(content)
            if not 0 <= id < len(vocab) or vocab[id] != content:
                self.refuse(
                    f"added_tokens[{i}] gives {content[:80]!r} the id {id!r:.40}; that is another "
                    f"token's, or beyond the next one ({len(vocab)})"
                )
            result[content] = entry.get("lstrip") is True
        return result

    def never_made(
        self, specials: tuple[str, ...], merges: list[tuple[str, str]], kind: str
    ) -> None:
        """Refuses special tokens that text could become. A Unigram's are renamed where it runs."""
        if kind == "Unigram":
            return
        made = {left + right for left, right in merges}
        for token in specials[:1] + specials[2:]:
            if token in made or len(token) == 1:
                self.refuse(
                    f"the special token {token[:80]!r} is made from text by model.merges, or is "
                    "one character; a text could place it"
                )


def _short(value: object) -> str:
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return "missing" if value is None else repr(value)[:80]
