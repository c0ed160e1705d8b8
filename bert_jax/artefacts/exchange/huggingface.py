"""Export in Hugging Face's format, with proof: the files are read back and compared.

`read_model` reads the files. The tensors must equal the source's bit for bit; token ids and outputs
are also compared. If `transformers` is installed, it loads the files too: no tensor may be missing
or unexpected, token ids must be equal, and outputs must agree within the tolerance.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.exchange import exported_files as files
from bert_jax.artefacts.exchange import proof
from bert_jax.artefacts.exchange.searches import compare_searches
from bert_jax.artefacts.exchange.theirs import TheirModel, missing, quiet
from bert_jax.artefacts.formats.families import FAMILIES
from bert_jax.artefacts.formats.sentence_transformers import can_be_written
from bert_jax.artefacts.formats.sentencepiece_json import is_tie
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError, first_few
from bert_jax.terminal import progress_bar
from bert_jax.tokenization.fast_tokenizer import FastTokenizer
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer
from bert_jax.tokenization.tokenizer import ROLES, Tokenizer, make_row

PIPELINES = {
    "ForPreTraining": "fill-mask", "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering", "ForMultipleChoice": "multiple-choice",
}  # fmt: skip
"""Pipelines of Transformers, by class-name suffix."""
DIFFERENT = "the files differ from the model when they are read back"


write = files.write_huggingface


def check(saved: SavedModel) -> None:
    """Raise UserError if no class computes a model, or sentence-transformers lacks its pooling."""
    files.class_of(saved)
    if saved.embedding is not None and not can_be_written(saved.embedding):
        what = f"computes the pooling {saved.embedding.pooling}"
        raise UserError(f"{saved.name}: no module of sentence-transformers {what}")


def auto_class(name: str) -> str:
    """Return the auto class of Transformers that loads a directory of the class `name`."""
    families = "|".join(family.classes for family in FAMILIES.values())
    task = re.sub(f"^({families})(?=For|Model)", "", name)
    return f"AutoModel{task.removeprefix('Model')}"


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Read the directory back; compare outputs and translations; return the result of `proven`.

    Raise a ProofFailedError, which names the part, if the written files differ from the model.
    """
    programs: list[Callable[[Any], dict[str, np.ndarray]]]
    programs = [partial(proof.logits_of, read_back(saved, out))]
    theirs: dict[str, Any] = {"ran": False, "why": proof.NOT_INSTALLED}
    packages = ["safetensors", "tokenizers"]
    family = None if saved.network is not None else FAMILIES[files.family_of(saved)]
    if family is not None and not family.native:
        why = f"transformers has no class of {family.name}, and code of a model is never run"
        theirs["why"] = f"{why}; {proof.ONLY_OURS}"
    elif not missing("transformers", "torch"):
        model = load_theirs(saved, out)
        programs.append(model.outputs)
        theirs = {"ran": True, "class": model.name, "missing_keys": 0, "unexpected_keys": 0}
        theirs |= check_tokenizer(saved, out)
        if saved.network is not None:
            theirs["translations"] = compare_searches(saved, rows, model.translate)
        packages += ["transformers", "torch"]
    batches = progress_bar(proof.row_batches(rows), of="proof", unit="batch")
    found = proof.compare(saved, batches, *programs, optional={"pooled", "embedding"})
    ours = {
        "ran": True, "class": "read_model", "tensors_bit_equal": True,
        "texts_with_equal_ids": len(proof.PROOF_TEXTS),
    }  # fmt: skip
    return proven({"bert_jax": ours, "transformers": theirs}, found, packages)


def proven(
    proofs: dict[str, dict[str, Any]], found: Sequence[dict[str, float]], packages: Sequence[str]
) -> dict[str, Any]:
    """Combine the results of two proofs; the second proof may not have run.

    `differences` in the result has the largest difference of each output in either proof. `proofs`
    has the result of each proof, or the reason why it did not run. `versions` covers `packages`.
    """
    for each, gaps in zip(proofs.values(), found, strict=False):
        each["differences"] = gaps
    return {
        "differences": {n: max(gaps.get(n, 0.0) for gaps in found) for n in found[0]},
        "proofs": proofs,
        "versions": {name: metadata.version(name) for name in packages},
    }


def read_back(saved: SavedModel, out: Path) -> SavedModel:
    """Read a directory with `read_model`; raise ProofFailedError if the result is not `saved`."""
    back = read_model(out)
    meant = saved if saved.network is not None else files.without_types(saved)
    left_out = () if saved.has_pooler and files.has_place_for_pooler(saved) else ("pooler",)
    ours, theirs = (each.without(left_out).params for each in (meant, back))
    if wrong := proof.unequal(ours, theirs, vocab_size=saved.config.vocab_size):
        raise proof.ProofFailedError(f"{DIFFERENT}: {first_few(wrong, 8)}")
    expected, again = (each.tokenizer.encode_batch(proof.PROOF_TEXTS) for each in (saved, back))
    for text, ids, other in zip(proof.PROOF_TEXTS, expected, again, strict=True):
        _same_ids("the tokenizer that was read back", text, ids.tolist(), other.tolist())
    found = _facts(back)
    for name, value in _facts(saved).items():
        if found[name] != value:
            raise proof.ProofFailedError(f"{DIFFERENT}: {name} {found[name]}, not {value}")
    return back


def _facts(model: SavedModel) -> dict[str, Any]:
    """Return the properties, by name, that written files must keep, such as labels."""
    outputs = model.outputs
    meaning = outputs and (
        outputs.objective, outputs.head.kind, outputs.head.num_labels, outputs.labels,
        outputs.thresholds, outputs.long, outputs.reading,
    )  # fmt: skip
    tokenizer = model.tokenizer
    return {
        "the outputs are": meaning, "the length of rows is": model.max_length,
        "the vectors are": model.embedding, "the special tokens are": tokenizer.special_ids,
        "the tokenizer has the fingerprint": tokenizer.fingerprint,
    }  # fmt: skip


def _same_ids(who: str, text: str, expected: Sequence[int], found: Sequence[int]) -> None:
    if list(expected) != list(found):
        pairs = zip(expected, found, strict=False)
        at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        raise proof.ProofFailedError(
            f"{who} gives wrong token ids for {text[:60]!r}: from position {at}, it gives "
            f"{list(found[at : at + 4])}, not {list(expected[at : at + 4])}"
        )


def load_theirs(saved: SavedModel, out: Path) -> TheirModel:
    """Load a directory with `transformers`.

    Raise a ProofFailedError if the class is wrong, or tensors are missing or unexpected.
    """
    name = files.class_of(saved)
    model = TheirModel(out, auto_class(name) if saved.network is None else name)
    if model.name != name:
        raise proof.ProofFailedError(f"transformers loads a {model.name}, not a {name}")
    return model.whole()


def check_tokenizer(saved: SavedModel, out: Path) -> dict[str, Any]:
    """Compare ids, types, special tokens and offsets with the `AutoTokenizer` of a directory.

    Return counts of texts with equal ids and with equal offsets, and ties (see `_check_ids`).
    """
    import transformers

    with quiet():
        theirs = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
        equal, ties = _check_ids(saved, theirs)
        offsets = _check_offsets(saved.tokenizer, theirs)
    counts = {"texts_with_equal_ids": equal, "texts_with_ties": ties}
    return counts | {"texts_with_equal_offsets": offsets}


def _check_offsets(ours: Tokenizer, theirs: Any) -> str:
    """Compare token offsets; return how many texts have equal offsets, such as "40 of 42".

    Marian's tokenizer in Transformers has no offsets.
    Offsets of a SentencePiece model may differ. Spans of `tokenizers` include the space before a
    word, and all tokens of a character with combining accents have the span of the whole character.
    """
    if not theirs.is_fast:
        return "none"
    sentencepiece = isinstance(ours, SentencePieceTokenizer)
    exact = ours.pipeline.trim_offsets if isinstance(ours, FastTokenizer) else not sentencepiece
    equal = compared = 0
    for text in proof.texts_for(ours):
        found = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, spans = ours.encode(text)
        if found["input_ids"] != ids.tolist():  # the text spells a special token, or has a tie
            continue
        compared += 1
        same = proof.same_spans(text, spans.tolist(), found["offset_mapping"], exact=exact)
        equal += same
        if not (same or sentencepiece):
            raise proof.ProofFailedError(
                f"transformers' tokenizer gives wrong offsets for the tokens of {text[:60]!r}: "
                f"{found['offset_mapping'][:8]}, not {spans.tolist()[:8]}"
            )
    return f"{equal} of {compared}"


def _check_ids(saved: SavedModel, theirs: Any) -> tuple[int, list[str]]:
    """Compare the ids of single texts, and the ids and token types of one pair of texts.

    Returns the number of texts with equal ids, and the tied texts. A tied text has two equally
    probable segmentations, and the two tokenizers chose differently.

    If a text spells one of the five special tokens, our tokenizer encodes plain text. Transformers
    does so only with `split_special_tokens`; such texts are compared only with this option. Our
    tokenizer never splits an added special token, so texts that spell one are not compared with it.
    """
    ours: Tokenizer = saved.tokenizer
    special, who = ours.special_ids, "transformers' tokenizer"
    names = files.specials_of(saved)
    added = [token.content for token in getattr(ours, "added", ()) if token.special]
    texts = proof.texts_for(ours)
    ids = ours.encode_batch(texts)
    compared = set[str]()
    ties: list[str] = []

    def check(what: str, text: str, expected: list[int], found: list[int]) -> None:
        compared.add(text)
        if isinstance(ours, SentencePieceTokenizer) and is_tie(ours, expected, found):
            if expected != found and text not in ties:
                ties.append(text)
            return
        _same_ids(what, text, expected, found)

    for text, found in zip(texts, ids, strict=True):
        row = make_row(ours, found).ids.tolist()
        if not any(name in text for name in names):
            check(who, text, row, theirs(text)["input_ids"])
        # A tokenizer of the kind "fast" always reads the names of special tokens as these tokens.
        if ours.kind != "fast" and not any(name in text for name in added):
            split = theirs(text, split_special_tokens=True)["input_ids"]
            check(f"{who}, told to split special tokens,", text, row, split)
    first, second = texts[:2]
    both = theirs(first, second)
    pair = make_row(ours, *ids[:2])
    check(f"{who}, given a pair of texts,", first, pair.ids.tolist(), both["input_ids"])
    types = (np.arange(len(pair.ids)) >= pair.second_start).astype(int).tolist()
    if saved.config.num_types > 1 and list(both["token_type_ids"]) != types:
        raise proof.ProofFailedError(
            f"{who} gives wrong token types for a pair of texts: {both['token_type_ids']}, "
            f"not {types}"
        )
    roles = [getattr(theirs, f"{role}_id") for role in ROLES]
    if special.opens and roles != list(vars(special).values()):  # Marian has no [CLS] or mask
        raise proof.ProofFailedError(f"{who} has the special ids {roles}, not {vars(special)}")
    return len(compared) - len(ties), ties


_LOADING = """\
{theirs}
With bert_jax:

```python
import bert_jax

{ours}
```

{note}"""
_SPECIAL = """\
In Transformers the names of special tokens, such as `[MASK]`, are special wherever a text has \
them; bert_jax reads the names as text. So does `split_special_tokens=True`, but not with a \
Unigram vocabulary, whose pieces include the names."""
_THEIRS = """\
With Transformers, where `DIR` is this directory:

```python
from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = {auto}.from_pretrained("DIR")
{use}```
"""
_NO_CLASS = """\
Transformers has no class of {0}, and `config.json` names no code: `AutoTokenizer` loads the \
directory `DIR`, but `AutoModel` does not. If you trust the published code of {0}, copy `auto_map` \
from its `config.json` and load `DIR` with `trust_remote_code=True`.
"""
_TRANSLATE = """\
batch = tokenizer(["A text.", "Another text."], return_tensors="pt", padding=True)
found = model.generate(**batch)
print(tokenizer.batch_decode(found, skip_special_tokens=True))
"""
_SEARCH = """\
`generation_config.json` has the search: five beams, scores divided by the length. Transformers 5 \
has no pipeline for translation, so `generate` is called as above."""
_PIPELINE = """
```python
from transformers import pipeline

model = pipeline("{}", model="DIR")
```
"""


def pipeline_of(saved: SavedModel) -> str | None:
    """Return the name of the model's pipeline in Transformers, or None if there is no pipeline."""
    # The pipeline for masks would give a discriminator a random head.
    return None if "rtd" in saved.params else PIPELINES.get(files.task_of(saved))


def loading(saved: SavedModel) -> str:
    """Describe how to load the directory, for the model card."""
    name, ours = files.class_of(saved), 'model = bert_jax.load("DIR")'
    if saved.network is not None:
        ours = 'print(bert_jax.load("DIR").translate(["A text.", "Another text."]))'
        said = _THEIRS.format(auto=name, use=_TRANSLATE)
        return _LOADING.format(theirs=said, ours=ours, note=_SEARCH)
    family = FAMILIES[files.family_of(saved)]
    if not family.native:
        return _LOADING.format(theirs=_NO_CLASS.format(family.name), ours=ours, note=_SPECIAL)
    kind = pipeline_of(saved)
    said = _THEIRS.format(auto=auto_class(name), use="")
    if kind and kind not in ("question-answering", "multiple-choice"):  # no such pipelines exist
        said += _PIPELINE.format(kind)
        if saved.outputs is not None and saved.outputs.objective == "regression":
            said += "\nThe pipeline gives the number itself: `problem_type` is regression.\n"
    return _LOADING.format(theirs=said, ours=ours, note=_SPECIAL)
