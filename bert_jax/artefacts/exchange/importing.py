"""Import of a foreign model into a directory that every command can read: bert-jax import.

report = import_model("roberta-base", Path("work/roberta"))

The source is a directory in Hugging Face's format, a TensorFlow checkpoint of BERT's original code,
or a name on the Hugging Face Hub. Its family must be in `formats.families` or
`formats.translators`; a directory may have the layout of sentence-transformers. The import writes a
BERT or a model of the same family in Hugging Face's format, with a report in `import.json`. Before
the directory gets its final name, it is read back and compared bit for bit. If Transformers is
installed, our states, logits and token ids are also compared with its outputs for the source.
"""

import glob
from pathlib import Path
from typing import Any, Literal, NamedTuple

import bert_jax
from bert_jax.artefacts.exchange import vocabulary
from bert_jax.artefacts.exchange.exported_files import (
    class_of,
    has_place_for_pooler,
    untrained_parts,
    write_huggingface,
    write_json,
)
from bert_jax.artefacts.exchange.huggingface import DIFFERENT, read_back
from bert_jax.artefacts.exchange.proof import TOLERANCE, ProofFailedError, same_spans
from bert_jax.artefacts.exchange.theirs import compare_with_source, plain_texts, source_tokenizer
from bert_jax.artefacts.formats import huggingface_files
from bert_jax.artefacts.formats.families import family_to_import
from bert_jax.artefacts.formats.flax_weights import FLAX_WEIGHTS
from bert_jax.artefacts.formats.form import form_of
from bert_jax.artefacts.formats.huggingface_files import PRETRAINING_HEADS
from bert_jax.artefacts.formats.peft import refuse_beside
from bert_jax.artefacts.formats.sentence_transformers import is_sentence_model, read_sentence_files
from bert_jax.artefacts.formats.tf_checkpoint import is_tf_checkpoint, read_tf_checkpoint
from bert_jax.artefacts.formats.translators import FAMILIES as TRANSLATORS
from bert_jax.artefacts.saved.ancestors import RECORD, weights_entry
from bert_jax.artefacts.saved.lineage import ancestor_entry
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_translator, saved_from, with_vectors
from bert_jax.artefacts.saved.runs import staged
from bert_jax.errors import UserError
from bert_jax.files.checks import DIGESTS, checked, digest_of, digests_of
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.tokenization.load import load_tokenizer, says_casing
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer
from bert_jax.tokenization.tokenizer import CONFIG_NAME
from bert_jax.tokenization.wordpiece import WordPieceTokenizer


class Source(NamedTuple):
    """A source model that was read from its files."""

    saved: SavedModel
    family: str
    """Name of the source's family."""
    made_by: str
    """Name of the source's class in Transformers, or "TensorFlow 1"."""
    directory: Path | None
    """Directory that Transformers can load; None for a TensorFlow checkpoint."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one sentence each."""
    dropped: tuple[str, ...] = ()
    """Names of the tensors that are not read."""


def import_model(
    source: str | Path,
    out: Path,
    *,
    add_tokens: Path | None = None,
    gelu: Literal["tanh", "erf"] | None = None,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Import a model and compare it with its source; on failure, write nothing.

    Return the content of `import.json`. Raise a UserError if `out` is taken, or the source is
    unsupported or malformed (the message lists all faults); a ProofFailedError if outputs differ.

    Args:
        source: Directory, prefix of a TensorFlow checkpoint, or name on the Hub.
        out: Directory that does not exist yet, or is empty.
        add_tokens: File of tokens to add to the vocabulary, one per line; None adds no tokens.
        gelu: Meaning of "gelu" in a TensorFlow checkpoint's configuration; None means tanh.
        tolerance: Largest allowed absolute difference of states and logits from the source.
    """
    lines = [] if add_tokens is None else vocabulary.read_lines(add_tokens)
    found = read_source(source, gelu=gelu)
    saved = found.saved
    notes, tokenizer, new = [*found.notes], saved.tokenizer, None
    if isinstance(tokenizer, WordPieceTokenizer) and not says_casing(saved.tokenizer_files):
        lower = tokenizer.options.lowercase
        notes.append(
            f"no {CONFIG_NAME} sets do_lower_case. vocab.txt has {'no ' if lower else ''}words in "
            f"upper case, so text is {'lower-cased' if lower else 'not lower-cased'}"
        )
    if lines:  # report faulty tokens before the long work
        new = vocabulary.new_tokens(tokenizer, lines, where=f"{add_tokens}, line {{}}")
        notes.append(f"{add_tokens}: {new}")
    with staged(out) as directory:
        compared: dict[str, Any] | str = "not compared: Transformers cannot read this format"
        if found.directory is not None:
            compared = compare_with_source(saved, found.directory, found.made_by, tolerance)
        if new is not None:
            saved = vocabulary.add_tokens(saved, new)
        write_huggingface(saved, directory)
        # A class has either a fine-tuning head or pretraining heads, and some have no pooler.
        heads = () if saved.outputs is None else PRETRAINING_HEADS
        lost = [part for part in heads if part in saved.params]
        lost += ["pooler"] * (saved.has_pooler and not has_place_for_pooler(saved))
        check_read_back(saved.without(lost), directory)
        if isinstance(compared, dict):
            compared |= _compare_offsets(found, directory)
        report = {
            "source": f"{source}", RECORD: [_ancestor(f"{source}", found)],
            "family": found.family, "source_class": found.made_by, "class": class_of(saved),
            "dropped": [*found.dropped, *lost], "untrained": untrained_parts(saved),
            "added_tokens": saved.tokenizer.vocab_size - found.saved.tokenizer.vocab_size,
            "notes": notes, "read_back": "bit for bit", "compared": compared,
            "sha256": digest_of(directory / huggingface_files.WEIGHTS),
            DIGESTS: digests_of(directory), "tokenizer_fingerprint": saved.tokenizer.fingerprint,
            "bert_jax": bert_jax.__version__,
        }  # fmt: skip
        write_json(directory / "import.json", report)
    return report


def _ancestor(source: str, found: Source) -> dict[str, Any]:
    """Return the lineage entry of the source; include the ancestors of a local directory."""
    if found.directory is not None and Path(source).is_dir():
        return ancestor_entry("source", source)
    if found.directory is not None:  # from the Hub
        return weights_entry(source, huggingface_files.weight_files(found.directory))
    name = "*" if Path(source).is_dir() else glob.escape(Path(source).name.removesuffix(".index"))
    return weights_entry(source, found.saved.tokenizer_files.glob(f"{name}.data-*"))


def read_source(source: str | Path, *, gelu: Literal["tanh", "erf"] | None = None) -> Source:
    """Read the model from any source that can be imported; see `import_model`."""
    path = Path(source)
    if (path / "config.json").is_file() or not is_tf_checkpoint(path):
        if gelu is not None:
            raise UserError(
                f"--gelu is for TensorFlow checkpoints, but config.json of {source} defines the "
                "activation (hidden_act); omit --gelu"
            )
        directory = path if path.is_dir() else _fetched(source)
        refuse_beside(directory)
        with checked(directory):
            return _from_directory(directory)
    form = read_tf_checkpoint(path, gelu=gelu or "tanh")
    assert form.files is not None
    tokenizer, name = load_tokenizer(form.files), f"{path}, TensorFlow 1"
    saved = saved_from(form, tokenizer, form.files.parent, name=name)
    note = f"gelu is read as its {gelu or 'tanh'} form; the activation is {saved.config.activation}"
    return Source(saved, form.family.name, "TensorFlow 1", None, (note,), form.dropped)


def _fetched(source: str | Path) -> Path:
    from bert_jax.artefacts.exchange.hub import fetch, is_hub_name

    if Path(source).exists() or not is_hub_name(f"{source}"):
        what = "is a file" if Path(source).exists() else "does not exist"
        raise UserError(
            f"{source} {what}; give a directory in Hugging Face's format, a TensorFlow checkpoint "
            "of the original code, or a name on the Hugging Face Hub such as bert-base-cased"
        )
    return fetch(f"{source}", None)


def _from_directory(source: Path) -> Source:
    sentence = read_sentence_files(source) if is_sentence_model(source) else None
    directory = source if sentence is None else sentence.model
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(
            f"{directory} has no config.json (Hugging Face's format) and no bert_config.json (the "
            "original TensorFlow code); give the directory of a model"
        )
    config = read_json_object(path, max_bytes=huggingface_files.MAX_CONFIG_BYTES)
    if "bert_jax" in config:
        raise UserError(f"{directory} is a work directory of bert-jax, which needs no import")
    made_by = huggingface_files.model_class(config)
    if config.get("model_type") in TRANSLATORS:
        saved = read_translator(directory, config, made_by, f"{path}")
        return Source(saved, config["model_type"], made_by, directory)
    family_to_import(config, where=f"{path}")  # report a wrong family before missing weights
    marked = huggingface_files.marks_second(directory, config)
    arrays = huggingface_files.read_weights(directory, made_by)
    form = form_of(config, arrays, where=f"{path}", marked=marked)
    name = f"{directory}, {made_by}"
    saved, notes = saved_from(form, load_tokenizer(directory), directory, name=name), form.notes
    if sentence is not None:
        saved, notes = with_vectors(saved, sentence), (*notes, *sentence.notes)
    if huggingface_files.weight_files(directory) == [directory / FLAX_WEIGHTS]:
        notes += (f"the weights come from {FLAX_WEIGHTS}, under the names of PyTorch's class",)
    fields = huggingface_files.tokenizer_config(directory)
    if "auto_map" in fields:
        notes += (f"{CONFIG_NAME} names code of its own (auto_map), which was not run",)
    if fields.get("truncation_side") == "left":
        notes += ("the source's tokenizer cuts long texts at the start, but bert_jax at the end",)
    return Source(saved, form.family.name, made_by, directory, notes, form.dropped)


def check_read_back(meant: SavedModel, directory: Path) -> None:
    """Raise ProofFailedError if a directory does not read back as the model `meant`, bit for bit.

    The directory may in addition have an untrained pooler that the model's class requires.
    """
    back = read_back(meant, directory)
    parts = {"the configuration": "config", "the labels": "outputs"}
    wrong = [name for name, part in parts.items() if getattr(back, part) != getattr(meant, part)]
    if wrong:
        raise ProofFailedError(f"{DIFFERENT}: {', '.join(wrong)}")


def _compare_offsets(found: Source, written: Path) -> dict[str, Any]:
    """Compare the token offsets of three tokenizers: the source's, the written one and ours.

    Transformers loads the first two. Texts that these two split differently, because tokens were
    added, are left out. Raise a ProofFailedError if offsets differ; ours may differ in white space.
    """
    assert found.directory is not None
    ours = found.saved.tokenizer
    tokenizers = [source_tokenizer(path, ours) for path in (found.directory, written)]
    unlike = isinstance(ours, SentencePieceTokenizer)  # its offsets have another convention
    if unlike or any(isinstance(each, str) or not each.is_fast for each in tokenizers):
        return {"texts_with_equal_offsets": "not compared"}
    compared, how = 0, {"add_special_tokens": False, "return_offsets_mapping": True}
    for text in plain_texts(found.saved):
        first, second = (each(text, **how) for each in tokenizers)
        if first["input_ids"] != second["input_ids"]:
            continue
        spans, compared = ours.encode(text).offsets.tolist(), compared + 1
        theirs = first["offset_mapping"]
        same = theirs == second["offset_mapping"]
        if not same or not same_spans(text, spans, theirs, exact=False):
            where = "bert_jax" if same else "the written files"
            raise ProofFailedError(
                f"{found.saved.name}: the token offsets in {text!r:.80} differ between the source "
                f"and {where}"
            )
    return {"texts_with_equal_offsets": compared}
