"""Loading of a directory's tokenizer, and of WordPiece from `vocab.txt` or `tokenizer.json`.

A WordPiece `tokenizer.json` must have BERT's pipeline. The tokenizer is built from its checked
fields; other settings of the file (truncation, padding) have no effect.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import short
from bert_jax.files.untrusted.whole_file import read_bytes
from bert_jax.tokenization.tokenizer import (
    CONFIG_NAME,
    KIND_FILES,
    MAX_FILE_BYTES,
    MAX_TOKEN_CHARS,
    SPECIAL_TOKENS,
    Tokenizer,
)
from bert_jax.tokenization.tokenizer_parts import Reading
from bert_jax.tokenization.wordpiece import CONTINUATION, WordPieceOptions, WordPieceTokenizer


def load_wordpiece(reading: Reading) -> WordPieceTokenizer:
    """Read `vocab.txt` or `tokenizer.json`, and other files of the directory.

    Unless a file says otherwise, text is lower-cased if the vocabulary has no upper-case words.
    Raise a UserError if the file is invalid, or two files contradict each other.
    """
    path = reading.path
    config = Reading(path.with_name(CONFIG_NAME))  # so that messages name this file
    config.whole = reading.config
    flags = (None, True, False)
    stated = config.one_of("do_lower_case", config.whole.get("do_lower_case"), flags)
    # BertJapaneseTokenizer has a vocab.txt, too, but splits words in another way.
    for name, only in (("word_tokenizer_type", "basic"), ("subword_tokenizer_type", "wordpiece")):
        config.one_of(name, config.whole.get(name), (None, only))
    if path.suffix == ".json":
        vocab, options = _read_tokenizer_json(reading)
        if reading.num_between(SPECIAL_TOKENS) != 1:
            reading.refuse("post_processor puts two [SEP] between texts; expected one, as in BERT")
        for name, field, value in (
            ("do_lower_case", "lowercase", options.lowercase),
            ("strip_accents", "strip_accents", options.strips_accents),
            ("tokenize_chinese_chars", "handle_chinese_chars", options.split_cjk),
        ):
            given = config.one_of(name, config.whole.get(name), flags)
            if given not in (None, value):
                reading.refuse(
                    f"normalizer.{field} means {value}, but {name} in {CONFIG_NAME} is {given}; "
                    f"they must agree (transformers would follow {CONFIG_NAME})"
                )
        listed, where = reading.whole.get("added_tokens"), f"{path}, model.vocab entry {{}}"
        beside = path.with_name("vocab.txt")
    else:
        vocab, listed, where, beside = reading.lines(path.name), None, f"{path}, line {{}}", None
        accents, cjk = (config.whole.get(n) for n in ("strip_accents", "tokenize_chinese_chars"))
        # Upper case in a word (not in tokens such as [CLS] and <S>) shows that the text is cased.
        words = (token.removeprefix(CONTINUATION) for token in vocab)
        is_cased = any(word != word.lower() and word.isalpha() for word in words)
        options = WordPieceOptions(
            lowercase=not is_cased if stated is None else stated,
            strip_accents=config.one_of("strip_accents", accents, flags),
            split_cjk=config.flag("tokenize_chinese_chars", cjk, default=True),
            max_word_chars=_max_word_chars(config, "", config.whole),
        )
    pieces = list(vocab)
    added = [t for t in reading.added(listed, vocab) if t.content not in SPECIAL_TOKENS]
    if beside and beside.is_file() and reading.lines(beside.name) not in (pieces, vocab):
        why = "list different tokens; remove the wrong file"
        raise UserError(f"{path} and the {beside.name} in its directory {why}")
    return WordPieceTokenizer(vocab, options, added, where=where)


def says_casing(directory: Path) -> bool:
    """Return true if a file other than `vocab.txt` says whether text is lower-cased."""
    whole = directory / "tokenizer.json"
    return whole.is_file() or Reading(whole).config.get("do_lower_case") is not None


def _max_word_chars(reading: Reading, part: str, found: Mapping[str, Any]) -> int:
    value = found.get("max_input_chars_per_word", WordPieceOptions().max_word_chars)
    if type(value) is not int or not 1 <= value <= MAX_TOKEN_CHARS:
        right = f"expected an integer from 1 to {MAX_TOKEN_CHARS} (the time grows with its cube)"
        reading.wrong(f"{part}max_input_chars_per_word", value, right)
    return value


def _read_tokenizer_json(reading: Reading) -> tuple[list[str], WordPieceOptions]:
    """Read vocabulary and options; raise a UserError if the pipeline is not BERT's."""

    def check(part: str, kind: str, **right: tuple[Any, ...]) -> dict[str, Any]:
        found = reading.mapping(part, reading.whole.get(part))
        for field, values in {"type": (kind,), **right}.items():
            reading.one_of(f"{part}.{field}", found.get(field), values)
        return found

    both = (True, False)
    names = {"unk_token": ("[UNK]",), "continuing_subword_prefix": (CONTINUATION,)}
    model = check("model", "WordPiece", **names)
    normalizer = check(
        "normalizer", "BertNormalizer", clean_text=(True,), lowercase=both,
        strip_accents=(None, *both), handle_chinese_chars=both,
    )  # fmt: skip
    check("pre_tokenizer", "BertPreTokenizer")
    return reading.vocab(model), WordPieceOptions(
        lowercase=normalizer["lowercase"],
        strip_accents=normalizer.get("strip_accents"),
        split_cjk=normalizer["handle_chinese_chars"],
        max_word_chars=_max_word_chars(reading, "model.", model),
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from a directory or from one of its files.

    The files are `tokenizer.json`, `vocab.txt`, `vocab.json` with `merges.txt`, one `*.model`, or
    Marian's `source.spm` with `target.spm` and `vocab.json`. DeBERTa's `spm.model` gets a [MASK].
    If both exist, a `tokenizer.json` of BPE or Unigram is read, not a `*.model`, whose ids may
    differ (XLM-R's do), unless bert-jax wrote the `*.model`. Raise a UserError if there is no
    tokenizer, there are two kinds, or a file is invalid.
    """
    from bert_jax.tokenization.fast_tokenizer import FastTokenizer
    from bert_jax.tokenization.marian import read_marian
    from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer, with_mask
    from bert_jax.tokenization.tokenizer_json import read_pipeline

    path = Path(path)
    if path.is_dir():
        path = _find(path)
    elif not path.exists():
        raise UserError(
            f"{path}: no such file or directory; give a tokenizer.json, a vocab.txt, a vocab.json, "
            "a *.model, a source.spm, or a directory that has one"
        )
    if path.suffix == ".spm":
        return read_marian(Reading(path.with_name("vocab.json")))
    reading = Reading(path)
    if path.suffix == ".model":
        model = read_bytes(path, max_bytes=MAX_FILE_BYTES)
        model = with_mask(model) if path.name == "spm.model" else model
        tokenizer = SentencePieceTokenizer(model, where=f"{path}")
        if f"{reading.config.get('tokenizer_class')}".startswith("Albert"):
            reading.refuse("its class changes accents and quotation marks; give a tokenizer.json")
        for name in ("do_lower_case", "split_by_punct"):
            if reading.config.get(name):
                reading.refuse(f"{CONFIG_NAME} sets {name}; give a tokenizer.json")
        vocab = list(tokenizer.vocab)
        reading.added(None, vocab)  # appends the tokens that files beside the model add
        if more := vocab[tokenizer.vocab_size :]:
            reading.refuse(f"a file beside it adds {short(more[0])}; give a tokenizer.json")
        return tokenizer
    if path.name == "vocab.json" or _is_fast(reading):
        return FastTokenizer(read_pipeline(reading), where=f"{path}")
    if path.suffix in (".json", ".txt"):
        return load_wordpiece(reading)
    raise UserError(
        f"{path} is not a tokenizer file; give a file whose name ends in .json (tokenizer.json), "
        ".txt (vocab.txt), .model (SentencePiece) or .spm (Marian)"
    )


def _is_fast(reading: Reading) -> bool:
    """Return true if a file is a `tokenizer.json` of BPE or Unigram, not of WordPiece."""
    model = reading.whole.get("model") if reading.path.suffix == ".json" else None
    return isinstance(model, dict) and model.get("type") in ("BPE", "Unigram")


def _find(directory: Path) -> Path:
    """Return the file that defines a directory's tokenizer; raise UserError for none or several."""
    whole, model = directory / "tokenizer.json", directory / "tokenizer.model"
    models = sorted(directory.glob("*.model"))
    if (marian := directory / KIND_FILES["marian"][0]).is_file():
        return marian
    # A *.model that bert-jax wrote is the original. It never matches special tokens in text.
    if model.is_file() and Reading(model).config.get("kind") == "sentencepiece":
        return model
    if models and whole.is_file() and _is_fast(Reading(whole)):
        return whole
    wordpiece = [p for n in KIND_FILES["wordpiece"] if (p := directory / n).is_file()]
    found = wordpiece[:1] + models
    if len(found) > 1:
        some = f"{found[0].name} and {found[1].name} among them; give the path of one file"
        raise UserError(f"{directory} holds {len(found)} tokenizers, {some}")
    pair = [directory / name for name in KIND_FILES["fast"][1:]]
    if not found and not all(file.is_file() for file in pair):
        raise UserError(
            f"{directory} holds no tokenizer: it has no tokenizer.json, vocab.txt, *.model, "
            "source.spm, or vocab.json with merges.txt"
        )
    return (found or pair)[0]
