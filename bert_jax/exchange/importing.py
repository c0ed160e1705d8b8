"""A model of other software as a directory that everything here reads: bert-jax import.

report = import_model("roberta-base", Path("work/roberta"))

The source is a directory in Hugging Face's format of any family in `convert.families`, a TensorFlow
checkpoint of the original code, or a name on the Hugging Face Hub. What is written is a BERT in
Hugging Face's format and `import.json`, and it is proven before it appears: read back, bit for bit
what was meant; and where Transformers is installed, states, logits and token ids compared with
those of the source in its own class.
"""

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

import bert_jax
from bert_jax.errors import UserError
from bert_jax.exchange import vocabulary
from bert_jax.exchange.huggingface_files import (
    class_of,
    has_place_for_pooler,
    specials_of,
    untrained_parts,
    write_huggingface,
)
from bert_jax.exchange.proof import (
    TOLERANCE,
    ProofFailedError,
    batch_of,
    differences,
    keep_worst,
    logits_of,
    proof_rows,
    row_batches,
    same_spans,
    texts_for,
)
from bert_jax.exchange.source_model import SourceModel, source_tokenizer
from bert_jax.exchange.staging import staged
from bert_jax.files.staging import write_synced
from bert_jax.formats.families import BertForm, to_bert
from bert_jax.formats.huggingface_files import (
    MAX_CONFIG_BYTES,
    WEIGHTS,
    model_class,
    read_weights,
)
from bert_jax.formats.huggingface_head import head_from_huggingface
from bert_jax.formats.huggingface_names import parts_from_huggingface
from bert_jax.formats.tf_checkpoint import is_tf_checkpoint, read_tf_checkpoint
from bert_jax.model.heads import Params
from bert_jax.saved.model import Origin, SavedModel, check_vocabulary, read_model
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import CONFIG_NAME, Tokenizer, make_row
from bert_jax.tokenization.wordpiece import WordPieceTokenizer
from bert_jax.tokenization.wordpiece_files import says_casing
from bert_jax.untrusted.json_file import read_json_object

REPORT = "import.json"


@dataclass(frozen=True, eq=False)
class Source:
    """A model as it was found."""

    saved: SavedModel
    family: str
    made_by: str
    """Its class, or "TensorFlow 1"."""
    dropped: tuple[str, ...]
    notes: tuple[str, ...]
    directory: Path | None
    """Directory for Transformers; None where Transformers cannot load the source."""
    config: dict[str, Any]
    """The content of its `config.json`."""


def import_model(
    source: str | Path,
    out: Path,
    *,
    add_tokens: Path | None = None,
    gelu: Literal["tanh", "erf"] | None = None,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Import a model; `out` is there whole and proven afterwards, or not at all.

    Args:
        source: A directory, the prefix of a TensorFlow checkpoint, or a name on the Hub.
        out: A directory that does not exist yet.
        add_tokens: A file with a token a line, by which the vocabulary grows.
        gelu: Meaning of "gelu" in a TensorFlow checkpoint's configuration; default: tanh.
        tolerance: Largest absolute difference of states and logits from the source's.

    Returns:
        The content of `import.json`.

    Raises:
        UserError: The source does not fit, or is not sound: all that is wrong at once.
        ProofFailedError: The written model does not compute the same as the source.
    """
    tokens = [] if add_tokens is None else vocabulary.read_lines(add_tokens)
    found = read_source(source, gelu=gelu)
    saved = found.saved
    notes = [*found.notes, *_casing_notes(saved)]
    if tokens:  # what is wrong with them is said before the long work
        new = vocabulary.new_tokens(saved.tokenizer, tokens, where=f"{add_tokens}, line {{}}")
        notes.append(f"{add_tokens}: {new}")
    with staged(out) as directory:
        compared = compare_with_source(found, tolerance)
        if tokens:
            saved = vocabulary.add_tokens(saved, tokens, where=f"{add_tokens}, line {{}}")
        write_huggingface(saved, directory)
        written, lost = as_written(saved)
        check_read_back(written, read_model(directory))
        if isinstance(compared, dict):
            compared |= _compare_offsets(found, directory)
        report = {
            "source": f"{source}",
            "family": found.family,
            "source_class": found.made_by,
            "class": class_of(saved),
            "dropped": [*found.dropped, *lost],
            "untrained": untrained_parts(saved),
            "added_tokens": saved.tokenizer.vocab_size - found.saved.tokenizer.vocab_size,
            "notes": notes,
            "read_back": "bit for bit",
            "compared": compared,
            "sha256": hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest(),
            "tokenizer_fingerprint": saved.tokenizer.fingerprint,
            "bert_jax": bert_jax.__version__,
        }
        text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_synced(directory / REPORT, text.encode())
    return report


def read_source(source: str | Path, *, gelu: Literal["tanh", "erf"] | None = None) -> Source:
    """Return the model of any source that can be imported; see `import_model`."""
    path = Path(source)
    if (path / "config.json").is_file() or not is_tf_checkpoint(path):
        if gelu is not None:
            raise UserError(
                "--gelu says what a TensorFlow checkpoint means by gelu; config.json of "
                f"{source} says it itself, in its field hidden_act"
            )
        return _from_directory(path if path.is_dir() else _fetched(source))
    return _from_tensorflow(path, gelu or "tanh")


def _casing_notes(saved: SavedModel) -> list[str]:
    """Says what was concluded where no file says whether text is lower-cased."""
    tokenizer = saved.tokenizer
    if not isinstance(tokenizer, WordPieceTokenizer) or says_casing(saved.tokenizer_files):
        return []
    lower = tokenizer.options.lowercase
    return [
        f"no {CONFIG_NAME} says do_lower_case, and vocab.txt has {'no ' if lower else ''}words in "
        f"upper case: text is {'lower-cased' if lower else 'not lower-cased'}"
    ]


def _fetched(source: str | Path) -> Path:
    from bert_jax.exchange.hub import fetch, is_hub_name

    if Path(source).exists() or not is_hub_name(f"{source}"):
        what = "is a file" if Path(source).exists() else "does not exist"
        raise UserError(
            f"{source} {what}; give a directory in Hugging Face's format, a TensorFlow checkpoint "
            "of the original code, or a name on the Hugging Face Hub such as bert-base-cased"
        )
    return fetch(f"{source}", None)


def _from_directory(directory: Path) -> Source:
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(
            f"{directory} has no config.json; a directory in Hugging Face's format has, and one of "
            "the original TensorFlow code has bert_config.json"
        )
    config = read_json_object(path, max_bytes=MAX_CONFIG_BYTES)
    if "bert_jax" in config:
        raise UserError(f"{directory} is a work directory of this program; it needs no import")
    made_by = model_class(config)
    if config.get("model_type") == "albert":
        to_bert(config, {}, where=f"{path}")  # says why, before the weights are missed
    form = to_bert(config, read_weights(directory, made_by), where=f"{path}")
    tokenizer = load_tokenizer(directory)
    saved = saved_model(form, tokenizer, directory, name=f"{directory}, {made_by}", where=path)
    notes = list(form.notes)
    token_config = directory / CONFIG_NAME
    if token_config.is_file() and "auto_map" in read_json_object(
        token_config, max_bytes=MAX_CONFIG_BYTES
    ):
        notes.append(f"{CONFIG_NAME} names code of its own (auto_map), which was not run")
    return Source(
        saved, form.family, made_by, form.dropped, tuple(notes), directory, config
    )  # fmt: skip


def _from_tensorflow(path: Path, gelu: Literal["tanh", "erf"]) -> Source:
    form = read_tf_checkpoint(path, gelu=gelu)
    assert form.files is not None
    tokenizer = load_tokenizer(form.files)
    where = form.files.parent
    saved = saved_model(form, tokenizer, where, name=f"{path}, TensorFlow 1", where=where)
    note = f"gelu is read as its {gelu} form; activation {saved.config.activation}"
    return Source(
        saved, form.family, "TensorFlow 1", form.dropped, (note,), None, form.config
    )  # fmt: skip


def saved_model(
    form: BertForm, tokenizer: Tokenizer, files: Path, *, name: str, where: Path
) -> SavedModel:
    """Return a model under BERT's names as one of ours; all that does not fit at once."""
    config = form.model_config(where=f"{where}")
    check_vocabulary(tokenizer, config.vocab_size, files)
    try:
        outputs = head_from_huggingface(form.config, form.arrays)
        head = None if outputs is None else outputs.head
        params = parts_from_huggingface(form.arrays, config, head)
    except UserError as error:
        as_bert = "" if form.family == "BERT" else f" ({form.family}, under the names of BERT)"
        raise UserError(f"{files}{as_bert}: {error}") from error
    return SavedModel(
        config=config,
        params=params,
        outputs=outputs,
        tokenizer=tokenizer,
        tokenizer_files=files,
        max_length=config.num_positions,
        name=name,
        origin=Origin("huggingface", config=form.config),
    )


def as_written(saved: SavedModel) -> tuple[SavedModel, list[str]]:
    """Drop the parts for which the class in Hugging Face's format has no place, and name them.

    Their classes have a fine-tuning head or those of pretraining, and some have no pooler.
    """
    params = dict(saved.params)
    lost = []
    if saved.outputs is not None:
        lost = [part for part in ("mlm", "nsp", "rtd") if params.pop(part, None) is not None]
    if saved.has_pooler and not has_place_for_pooler(saved):
        encoder = {name: part for name, part in params["encoder"].items() if name != "pooler"}
        params["encoder"] = encoder
        lost.append("pooler")
    return dataclasses.replace(saved, params=params), lost


def check_read_back(meant: SavedModel, back: SavedModel) -> None:
    """Refuses where what was read back is not, bit for bit, what was meant.

    A pooler with initial values, which a class must have, may be there beside.
    """
    params = back.params
    if not meant.has_pooler and back.has_pooler:
        encoder = {name: part for name, part in params["encoder"].items() if name != "pooler"}
        params = {**params, "encoder": encoder}
    found, wanted = (_leaves(tree) for tree in (params, meant.params))
    wrong = [name for name in wanted | found if found.get(name) != wanted.get(name)]
    if back.config != meant.config:
        wrong.append("the configuration")
    if back.tokenizer.fingerprint != meant.tokenizer.fingerprint:
        wrong.append("the tokenizer")
    if back.outputs != meant.outputs:
        wrong.append("the labels")
    if wrong:
        raise ProofFailedError(f"read back, this is not what was written: {', '.join(wrong[:20])}")


def _leaves(params: Params) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            np.shape(leaf),
            hashlib.sha256(np.asarray(leaf, np.float32).tobytes()).digest(),
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def compare_with_source(found: Source, tolerance: float) -> dict[str, Any] | str:
    """Largest differences from the source in its own class; or why there is no comparison."""
    if found.directory is None:
        return "not compared: no other program here reads this format"
    missing = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
    if missing:
        return f"not compared with the source: {', '.join(missing)} is not installed"
    import torch
    import transformers

    saved = found.saved
    rows = proof_rows(saved)
    theirs = SourceModel(found.directory, found.config, saved)
    length = max(map(len, rows))
    gaps: dict[str, float] = {}
    for some in row_batches(rows):
        batch = batch_of(saved, some, length)
        ours = logits_of(saved, some, length)
        keep_worst(gaps, differences(ours, theirs.outputs(batch), batch.segment_ids))
    above = {name: gap for name, gap in gaps.items() if not gap <= tolerance}
    if above or "hidden" not in gaps:
        said = ", ".join(f"{name} by {gap:.2g}" for name, gap in above.items())
        raise ProofFailedError(
            f"{found.saved.name} does not compute the same here: {said or 'nothing to compare'}; "
            f"allowed is {tolerance:.2g} (--tolerance)"
        )
    tokens = _compare_tokens(found)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"differences": gaps, "tolerance": tolerance, **tokens, "versions": versions}


def _compare_tokens(found: Source) -> dict[str, Any]:
    """Ids of both tokenizers, of the texts in which no special token is spelled out."""
    assert found.directory is not None
    ours = found.saved.tokenizer
    theirs = source_tokenizer(found.directory, ours)
    if isinstance(theirs, str):
        return {"texts_with_equal_ids": f"not compared: {theirs}"}
    texts = _texts(found.saved)
    other = _other_ids(ours, theirs, texts)
    if other:
        raise ProofFailedError(
            f"{found.saved.name}: the tokenizer gives other ids than Transformers for "
            f"{len(other)} of {len(texts)} texts, the first {other[0]!r:.200}"
        )
    pair = texts[0], texts[1]
    row = make_row(ours, *ours.encode_batch(list(pair))).ids.tolist()
    same = list(theirs(*pair)["input_ids"]) == row
    return {"texts_with_equal_ids": len(texts), "pairs_have_equal_ids": same}


def _compare_offsets(found: Source, written: Path) -> dict[str, Any]:
    """Places of tokens in their texts: the source's in Transformers, and those of what was written.

    Where the vocabulary has grown, texts with new words are left out.

    Raises:
        ProofFailedError: A text has others in one of the two, or here, white space aside.
    """
    assert found.directory is not None
    ours = found.saved.tokenizer
    tokenizers = [source_tokenizer(path, ours) for path in (found.directory, written)]
    if any(isinstance(each, str) or not each.is_fast for each in tokenizers):
        return {"texts_with_equal_offsets": "not compared"}
    compared = 0
    for text in _texts(found.saved):
        first, second = (
            each(text, add_special_tokens=False, return_offsets_mapping=True) for each in tokenizers
        )
        if first["input_ids"] != second["input_ids"]:
            continue
        spans, compared = ours.encode(text).offsets.tolist(), compared + 1
        theirs = first["offset_mapping"]
        same = theirs == second["offset_mapping"]
        if not same or not same_spans(text, spans, theirs, exact=False):
            where = "here" if same else "in what was written"
            raise ProofFailedError(
                f"{found.saved.name}: tokens of {text!r:.80} have other places in the text {where} "
                "than in the source"
            )
    return {"texts_with_equal_offsets": compared}


def _texts(saved: SavedModel) -> list[str]:
    """Texts in which none of the five special tokens is spelled out."""
    names = specials_of(saved)
    return [text for text in texts_for(saved.tokenizer) if not any(name in text for name in names)]


def _other_ids(ours: Tokenizer, theirs: Any, texts: Sequence[str]) -> list[str]:
    found = ours.encode_batch(list(texts))
    wanted = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [t for t, a, b in zip(texts, found, wanted, strict=True) if a.tolist() != list(b)]
