"""The parts of a `tokenizer.json` that are taken, each checked and in a canonical form."""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

from bert_jax.errors import UserError
from bert_jax.tokenization.tokenizer import MAX_TOKEN_CHARS, MAX_TOKENS, AddedToken
from bert_jax.untrusted.json_file import short

SPACE = "▁"
ROBERTAS = 2
"""Separators between two texts."""
_MAX_PARTS = 16
_MAX_CHARSMAP = 1 << 20
"""Bytes; XLM-R's, of all of Unicode, has 240,000."""
_MAX_REPLACED = 256
"""Bytes that such a map may make of one character; NFKC makes 33 at most."""
_ADDED_FLAGS = [field.name for field in fields(AddedToken)[1:]]
_PLAIN = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents", "Lowercase")
# One character or class, once or repeated: takes time in proportion to the text.
_LINEAR = re.compile(r"(?:\\s|\\n|[^\\\[\](){}*+?.|^$]|\[[^\]\\^]{1,64}\])(?:\+|\{[1-9],\})?")


class Reading:
    """Checks of the parts of one file; a part that is wrong raises a UserError that names it."""

    def __init__(self, where: str) -> None:
        self.where = where

    def refuse(self, what: str) -> NoReturn:
        """End the reading, with the name of the file."""
        raise UserError(f"{self.where}: {what}")

    def mapping(self, name: str, found: object) -> dict[str, Any]:
        """Check an object."""
        if not isinstance(found, dict):
            raise UserError(f"{self.where}: {name} is {short(found)}; an object is needed")
        return found

    def one_of(self, name: str, found: object, right: tuple[Any, ...]) -> Any:
        """One of the values that are right, of the same type."""
        for value in right:
            if type(found) is type(value) and found == value:
                return value
        raise UserError(
            f"{self.where}: {name} is {short(found)}; {' or '.join(map(repr, right))} is needed"
        )

    def flag(self, name: str, found: object, default: bool = False) -> bool:
        """Return true or false; the default where it is missing."""
        return default if found is None else bool(self.one_of(name, found, (True, False)))

    def text(self, name: str, found: object, most: int) -> str:
        """Return a text of at most so many characters."""
        if not isinstance(found, str) or len(found) > most:
            raise UserError(
                f"{self.where}: {name} is {short(found)}; a text of at most {most:,} characters "
                "is needed"
            )
        return found

    def parts(self, name: str, found: object, members: str) -> tuple[dict[str, Any], ...]:
        """Check a part, or the parts of a sequence."""
        if found is None:
            return ()
        part = self.mapping(name, found)
        if part.get("type") != "Sequence":
            return (part,)
        listed = part.get(members)
        if not isinstance(listed, list) or len(listed) > _MAX_PARTS:
            self.refuse(f"{name}.{members} is {short(listed)}; a list of at most {_MAX_PARTS}")
        return tuple(self.mapping(f"{name}.{members}[{i}]", each) for i, each in enumerate(listed))

    def normalizer(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Check a part that changes characters."""
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
                self.refuse(f"normalizer.pattern is {short(pattern)}; a String or a Regex")
            return {"type": kind, "pattern": pattern, "content": content}
        if kind == "Precompiled":
            return {"type": kind, "precompiled_charsmap": self.charsmap(part)}
        return self.refuse(
            f"normalizer.type is {short(kind)}; {', '.join(_PLAIN)}, Strip, Prepend, Replace or "
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
        """Check a part that divides a text."""
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
            f"pre_tokenizer.type is {short(kind)}; ByteLevel, Metaspace or WhitespaceSplit is "
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

    def trims_offsets(self, found: object) -> bool:
        """Whether a word of a byte-level BPE is reported without the space before it."""
        parts = self.parts("post_processor", found, "processors")
        return any(
            self.flag("post_processor.trim_offsets", part.get("trim_offsets"), default=True)
            for part in parts
            if part.get("type") in ("ByteLevel", "RobertaProcessing")
        )

    def _pair(self, maker: Mapping[str, Any]) -> list[str]:
        """Check a row of the texts A and B, by the names of its tokens."""
        kinds = ("BertProcessing", "RobertaProcessing", "TemplateProcessing")
        kind = self.one_of("post_processor.type", maker.get("type"), kinds)
        if kind != "TemplateProcessing":
            cls, sep = (
                f"{pair[0] if isinstance(pair, list) and pair else pair}"
                for pair in (maker.get("cls"), maker.get("sep"))
            )
            return [cls, "A", *[sep] * (1 if kind == "BertProcessing" else ROBERTAS), "B", sep]
        pair = maker.get("pair")
        if not isinstance(pair, list) or len(pair) > _MAX_PARTS:
            self.refuse(f"post_processor.pair is {short(pair)}; a list of at most {_MAX_PARTS}")
        return [
            f"{token.get('id')}"
            for piece in pair
            for token in self.mapping("post_processor.pair", piece).values()
            if isinstance(token, dict)
        ]

    def unigram(self, model: Mapping[str, Any]) -> tuple[list[str], list[float]]:
        """Tokens in the order of their ids, and their scores."""
        pairs = model.get("vocab")
        if not isinstance(pairs, list) or not 0 < len(pairs) <= MAX_TOKENS:
            self.refuse(f"model.vocab is {short(pairs)}; a list of 1 to {MAX_TOKENS:,} pairs")
        tokens: list[str] = []
        scores: list[float] = []
        for i, pair in enumerate(pairs):
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[1]) not in (int, float):
                self.refuse(f"model.vocab[{i}] is {short(pair)}; a token and a number are needed")
            if not abs(pair[1]) < 1e30:
                self.refuse(f"model.vocab[{i}] has the score {pair[1]!r:.40}; it must be finite")
            tokens.append(self.token(f"model.vocab[{i}]", pair[0]))
            scores.append(float(pair[1]))
        return tokens, scores

    def bpe(self, model: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, str]]]:
        """Tokens in the order of their ids, and merges in that of their priority."""
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            self.one_of(f"model.{name}", model.get(name) or "", ("",))
        if model.get("dropout") not in (None, 0):
            self.refuse(f"model.dropout is {short(model['dropout'])}; ids must not be random")
        self.one_of("model.ignore_merges", model.get("ignore_merges") or False, (False,))
        found = self.mapping("model.vocab", model.get("vocab"))
        for token in found:
            self.token(f"model.vocab[{token[:80]!r}]", token)
        tokens = self.vocab(found)
        listed = model.get("merges")
        if not isinstance(listed, list) or len(listed) > MAX_TOKENS:
            self.refuse(f"model.merges is {short(listed)}; a list of at most {MAX_TOKENS:,}")
        merges: dict[tuple[str, str], None] = {}
        for i, merge in enumerate(listed):
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(pair, list) or len(pair) != 2 or not all(
                isinstance(part, str) for part in pair
            ):  # fmt: skip
                self.refuse(f"model.merges[{i}] is {short(merge)}; two tokens are needed")
            missing = [t for t in (*pair, "".join(pair)) if t not in found]
            if missing:
                self.refuse(f"model.merges[{i}]: {missing[0][:80]!r} is not in model.vocab")
            merges[pair[0], pair[1]] = None
        if len(merges) != len(listed):
            self.refuse("model.merges has a pair twice")
        return tokens, list(merges)

    def vocab(self, found: object) -> list[str]:
        """Return the tokens of an object from token to id, in the order of their ids."""
        ids = self.mapping("model.vocab", found)
        if not 0 < len(ids) <= MAX_TOKENS:
            self.refuse(f"model.vocab has {len(ids):,} tokens; 1 to {MAX_TOKENS:,} are needed")
        tokens: list[Any] = [None] * len(ids)
        for token, id in ids.items():
            if type(id) is not int or not 0 <= id < len(tokens):
                self.refuse(
                    f"model.vocab[{token[:80]!r}] is {short(id)}; the {len(tokens):,} tokens need "
                    f"the ids 0 to {len(tokens) - 1}, each once"
                )
            if tokens[id] is not None:
                self.refuse(
                    f"model.vocab gives the id {id} to {tokens[id][:80]!r} and to {token[:80]!r}"
                )
            tokens[id] = token
        return tokens

    def token(self, name: str, found: object) -> str:
        """Check a token of the vocabulary."""
        if not isinstance(found, str) or not 0 < len(found) <= MAX_TOKEN_CHARS:
            raise UserError(
                f"{self.where}: {name} is {short(found)}; a token of 1 to {MAX_TOKEN_CHARS} "
                "characters is needed"
            )
        return found

    def added(self, found: object, vocab: list[str]) -> tuple[AddedToken, ...]:
        """Return added tokens in the order of ids, and extend `vocab` by tokens beyond its end."""
        result: dict[str, AddedToken] = {}
        if found is None:
            return ()
        if not isinstance(found, list) or len(found) > MAX_TOKENS:
            self.refuse(f"added_tokens is {short(found)}; a list is needed")
        entries = [self.mapping(f"added_tokens[{i}]", each) for i, each in enumerate(found)]
        for i, entry in enumerate(entries):
            if type(entry.get("id")) is not int:
                self.refuse(f"added_tokens[{i}].id is {short(entry.get('id'))}; a number")
        for i, entry in sorted(enumerate(entries), key=lambda pair: pair[1]["id"]):
            content = self.token(f"added_tokens[{i}].content", entry.get("content"))
            id = entry["id"]
            if id == len(vocab) < MAX_TOKENS:
                vocab.append(content)
            if not 0 <= id < len(vocab) or vocab[id] != content:
                self.refuse(
                    f"added_tokens[{i}] gives {content[:80]!r} the id {id!r:.40}; that is another "
                    f"token's, or beyond the next one ({len(vocab)})"
                )
            flags = {n: self.flag(f"added_tokens[{i}].{n}", entry.get(n)) for n in _ADDED_FLAGS}
            result[content] = AddedToken(content, **flags)
        return tuple(result.values())

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
