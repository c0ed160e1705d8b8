"""Export for sentence-transformers, with proof that it computes our vectors or scores.

A model with text vectors becomes a `SentenceTransformer`, and a classifier a `CrossEncoder`. The
proof has two steps. `read_model` and Transformers read the directory back, as in `huggingface`. If
sentence-transformers is installed, it also loads the directory, and its vectors of plain texts,
queries and documents, or its scores of pairs, are compared with ours.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bert_jax.artefacts.exchange import huggingface
from bert_jax.artefacts.exchange.conformance import cases
from bert_jax.artefacts.exchange.conformance.check import by_cross_encoder, by_sentence_transformers
from bert_jax.artefacts.exchange.exported_files import family_of
from bert_jax.artefacts.exchange.proof import batch_of, differences, logits_of
from bert_jax.artefacts.exchange.theirs import missing, plain_texts, quiet
from bert_jax.artefacts.formats.families import FAMILIES
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError
from bert_jax.model.embedding import PLAIN, POOLINGS, static_vectors
from bert_jax.model.heads import MASKED_LM
from bert_jax.terminal import plain

write = huggingface.write


def check(saved: SavedModel) -> None:
    """Raise UserError if no class of Transformers computes the vectors or scores."""
    huggingface.check(saved)
    if saved.embedding is None and "classify" not in saved.verbs:
        raise UserError(f"{saved.name}: it has no head for classes, labels or a number")
    if not (family := FAMILIES[family_of(saved)]).native:
        raise UserError(f"{saved.name}: Transformers has no class of {family.name}")


def encoder_with_vectors(saved: SavedModel) -> SavedModel:
    """Return a model without its heads; if it does not define text vectors, add `PLAIN` vectors."""
    embedding = saved.embedding or PLAIN
    names = ("encoder", "pooling", *((MASKED_LM, "queries") if embedding.is_sparse else ()))
    parts = {name: part for name, part in saved.params.items() if name in names}
    return dataclasses.replace(saved, params=parts, outputs=None, embedding=embedding)


def scorer(saved: SavedModel) -> SavedModel:
    """Return a model without vectors; two classes become one label, with the log odds as logit."""
    saved, outputs = dataclasses.replace(saved, embedding=None), saved.outputs
    if outputs is None or (outputs.objective, outputs.head.num_labels) != ("single_label", 2):
        return saved
    if (outputs.long.how, outputs.long.pooling) == ("windows", "max"):
        raise UserError(
            "one logit cannot replace two classes if task.window_pooling is max; train with mean"
        )
    if not outputs.labels:  # a planned model, which has no arrays either
        return saved
    head = {name: array[..., 1:] - array[..., :1] for name, array in saved.params["head"].items()}
    one, second = dataclasses.replace(outputs.head, num_labels=1), outputs.labels[1:]
    outputs = dataclasses.replace(outputs, head=one, objective="multi_label", labels=second)
    return dataclasses.replace(saved, params={**saved.params, "head": head}, outputs=outputs)


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Read the directory back and compare outputs; compare sentence-transformers' outputs too.

    Return the result of `huggingface.prove`, with an entry in `proofs` for sentence-transformers:
    the result of `compare`, or the reason why nothing was compared.
    """
    proven = huggingface.prove(saved, out, rows)
    if missing("sentence_transformers", "torch"):
        why = "sentence-transformers and torch are not both installed (the extra bert_jax[parity])"
        proven["proofs"]["sentence-transformers"] = {"ran": False, "why": why}
        return proven
    found = proven["proofs"]["sentence-transformers"] = compare(saved, out)
    proven["differences"] |= found["differences"]
    proven["versions"]["sentence-transformers"] = metadata.version("sentence-transformers")
    return proven


def compare(saved: SavedModel, out: Path) -> dict[str, Any]:
    """Compare vectors of texts in many scripts, or scores of pairs, with sentence-transformers.

    Texts that spell a special token are left out, because bert_jax reads them as plain text. Raise
    a ProofFailedError if the vectors or scores have another shape.
    """
    texts: list[tuple[str, ...]] = [(text,) for text in plain_texts(saved)]
    prompts, format, load = {"": ""}, "cross-encoder", by_cross_encoder
    if (vectors := saved.embedding) is not None:
        prompts |= {"query": vectors.query_prefix, "document": vectors.document_prefix}
        format, load = "sentence-transformers", by_sentence_transformers
    else:
        texts = [first + second for first, second in itertools.pairwise(texts)]
    with quiet():
        _, run = load(out, {"max_length": saved.max_length})
    gaps: dict[str, float] = {}
    for kind, prompt in prompts.items():
        rows = cases.rows_of(saved, out, prompt, texts, saved.max_length)
        batch = batch_of(saved, list(rows.values()))
        given = {"texts": list(rows), "prompt": prompt, "name": kind}
        found = logits_of(saved, batch)
        if kind == "query" and vectors is not None and vectors.static_queries:
            there = jnp.asarray(batch.segment_ids > 0)
            static = static_vectors(saved.params, jnp.asarray(batch.tokens), there)
            found = {"embedding": np.asarray(static)}
            given["task"] = kind
        ours, theirs = cases.named(saved, format, found, {}), run(given)
        for name, gap in differences(ours, theirs, batch.segment_ids).items():
            gaps[name] = max(gap, gaps.get(name, 0.0))
    return {"ran": True, "texts": len(texts), "differences": gaps}


def said_of_vectors(saved: SavedModel) -> str:
    """Describe the text vectors of a model, for the model card."""
    embedding = saved.embedding
    assert embedding is not None
    pooling = POOLINGS[embedding.pooling] + " in the last layer" * (not embedding.is_sparse)
    if "maps" in saved.params.get("pooling", {}):
        pooling += ", followed by linear maps"
    text = f"It turns texts into vectors of {saved.vector_width()} numbers: {pooling}"
    text += ", divided by its norm." if embedding.normalize else "."
    for kind, prefix in (("query", embedding.query_prefix), ("text", embedding.document_prefix)):
        if prefix:
            text += f" Each {kind} is prefixed with `{plain(prefix)}`."
    return text


_LOADING = """\
With sentence-transformers, where `DIR` is this directory:

```python
from sentence_transformers import {0}

model = {0}("DIR")
"""
_VECTORS = """\
queries = model.encode_query(["a question"])
documents = model.encode_document(["A text.", "Another text."])
print(model.similarity(queries, documents))
```

With bert_jax:

```python
import bert_jax

model = bert_jax.load("DIR")
queries = model.embed(["a question"], kind="query")
documents = model.embed(["A text.", "Another text."], kind="document")
```"""
_SCORES = """\
scores = model.predict([("a question", "A text."), ("a question", "Another text.")])
```

The scores are the """


def loading(saved: SavedModel) -> str:
    """Describe how to compute vectors or scores, for the model card."""
    if saved.embedding is None:
        several = saved.outputs is not None and saved.outputs.objective == "multi_label"
        said = "probabilities of the labels." if several else "logits of the head."
        return _LOADING.format("CrossEncoder") + _SCORES + said
    sizes = ", ".join(map(str, saved.embedding.dimensions))
    cut = "" if not sizes else (
        f"\n\nThe vectors were trained to work also if cut to their first {sizes} numbers: pass "
        "`truncate_dim=N` to sentence-transformers, or `dimensions=N` to bert_jax."
    )  # fmt: skip
    kind = "SparseEncoder" if saved.embedding.is_sparse else "SentenceTransformer"
    return f"{_LOADING.format(kind)}{_VECTORS}{cut}"
