"""Export in the layout of sentence-transformers, with proof that `encode` gives our vectors.

The proof has two steps. `read_model` and Transformers read the directory back, as in `huggingface`.
If sentence-transformers is installed, it also loads the directory, and its vectors of plain texts,
queries and documents are compared with ours.
"""

import dataclasses
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.exchange import huggingface
from bert_jax.artefacts.exchange.exported_files import family_of
from bert_jax.artefacts.exchange.proof import ProofFailedError, batch_of, logits_of
from bert_jax.artefacts.exchange.theirs import missing, plain_texts, quiet
from bert_jax.artefacts.formats.families import FAMILIES
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError
from bert_jax.model.embedding import PLAIN, POOLINGS, EmbeddingConfig
from bert_jax.tasks.retrieval.metrics import unit
from bert_jax.terminal import plain
from bert_jax.tokenization.tokenizer import make_row, num_special

write = huggingface.write
LEAST_COSINE = 0.99999
"""Lowest accepted cosine between a vector of sentence-transformers and ours."""


def check(saved: SavedModel) -> None:
    """Raise UserError if sentence-transformers, which loads classes of Transformers, has none."""
    huggingface.check(saved)
    if not (family := FAMILIES[family_of(saved)]).native:
        raise UserError(f"{saved.name}: Transformers has no class of {family.name}")


def encoder_with_vectors(saved: SavedModel) -> SavedModel:
    """Return a model without its heads; if it does not define text vectors, add `PLAIN` vectors."""
    parts = {name: part for name, part in saved.params.items() if name in ("encoder", "pooling")}
    embedding = saved.embedding or PLAIN
    return dataclasses.replace(saved, params=parts, outputs=None, embedding=embedding)


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Read the directory back and compare outputs; compare sentence-transformers' vectors too.

    Returns:
        The result of `huggingface.prove`, with an entry in `proofs` for sentence-transformers: the
        result of `compare_vectors`, or the reason why nothing was compared.
    """
    proven = huggingface.prove(saved, out, rows)
    if missing("sentence_transformers", "torch"):
        why = "sentence-transformers and torch are not both installed (the extra bert_jax[parity])"
        proven["proofs"]["sentence-transformers"] = {"ran": False, "why": why}
        return proven
    ties = proven["proofs"]["transformers"].get("texts_with_ties", [])
    found = compare_vectors(saved, out, ties)
    proven["proofs"]["sentence-transformers"] = found
    gaps = proven["differences"]
    gaps["embedding"] = max(gaps["embedding"], found["differences"]["embedding"])
    proven["versions"]["sentence-transformers"] = metadata.version("sentence-transformers")
    return proven


def compare_vectors(saved: SavedModel, out: Path, ties: Sequence[str] = ()) -> dict[str, Any]:
    """Compare our vectors of texts in many scripts with sentence-transformers' vectors from `out`.

    Two kinds of texts are left out: texts that spell a special token, because bert_jax reads them
    as plain text; and `ties`, texts that have two equally probable segmentations.

    Raises:
        ProofFailedError: Shapes differ, or the cosine of a text is below `LEAST_COSINE`.
    """
    from sentence_transformers import SentenceTransformer

    assert saved.embedding is not None
    with quiet():
        theirs = SentenceTransformer(f"{out}", device="cpu", local_files_only=True)
    texts = [text for text in plain_texts(saved) if text not in ties]
    encoders = (
        ("without prefix", "", theirs.encode),
        ("query", saved.embedding.query_prefix, theirs.encode_query),
        ("document", saved.embedding.document_prefix, theirs.encode_document),
    )
    least, gap = 1.0, 0.0
    for kind, prefix, encode in encoders:
        mine = vectors_of(saved, [prefix + text for text in texts])
        other = np.asarray(encode(texts, show_progress_bar=False), np.float32)
        if mine.shape != other.shape:
            raise ProofFailedError(
                f"sentence-transformers gives vectors of shape {other.shape}, not {mine.shape}"
            )
        cosines = (unit(mine) * unit(other)).sum(1)
        worst = int(cosines.argmin())
        if not cosines[worst] >= LEAST_COSINE:
            raise ProofFailedError(
                f"sentence-transformers gives another vector for {texts[worst][:60]!r} "
                f"({kind}): the cosine is {cosines[worst]:.6f}, not at least {LEAST_COSINE}"
            )
        least = min(least, float(cosines[worst]))
        gap = max(gap, float(np.abs(mine - other).max()))
    return {
        "ran": True, "class": "SentenceTransformer", "texts": len(texts), "least_cosine": least,
        "differences": {"embedding": gap},
    }  # fmt: skip


def vectors_of(saved: SavedModel, texts: Sequence[str]) -> np.ndarray:
    """Compute vectors (N, D) of texts in float32; each text is cut to the model's length."""
    tokenizer = saved.tokenizer
    room = min(saved.max_length, saved.config.num_positions) - num_special(tokenizer, pair=False)
    ids = tokenizer.encode_batch(list(texts))
    rows = [make_row(tokenizer, found[:room]).ids.tolist() for found in ids]
    batches = [batch_of(saved, [row], max(map(len, rows))) for row in rows]  # one shape to compile
    return np.concatenate([logits_of(saved, batch)["embedding"] for batch in batches])


def said_of_vectors(embedding: EmbeddingConfig, width: int) -> str:
    """Describe the text vectors of a model, for the model card."""
    text = f"It turns texts into vectors of {width} numbers: {POOLINGS[embedding.pooling]}"
    text += ", divided by its norm." if embedding.normalize else "."
    for kind, prefix in (("query", embedding.query_prefix), ("text", embedding.document_prefix)):
        if prefix:
            text += f" Each {kind} is prefixed with `{plain(prefix)}`."
    return text


_LOADING = """\
With sentence-transformers, where `DIR` is this directory:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("DIR")
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


def loading(saved: SavedModel) -> str:
    """Describe how to compute vectors, for the model card."""
    assert saved.embedding is not None
    sizes = ", ".join(map(str, saved.embedding.dimensions))
    cut = "" if not sizes else (
        f"\n\nThe vectors were trained to work also if cut to their first {sizes} numbers: pass "
        "`truncate_dim=N` to sentence-transformers, or `dimensions=N` to bert_jax."
    )  # fmt: skip
    return f"{_LOADING}{cut}"
