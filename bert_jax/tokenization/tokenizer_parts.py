"""Checks of a tokenizer's files: only some parts of a `tokenizer.json` are allowed."""

import base64
import binascii
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken

from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import read_json_object, short
from bert_jax.files.untrusted.whole_file import read_text
from bert_jax.tokenization.split_pattern import MAX_PATTERN, takes_linear_time
from bert_jax.tokenization.tokenizer import (
    ADDED_FLAGS,
    CONFIG_NAME,
    MAX_FILE_BYTES,
    MAX_TOKEN_CHARS,
    MAX_TOKENS,
    SPACE,
)

MAP_NAME = "special_tokens_map.json"
ROBERTAS = 2  # separators between two texts in RoBERTa
_MAX_PARTS, _MAX_PAIR = 64, 16
"""Largest number of parts in a Sequence (a SentencePiece export has 37) and in a template."""
_MAX_CHARSMAP = 1 << 20  # bytes; XLM-R's character map, which covers all of Unicode, has 240,000
_MAX_REPLACED = 256  # bytes that may replace one character in a character map; NFKC has up to 33
_BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_PLAIN = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents", "Lowercase")
# One character or class, which may be repeated: this takes time proportional to the text.
_LINEAR = re.compile(r"(?:\\s|\\n|[^\\\[\](){}*+?.|^$]|\[[^\]\\^]{1,64}\])(?:\+|\{[1-9],\})?")
_LOOK = r"\(\?<?[=!](?:\\A|\[(?:[^\\\[\]]|\\p\{M\}|\\x\{[0-9a-f]{1,6}\})+\])\)"
_PLACE = re.compile(rf"{_LOOK}(?:\|?{_LOOK})*")
"""Form of patterns that consist of lookarounds only, and so match positions, not characters."""
AT_START, AT_END = r"\A +", rf"(?<![ {SPACE}])[ {SPACE}]+\z"
"""Patterns for spaces at the beginning and at the end of a text; both take linear time."""
_SPACES = r"\s{2,}|[\n\r\t]"
"""Pattern of white space that DeBERTa's tokenizer in Transformers 5 replaces by one space."""


class Reading:
    """A tokenizer's file and the files beside it. Methods raise a UserError for a bad field."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def whole(self) -> dict[str, Any]:
        """Content of the file, if it is a JSON file."""
        found = read_json_object(self.path, max_bytes=MAX_FILE_BYTES)
        model = found.get("model")
        if isinstance(model, dict) and "vocab" in model:  # files of 2020 do not name the type
            kind = "BPE" if "merges" in model else "WordPiece"
            model.setdefault("type", "Unigram" if isinstance(model["vocab"], list) else kind)
        return found

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Content of `tokenizer_config.json` in the directory, or {} if the file is missing."""
        return self.beside(CONFIG_NAME)

    def beside(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file in the directory, or {} if the file is missing."""
        file = self.path.with_name(name)
        return read_json_object(file, max_bytes=MAX_FILE_BYTES) if file.is_file() else {}

    def lines(self, name: str) -> list[str]:
        """Return the lines of a text file in the directory."""
        path = self.path.with_name(name)
        # `splitlines` would split at U+2028, which is a token of multilingual uncased BERT.
        lines = read_text(path, max_bytes=MAX_FILE_BYTES).removesuffix("\n").split("\n")
        if len(lines) > MAX_TOKENS:
            raise UserError(f"{path} has more than {MAX_TOKENS:,} lines, which is the limit")
        return [line.removesuffix("\r") for line in lines]

    def refuse(self, what: str) -> NoReturn:
        """Raise a UserError that names the file."""
        raise UserError(f"{self.path}: {what}")

    def wrong(self, name: str, found: object, right: str) -> NoReturn:
        """Raise a UserError that shows the value of a field and says what is expected."""
        self.refuse(f"{name} is {short(found)}; {right}")

    def mapping(self, name: str, found: object) -> dict[str, Any]:
        """Return `found` if it is a JSON object, or raise a UserError."""
        return found if isinstance(found, dict) else self.wrong(name, found, "expected an object")

    def one_of(self, name: str, found: object, right: tuple[Any, ...]) -> Any:
        """Return the entry of `right` equal to `found`, also in type, or raise a UserError."""
        for value in right:
            if type(found) is type(value) and found == value:
                return value
        return self.wrong(name, found, f"expected {' or '.join(map(repr, right))}")

    def flag(self, name: str, found: object, default: bool = False) -> bool:
        """Return a boolean field, or `default` if the field is missing."""
        return default if found is None else bool(self.one_of(name, found, (True, False)))

    def text(self, name: str, found: object, most: int = 1) -> str:
        """Return `found` if it is a string of at most `most` characters, or raise a UserError."""
        if not isinstance(found, str) or len(found) > most:
            self.wrong(name, found, f"expected a text of at most {most:,} characters")
        return found

    def token(self, name: str, found: object) -> str:
        """Return `found` if it is a string of valid length for a token, or raise a UserError."""
        if not isinstance(found, str) or not 0 < len(found) <= MAX_TOKEN_CHARS:
            self.wrong(name, found, f"expected a token of 1 to {MAX_TOKEN_CHARS} characters")
        return found

    def listing(self, name: str, found: object, most: int) -> list[Any]:
        """Return `found` if it is a list of at most `most` entries, or raise a UserError."""
        if not isinstance(found, list) or len(found) > most:
            self.wrong(name, found, f"expected a list of at most {most:,} entries")
        return found

    def parts(self, name: str, members: str) -> list[dict[str, Any]]:
        """Return the part in a field, or the parts of a Sequence, or [] if the field is missing."""
        if (found := self.whole.get(name)) is None:
            return []
        part = self.mapping(name, found)
        if part.get("type") != "Sequence":
            return [part]
        name = f"{name}.{members}"
        listed = self.listing(name, part.get(members), _MAX_PARTS)
        return [self.mapping(f"{name}[{i}]", each) for i, each in enumerate(listed)]

    def normalizers(self) -> tuple[dict[str, Any], ...]:
        """Return the normalizers; refuse normalizers that could make a text many times longer."""
        found = tuple(self._normalizer(part) for part in self.parts("normalizer", "normalizers"))
        places = [p for p in found if _PLACE.fullmatch(p.get("pattern", {}).get("Regex", ""))]
        if len(places) > 2 or sum(part["type"] == "Precompiled" for part in found) > 1:
            self.refuse("normalizer could make a text many times longer; expected at most one "
                        "Precompiled, and at most two that insert a character")  # fmt: skip
        return found

    def _normalizer(self, part: Mapping[str, Any]) -> dict[str, Any]:
        checks: dict[str, dict[str, Callable[[str, object], Any]]] = {
            **{kind: {} for kind in _PLAIN},
            "Strip": {"strip_left": self.flag, "strip_right": self.flag},
            "Prepend": {"prepend": self.text},
            # `text` allows one character: several longer parts would multiply a text's length.
            "Replace": {"pattern": self._pattern, "content": self.text},
            "Precompiled": {"precompiled_charsmap": self._charsmap},
        }
        kind = self.one_of("normalizer.type", part.get("type"), tuple(checks))
        fields = checks[kind].items()
        return {"type": kind} | {f: check(f"normalizer.{f}", part.get(f)) for f, check in fields}

    def _pattern(self, name: str, found: object, *, splits: bool = False) -> dict[str, str]:
        """Return `found`, a string or regex named `name`; check its speed if it `splits` text."""
        pattern = self.mapping(name, found)
        for kind, most in (("String", 80), ("Regex", 1 << 14)):
            if set(pattern) == {kind} and pattern[kind]:
                text = self.text(name, pattern[kind], MAX_PATTERN if splits else most)
                known = text in (AT_START, AT_END, _SPACES) or _PLACE.fullmatch(text)
                if kind == "Regex" and splits and not takes_linear_time(text):
                    self.refuse(
                        f"{name} {text[:80]!r} may take more than linear time; expected "
                        "alternatives of characters and classes, without nested repetition"
                    )
                if kind == "Regex" and not (splits or known or _LINEAR.fullmatch(text)):
                    self.refuse(f"{name} {text[:80]!r} is not one character or class, once or more")
                return {kind: text}
        return self.wrong(name, pattern, "expected a String or a Regex")

    def _charsmap(self, name: str, found: object) -> str:
        """Check SentencePiece's character map: a trie, then replacements that each end with 0."""
        encoded = self.text(name, found, _MAX_CHARSMAP * 4 // 3 + 4)
        try:
            raw = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UserError(f"{self.path}: {name} is not base64 ({error})") from error
        size = int.from_bytes(raw[:4], "little")
        texts = raw[4 + size :]
        if len(raw) < 8 or size % 4 or not 0 < size <= len(raw) - 4 or len(raw) > _MAX_CHARSMAP:
            self.refuse(f"{name} is invalid: {len(raw):,} bytes, {size:,} of them a trie")
        if max(map(len, texts.split(b"\0"))) > _MAX_REPLACED:
            self.refuse(f"{name} makes more than {_MAX_REPLACED} bytes of one character")
        return encoded

    def pre_tokenizer(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Check a pre-tokenizer, which divides a text, and return its canonical form."""
        kinds = ("ByteLevel", "Metaspace", "WhitespaceSplit", "Split", "Digits", "Punctuation")
        kind = self.one_of("pre_tokenizer.type", part.get("type"), kinds)
        if kind == "WhitespaceSplit":
            return {"type": kind}
        if kind == "Digits":
            each = self.flag("pre_tokenizer.individual_digits", part.get("individual_digits"))
            return {"type": kind, "individual_digits": each}
        if kind in ("Split", "Punctuation"):
            behavior = part.get("behavior", "Isolated" if kind == "Punctuation" else None)
            behavior = self.one_of("pre_tokenizer.behavior", behavior, _BEHAVIORS)
            if kind == "Punctuation":
                return {"type": kind, "behavior": behavior}
            pattern = self._pattern("pre_tokenizer.pattern", part.get("pattern"), splits=True)
            invert = self.flag("pre_tokenizer.invert", part.get("invert"))
            return {"type": kind, "pattern": pattern, "behavior": behavior, "invert": invert}
        asked = part.get("add_prefix_space", True)
        prefix = self.flag("pre_tokenizer.add_prefix_space", asked, default=kind == "Metaspace")
        if kind == "ByteLevel":
            use_regex = self.flag("pre_tokenizer.use_regex", part.get("use_regex"), default=True)
            rest = {"trim_offsets": True, "use_regex": use_regex}
            return {"type": kind, "add_prefix_space": prefix, **rest}
        self.one_of("pre_tokenizer.replacement", part.get("replacement"), (SPACE,))
        scheme = part.get("prepend_scheme", "always" if prefix else "never")
        scheme = self.one_of("pre_tokenizer.prepend_scheme", scheme, ("always", "first", "never"))
        split = self.flag("pre_tokenizer.split", part.get("split"), default=True)
        return {"type": kind, "replacement": SPACE, "prepend_scheme": scheme, "split": split}

    @functools.cached_property
    def pair(self) -> list[str]:
        """Template of two texts, such as [CLS] A [SEP] B [SEP]; empty if no tokens are added."""
        parts = self.parts("post_processor", "processors")
        makers = (each for each in parts if each.get("type") != "ByteLevel")  # only trims offsets
        return [name for maker in makers for name in self._pair(maker)]

    def num_between(self, roles: tuple[str, ...]) -> int:
        """Return the number of separators between two texts; 1 if the file adds no separators."""
        made = self.pair
        cls, sep = roles[2:4]
        rows = {number: [cls, "A", *[sep] * number, "B", sep] for number in (1, 2)}
        for number, row in rows.items():
            if made == row:
                return number
        if made in ([], ["A", "B"], [cls, "A", "B"], [cls, "A", cls, "B"]):
            return 1
        return self.refuse(
            f"post_processor makes {' '.join(made)[:80]!r} of two texts A and B; expected "
            f"{' or '.join(repr(' '.join(row)) for row in rows.values()):.200}"
        )

    def marks_second(self) -> bool:
        """Return true if the post-processor gives the second of two texts token type 1."""
        makers = self.parts("post_processor", "processors")
        pairs = [maker.get("pair") or [] for maker in makers]
        pieces = [each for p in pairs for each in self.listing("post_processor.pair", p, _MAX_PAIR)]
        second = {"Sequence": {"id": "B", "type_id": 0}}
        return second not in pieces and "RobertaProcessing" not in [m.get("type") for m in makers]

    def trims_offsets(self) -> bool:
        """Return true if the offsets of a word in byte-level BPE exclude the space before it."""
        return any(
            self.flag("post_processor.trim_offsets", part.get("trim_offsets"), default=True)
            for part in self.parts("post_processor", "processors")
            if part.get("type") in ("ByteLevel", "RobertaProcessing")
        )

    def _pair(self, maker: Mapping[str, Any]) -> list[str]:
        """Return the output of one part of the post-processor for two texts (see `pair`)."""
        kinds = ("BertProcessing", "RobertaProcessing", "TemplateProcessing")
        kind = self.one_of("post_processor.type", maker.get("type"), kinds)
        if kind != "TemplateProcessing":
            cls, sep = (
                f"{pair[0] if isinstance(pair, list) and pair else pair}"
                for pair in (maker.get("cls"), maker.get("sep"))
            )
            return [cls, "A", *[sep] * (1 if kind == "BertProcessing" else ROBERTAS), "B", sep]
        pair = self.listing("post_processor.pair", maker.get("pair"), _MAX_PAIR)
        return [
            f"{token.get('id')}"
            for piece in pair
            for token in self.mapping("post_processor.pair", piece).values()
            if isinstance(token, dict)
        ]

    def unigram(self, model: Mapping[str, Any]) -> tuple[list[str], list[float]]:
        """Return the tokens in the order of their ids, and their scores."""
        pairs = model.get("vocab")
        if not isinstance(pairs, list) or not 0 < len(pairs) <= MAX_TOKENS:
            self.wrong("model.vocab", pairs, f"expected a list of 1 to {MAX_TOKENS:,} pairs")
        tokens: list[str] = []
        scores: list[float] = []
        for i, pair in enumerate(pairs):
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[1]) not in (int, float):
                self.wrong(f"model.vocab[{i}]", pair, "expected a token and a number")
            if not abs(pair[1]) < 1e30:
                self.refuse(f"model.vocab[{i}] has the score {pair[1]!r:.40}; it must be finite")
            tokens.append(self.token(f"model.vocab[{i}]", pair[0]))
            scores.append(float(pair[1]))
        return tokens, scores

    def bpe(self, model: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the tokens in the order of their ids, and the merges in the order of priority."""
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            self.one_of(f"model.{name}", model.get(name) or "", ("",))
        if model.get("dropout") not in (None, 0):
            self.wrong("model.dropout", model["dropout"], "expected null; dropout randomises ids")
        tokens = self.vocab(model)
        known = set(tokens)
        listed = self.listing("model.merges", model.get("merges"), MAX_TOKENS)
        merges: dict[tuple[str, str], None] = {}
        for i, merge in enumerate(listed):
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(pair, list) or len(pair) != 2 or not all(
                isinstance(part, str) for part in pair
            ):  # fmt: skip
                self.wrong(f"model.merges[{i}]", merge, "expected two tokens")
            if missing := [t for t in (*pair, "".join(pair)) if t not in known]:
                self.refuse(f"model.merges[{i}]: {missing[0][:80]!r} is not in model.vocab")
            merges[pair[0], pair[1]] = None
        if len(merges) != len(listed):
            self.refuse("model.merges has a pair twice; expected each pair once")
        return tokens, list(merges)

    def vocab(self, model: Mapping[str, Any]) -> list[str]:
        """Return the tokens of `model.vocab` (token to id), in the order of their ids."""
        ids = self.mapping("model.vocab", model.get("vocab"))
        if not 0 < len(ids) <= MAX_TOKENS:
            self.refuse(f"model.vocab has {len(ids):,} tokens; expected 1 to {MAX_TOKENS:,}")
        tokens: list[Any] = [None] * len(ids)
        for token, id in ids.items():
            name = f"model.vocab[{token[:80]!r}]"
            self.token(name, token)
            if type(id) is not int or not 0 <= id < len(tokens):
                right = f"need the ids 0 to {len(tokens) - 1}, each once"
                self.wrong(name, id, f"the {len(tokens):,} tokens {right}")
            if tokens[id] is not None:
                self.refuse(
                    f"model.vocab gives the id {id} to {tokens[id][:80]!r} and to {token[:80]!r}"
                )
            tokens[id] = token
        return tokens

    def added(self, listed: object, vocab: list[str]) -> tuple[AddedToken, ...]:
        """Return the added tokens of all files in the directory, in the order of their ids.

        `listed` is `added_tokens` of a `tokenizer.json`. Tokens with new ids are added to `vocab`.
        """
        listed = [] if listed is None else self.listing("added_tokens", listed, MAX_TOKENS)
        found = self._with_beside(listed, vocab)
        entries = [self.mapping(f"added_tokens[{i}]", each) for i, each in enumerate(found)]
        for i, entry in enumerate(entries):
            if type(entry.get("id")) is not int:
                self.wrong(f"added_tokens[{i}].id", entry.get("id"), "expected a number")
        result: dict[str, AddedToken] = {}
        for i, entry in sorted(enumerate(entries), key=lambda pair: pair[1]["id"]):
            content = self.token(f"added_tokens[{i}].content", entry.get("content"))
            id = entry["id"]
            if id == len(vocab) < MAX_TOKENS:
                vocab.append(content)
            if not 0 <= id < len(vocab) or vocab[id] != content:
                self.refuse(
                    f"added_tokens[{i}] gives {content[:80]!r} the id {id!r:.40}, which is another "
                    f"token's id, or is beyond the next free id ({len(vocab)})"
                )
            flags = {n: self.flag(f"added_tokens[{i}].{n}", entry.get(n)) for n in ADDED_FLAGS}
            result[content] = AddedToken(content, **flags)
        return tuple(result.values())

    def _with_beside(self, listed: list[Any], vocab: list[str]) -> list[Any]:
        """Return the entries of `added_tokens` and entries for the tokens that other files add."""
        numbered = self.beside("added_tokens.json")
        entries = list(listed)
        for source in (self.config, self.beside(MAP_NAME)):
            by_id = source.get("added_tokens_decoder")
            for id, token in by_id.items() if isinstance(by_id, dict) else ():
                if isinstance(token, dict) and id.isdecimal():
                    entries.append(token | {"id": int(id)})
            for field in ("additional_special_tokens", "extra_special_tokens"):
                names = source.get(field)
                names = list(names.values()) if isinstance(names, dict) else names
                for name in names if isinstance(names, list) else ():
                    token = name if isinstance(name, dict) else {"content": name}
                    entries.append({**token, "id": None, "special": True})
        entries += [{"content": n, "id": id, "normalized": True} for n, id in numbered.items()]
        ids: dict[str, Any] = {token: id for id, token in enumerate(vocab)} | numbered
        merged: dict[str, Any] = {}
        for entry in entries:
            if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
                return entries  # the caller raises the error
            merged.setdefault(entry["content"], dict(entry))
        given = [entry["id"] for entry in merged.values() if type(entry.get("id")) is int]
        last = max([len(vocab) - 1, *given])
        for name, entry in merged.items():
            if "id" in entry and entry["id"] is None:  # use the id in the vocabulary, or the next
                entry["id"] = ids.get(name, last + 1)
                last += entry["id"] == last + 1
        return list(merged.values())
