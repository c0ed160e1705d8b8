"""Reading of a `tokenizer.json` with byte-level BPE, or with BPE or Unigram and "▁" for spaces.

RoBERTa, GPT-NeoX (ModernBERT, Ettin) and Llama 3 (EuroBERT) have byte-level tokenizers; XLM-R and
Gemma (mmBERT) use "▁" for spaces. Only the parts that `tokenizer_parts` allows are accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from bert_jax.errors import UserError
from bert_jax.tokenization.tokenizer import CONFIG_NAME, ROLES, SPACE, SPECIAL_TOKENS
from bert_jax.tokenization.tokenizer_parts import MAP_NAME, ROBERTAS, Reading

_OTHER_ROLES = {"cls_token": "bos_token", "sep_token": "eos_token"}
MARKERS = ("ByteLevel", "Metaspace")  # pre-tokenizers that write spaces as other characters
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_ROBERTAS_NAMES = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")


@dataclass(frozen=True)
class Pipeline:
    """Everything that determines a tokenizer's ids.

    Attributes:
        kind: `byte_level_bpe`, `bpe` or `unigram`.
        scores: Log-probability of each token if `kind` is `unigram`, else empty.
        merges: Pairs in the order of their priority; empty for `unigram`.
        byte_fallback: Whether characters without a token become their bytes.
        fuse_unk: Whether consecutive characters without a token become one unknown token.
        ignore_merges: Whether a word that is in the vocabulary becomes one token without merges.
        unk_in_model: Whether characters without a token become the unknown token; else they vanish.
        roles: Tokens for padding, unknown characters, beginning, separator and mask. The separator
            may also have the first three roles.
        specials: Other added tokens, which are not split where they occur in a text.
        eats_space: Tokens of `roles` that include the space before them in Transformers.
        trim_offsets: Whether offsets exclude spaces in Transformers; here they always do.
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
    ignore_merges: bool = False

    @property
    def marker(self) -> dict[str, Any]:
        """Part that writes spaces as other characters: ByteLevel, Metaspace or a normalizer."""
        parts = [part for part in self.pre_tokenizer if part["type"] in MARKERS]
        return parts[0] if parts else self.normalizer[-1]

    @property
    def adds_space(self) -> bool:
        """Whether a space is put before a text that begins without one."""
        marker = self.marker
        if marker["type"] == "Replace":
            return any(part["type"] == "Prepend" for part in self.normalizer)
        return bool(marker.get("add_prefix_space", marker.get("prepend_scheme") != "never"))


def read_pipeline(reading: Reading) -> Pipeline:
    """Read `tokenizer.json` (or `vocab.json` and `merges.txt`); raise a UserError for bad parts."""
    two_files = reading.path.name == "vocab.json"
    if two_files:
        reading.whole = _from_two_files(reading)
    model = reading.mapping("model", reading.whole.get("model"))
    kind = reading.one_of("model.type", model.get("type"), ("BPE", "Unigram"))
    normalizer = reading.normalizers()
    parts = reading.parts("pre_tokenizer", "pretokenizers")
    pre_tokenizer = tuple(reading.pre_tokenizer(part) for part in parts)
    names = [part["type"] for part in pre_tokenizer]
    marks = [name for name in names if name in MARKERS]
    byte_level = marks == ["ByteLevel"]
    # `_REPLACE` must come last: spaces that a later normalizer makes could spell renamed tokens.
    if len(marks) > 1 or not (marks or normalizer[-1:] == (_REPLACE,)):
        reading.refuse(
            f"pre_tokenizer is {', '.join(names) or 'missing'}; expected one ByteLevel or "
            f"Metaspace, or a normalizer that ends by replacing spaces by {SPACE!r}"
        )
    spaced = reading.config.get("add_prefix_space", False)
    if byte_level and "Roberta" in f"{reading.config.get('tokenizer_class')}":
        found = next(part for part in pre_tokenizer if part["type"] == "ByteLevel")
        reading.one_of("pre_tokenizer.add_prefix_space", found.get("add_prefix_space"), (spaced,))
    if any(part.get("use_regex") is False for part in pre_tokenizer[:1]):
        reading.refuse("pre_tokenizer.use_regex is False; expected True, as no Split precedes it")
    scores: list[float] = []
    merges: list[tuple[str, str]] = []
    if kind == "BPE":
        vocab, merges = reading.bpe(model)
    elif byte_level:
        reading.refuse("pre_tokenizer is ByteLevel, but the model is Unigram; expected BPE")
    else:
        vocab, scores = reading.unigram(model)
    added = reading.added(reading.whole.get("added_tokens"), vocab)
    ids = {token: id for id, token in enumerate(vocab)}
    if len(ids) != len(vocab):
        twice = next(token for id, token in enumerate(vocab) if ids[token] != id)
        reading.refuse(f"the token {twice[:80]!r} has two ids; expected one id for each token")
    roles = _roles(reading, ids)
    field, unk = ("unk_token", roles[1]) if kind == "BPE" else ("unk_id", ids[roles[1]])
    unknown = model.get(field)
    if unknown is not None and roles[1] == roles[3]:
        reading.refuse(f"model.{field} is {unknown!r:.80}, the separator; a text could produce it")
    if unknown is not None and (type(unknown) is not type(unk) or unknown != unk):
        reading.refuse(
            f"model.{field} is {unknown!r:.80}, but unk_token is {roles[1][:80]!r} with the id "
            f"{ids[roles[1]]}; they must agree"
        )
    if kind == "BPE":  # for Unigram, `FastTokenizer` renames the special tokens
        made = {left + right for left, right in merges}
        for token in roles[:1] + roles[2:]:
            if token in made or len(token) == 1:
                said = "is made from text by model.merges, or is one character"
                reading.refuse(f"the special token {token[:80]!r} {said}; a text could produce it")
    else:
        scores += [0.0] * (len(vocab) - len(scores))
    return Pipeline(
        kind="byte_level_bpe" if byte_level else kind.lower(),
        vocab=tuple(vocab),
        scores=tuple(scores),
        merges=tuple(merges),
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        byte_fallback=reading.flag("model.byte_fallback", model.get("byte_fallback")),
        fuse_unk=reading.flag("model.fuse_unk", model.get("fuse_unk")),
        ignore_merges=reading.flag("model.ignore_merges", model.get("ignore_merges")),
        unk_in_model=unknown is not None,
        roles=roles,
        specials=tuple(token for token in added if token.content not in roles),
        eats_space=tuple(t.content for t in added if t.lstrip and t.content in roles),
        num_between=ROBERTAS if two_files else reading.num_between(roles),
        trim_offsets=byte_level and reading.trims_offsets(),
    )


def _from_two_files(reading: Reading) -> dict[str, Any]:
    """Make a `tokenizer.json` from RoBERTa's older pair of files."""
    if not reading.path.with_name("merges.txt").is_file():
        raise UserError(f"{reading.path} has no merges.txt beside it; a byte-level BPE needs both")
    merges = reading.lines("merges.txt")
    merges = merges[merges[0].startswith("#version") :]
    if not any(merge.startswith("Ġ") for merge in merges):  # HerBERT's
        why = "has no merge that begins with Ġ, a space; only byte-level BPE is read from this file"
        raise UserError(f"{reading.path.with_name('merges.txt')} {why}")
    vocab = reading.whole
    prefix = reading.config.get("add_prefix_space", False)
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": prefix},
        "post_processor": {"type": "ByteLevel", "trim_offsets": reading.config.get("trim_offsets")},
        "added_tokens": [
            {"content": token, "id": vocab[token], "special": True, "lstrip": token == "<mask>"}
            for token in _ROBERTAS_NAMES
            if token in vocab
        ],
    }


def _roles(reading: Reading, ids: Mapping[str, int]) -> tuple[str, ...]:
    """Find the special tokens by the names in other files, by usual names, or by ids.

    If the padding or the unknown token is not found, the separator takes its role.
    """
    sources = (reading.config, reading.beside(MAP_NAME))
    numbers = reading.beside("config.json")
    names = {id: token for token, id in ids.items()}
    pair = reading.pair
    ends = {"cls_token": pair[:1], "sep_token": pair[-1:]}
    found: dict[str, str] = {}

    def add(role: str, *usual: str) -> None:
        fields = (role, _OTHER_ROLES.get(role, role))
        values = [source.get(field) for field in fields for source in sources]
        values = [value.get("content") if isinstance(value, dict) else value for value in values]
        stated = [value for value in values if value is not None]
        stated = [value for value in stated if value in ends.get(role, ())] or stated
        stated += [token for token in usual if token in ids]
        listed = [numbers.get(f"{field}_id") for field in fields]
        stated += [names[id] for id in listed if type(id) is int and id in names]
        stated += [found["sep_token"]] if role in ("pad_token", "unk_token") else []
        token = stated[0] if stated else None
        if not isinstance(token, str) or token not in ids:
            right = f"expected a token of the vocabulary, named in {CONFIG_NAME} or {MAP_NAME}"
            reading.wrong(role, token, right)
        found[role] = token

    usual = dict(zip(ROLES, zip(_ROBERTAS_NAMES, SPECIAL_TOKENS, strict=True), strict=True))
    for role in ("sep_token", *(role for role in ROLES if role != "sep_token")):
        add(role, *usual[role])
    roles = tuple(found[role] for role in ROLES)
    others = [token for token in roles if token != found["sep_token"]]
    if len(set(others)) != len(others) or found["mask_token"] == found["sep_token"]:
        reading.refuse(
            f"the special tokens {', '.join(t[:40] for t in roles)} must be different; only the "
            "separator may have other roles, except that of the mask"
        )
    return roles
