"""Reading WordPiece tokenizers from `vocab.txt` and `tokenizer.json`.

A `tokenizer.json` can describe any pipeline. Only BERT's is accepted, field by field, and the
tokenizer is built anew from those fields: what else such a file may carry (truncation, padding)
never takes effect.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.tokenization.tokenizer import (
    CONFIG_NAME,
    MAX_FILE_BYTES,
    MAX_TOKEN_CHARS,
    MAX_TOKENS,
    SPECIAL_TOKENS,
    AddedToken,
)
from bert_jax.tokenization.tokenizer_json import with_added_beside
from bert_jax.tokenization.tokenizer_parts import Reading
from bert_jax.tokenization.wordpiece import CONTINUATION, WordPieceOptions, WordPieceTokenizer
from bert_jax.untrusted.json_file import read_json_object, short
from bert_jax.untrusted.whole_file import read_text


def load_wordpiece(path: Path, *, lowercase: bool | None = None) -> WordPieceTokenizer:
    """Read `vocab.txt` or `tokenizer.json`, with the `tokenizer_config.json` beside it if any.

    A `vocab.txt` does not say whether text is lower-cased. In this order: `tokenizer_config.json`,
    `lowercase`, and else a vocabulary without upper-case words means lower-cased text. Added tokens
    are those of `tokenizer.json` and of the files beside that name some.

    Raises:
        UserError: the file is not sound, or two sources contradict each other.
    """
    config_path = path.with_name(CONFIG_NAME)
    config = (
        read_json_object(config_path, max_bytes=MAX_FILE_BYTES) if config_path.is_file() else {}
    )
    stated = _stated_lowercase(config_path, config)
    if None not in (lowercase, stated) and lowercase != stated:
        raise UserError(
            f"{config_path}: do_lower_case is {stated}, the option says lowercase={lowercase}; "
            "drop the option or correct the file"
        )
    if path.suffix == ".json":
        vocab, options = _read_tokenizer_json(path)
        wanted = lowercase if stated is None else stated
        if wanted is not None and wanted != options.lowercase:
            source = "the option" if stated is None else f"do_lower_case in {config_path.name}"
            raise UserError(
                f"{path}: normalizer.lowercase is {options.lowercase}, {source} says {wanted}; "
                "they must agree (transformers would follow tokenizer_config.json)"
            )
        pieces, listed = list(vocab), read_json_object(path, max_bytes=MAX_FILE_BYTES)
        added = _added(path, config, listed.get("added_tokens"), vocab)
        beside = path.with_name("vocab.txt")
        if beside.is_file() and _read_vocab_txt(beside) not in (pieces, vocab):
            raise UserError(
                f"{path} and {beside.name} beside it list different tokens; remove the wrong one"
            )
        return WordPieceTokenizer(vocab, options, added, where=f"{path}, model.vocab entry {{}}")
    vocab = _read_vocab_txt(path)
    if stated is not None:
        lowercase = stated
    if lowercase is None:
        lowercase = not has_upper_case(vocab)
    options = _apply_config(config_path, config, WordPieceOptions(lowercase=lowercase))
    added = _added(path, config, None, vocab)
    return WordPieceTokenizer(vocab, options, added, where=f"{path}, line {{}}")


def says_casing(directory: Path) -> bool:
    """Whether the files beside a `vocab.txt` say if text is lower-cased."""
    config = directory / CONFIG_NAME
    found = read_json_object(config, max_bytes=MAX_FILE_BYTES) if config.is_file() else {}
    return (directory / "tokenizer.json").is_file() or found.get("do_lower_case") is not None


def has_upper_case(vocab: list[str]) -> bool:
    """Whether any word of letters differs from its lower case: text was not lower-cased.

    Tokens with other characters do not count: uncased vocabularies hold `[CLS]` and `<S>`.
    """
    words = (token.removeprefix(CONTINUATION) for token in vocab)
    return any(word != word.lower() and word.isalpha() for word in words)


def _read_vocab_txt(path: Path) -> list[str]:
    text = read_text(path, max_bytes=MAX_FILE_BYTES)
    if text.count("\n") > MAX_TOKENS:
        raise UserError(f"{path} has more than {MAX_TOKENS:,} lines; that is no vocabulary")
    # Not splitlines: U+2028 is a token of the published multilingual uncased vocabulary.
    lines = text.removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines]


def _stated_lowercase(path: Path, config: dict[str, Any]) -> bool | None:
    stated = config.get("do_lower_case")
    if stated is not None and not isinstance(stated, bool):
        raise UserError(f"{path}: do_lower_case is {stated!r}; true or false is needed")
    return stated


def _apply_config(
    path: Path, config: dict[str, Any], options: WordPieceOptions
) -> WordPieceOptions:
    """`options` with what `tokenizer_config.json` says on the rest."""
    accents = config.get("strip_accents", options.strip_accents)
    if accents is not None and not isinstance(accents, bool):
        raise UserError(f"{path}: strip_accents is {accents!r}; true, false or null is needed")
    cjk = config.get("tokenize_chinese_chars", options.split_cjk)
    if not isinstance(cjk, bool):
        raise UserError(f"{path}: tokenize_chinese_chars is {cjk!r}; true or false is needed")
    limit = config.get("max_input_chars_per_word", options.max_word_chars)
    return replace(
        options,
        strip_accents=accents,
        split_cjk=cjk,
        max_word_chars=_positive(path, "max_input_chars_per_word", limit),
    )


def _positive(path: Path, field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not (1 <= value <= MAX_TOKEN_CHARS):
        raise UserError(
            f"{path}: {field} is {value!r:.40}; an integer from 1 to {MAX_TOKEN_CHARS} is needed "
            "(cutting one word takes the cube of that)"
        )
    return value


def _read_tokenizer_json(path: Path) -> tuple[list[str], WordPieceOptions]:
    """Vocabulary and options of a BERT `tokenizer.json`; any other pipeline is a UserError."""
    whole = read_json_object(path, max_bytes=MAX_FILE_BYTES)

    def part(name: str, type_name: str) -> dict[str, Any]:
        found = whole.get(name)
        found_type = found.get("type") if isinstance(found, dict) else found
        if not isinstance(found, dict) or found_type != type_name:
            raise UserError(
                f"{path}: {name}.type is {short(found_type)}; BERT's WordPiece tokenizer has "
                f"{type_name}"
            )
        return found

    def expect(name: str, value: object, *right: object) -> None:
        if not any(value is r or (isinstance(r, str) and value == r) for r in right):
            raise UserError(f"{path}: {name} is {short(value)}; {right[0]!r} is needed")

    model = part("model", "WordPiece")
    normalizer = part("normalizer", "BertNormalizer")
    part("pre_tokenizer", "BertPreTokenizer")
    expect("model.unk_token", model.get("unk_token"), "[UNK]")
    expect("model.continuing_subword_prefix", model.get("continuing_subword_prefix"), CONTINUATION)
    expect("normalizer.clean_text", normalizer.get("clean_text"), True)
    expect("normalizer.lowercase", normalizer.get("lowercase"), True, False)
    expect("normalizer.strip_accents", normalizer.get("strip_accents"), None, True, False)
    expect("normalizer.handle_chinese_chars", normalizer.get("handle_chinese_chars"), True, False)
    vocab = Reading(f"{path}").vocab(model.get("vocab"))
    limit = model.get("max_input_chars_per_word", 100)
    return vocab, WordPieceOptions(
        lowercase=normalizer["lowercase"],
        strip_accents=normalizer.get("strip_accents"),
        split_cjk=normalizer["handle_chinese_chars"],
        max_word_chars=_positive(path, "model.max_input_chars_per_word", limit),
    )


def _added(
    path: Path, config: dict[str, Any], listed: object, vocab: list[str]
) -> tuple[AddedToken, ...]:
    """Return added tokens besides the five special ones; tokens beyond the end join `vocab`."""
    found = with_added_beside(path, config, listed, vocab)
    added = Reading(f"{path}").added(found, vocab)
    return tuple(token for token in added if token.content not in SPECIAL_TOKENS)
