"""Choice of the tokenizer that a directory holds."""

from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.files.untrusted.whole_file import read_bytes
from bert_jax.tokenization.tokenizer import KIND_FILES, MAX_FILE_BYTES, Tokenizer
from bert_jax.tokenization.tokenizer_parts import Reading


def load_tokenizer(path: str | Path, *, lowercase: bool | None = None) -> Tokenizer:
    """Read a tokenizer from a directory or from one of its files.

    Args:
        path: a directory holding `tokenizer.json`, `vocab.txt`, `vocab.json` with `merges.txt`, or
            one `*.model`, or such a file. A `tokenizer.json` that is no WordPiece counts before a
            `*.model` beside it (XLM-R's has other ids), unless that is an exported one of ours.
        lowercase: whether a `vocab.txt` without `tokenizer_config.json` is of lower-cased text;
            defaults to true unless the vocabulary has upper-case words.

    Raises:
        UserError: nothing there, two kinds at once, or a file that is not a sound tokenizer.
    """
    from bert_jax.tokenization.fast_tokenizer import FastTokenizer
    from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer
    from bert_jax.tokenization.tokenizer_json import read_pipeline
    from bert_jax.tokenization.wordpiece_files import load_wordpiece

    path = Path(path)
    if path.is_dir():
        path = _find(path)
    elif not path.exists():
        raise UserError(
            f"{path}: no such file or directory; a tokenizer is a tokenizer.json, a vocab.txt, a "
            "*.model, or a directory holding one"
        )
    reading = Reading(path)
    is_model = path.suffix == ".model"
    if is_model or path.name == "vocab.json" or _is_fast(reading):
        if lowercase is not None:
            raise UserError(
                f"{path} says itself how text is normalised; drop the option lowercase={lowercase}"
            )
        if is_model:
            model = read_bytes(path, max_bytes=MAX_FILE_BYTES)
            return SentencePieceTokenizer(model, where=f"{path}")
        return FastTokenizer(read_pipeline(reading), where=f"{path}")
    if path.suffix in (".json", ".txt"):
        return load_wordpiece(reading, lowercase=lowercase)
    raise UserError(
        f"{path}: a tokenizer file ends in .json (tokenizer.json), .txt (vocab.txt) or .model "
        "(SentencePiece)"
    )


def _is_fast(reading: Reading) -> bool:
    """Whether a file is a `tokenizer.json` of a model other than WordPiece."""
    model = reading.whole.get("model") if reading.path.suffix == ".json" else None
    return isinstance(model, dict) and model.get("type") in ("BPE", "Unigram")


def _find(directory: Path) -> Path:
    """Return the file in `directory` that defines its tokenizer."""
    whole, model = directory / "tokenizer.json", directory / "tokenizer.model"
    models = sorted(directory.glob("*.model"))
    # What `bert-jax export` wrote is the original, and never takes text for a special token.
    if model.is_file() and Reading(model).config.get("kind") == "sentencepiece":
        return model
    if models and whole.is_file() and _is_fast(Reading(whole)):
        return whole
    wordpiece = [p for n in KIND_FILES["wordpiece"] if (p := directory / n).is_file()]
    found = wordpiece[:1] + models
    if len(found) > 1:
        raise UserError(
            f"{directory} holds {len(found)} tokenizers, {found[0].name} and {found[1].name} among "
            "them; name one of the files"
        )
    pair = [directory / name for name in KIND_FILES["fast"][1:]]
    if not found and not all(file.is_file() for file in pair):
        raise UserError(
            f"{directory} holds no tokenizer: none of tokenizer.json, vocab.txt, *.model is there"
        )
    return (found or pair)[0]
