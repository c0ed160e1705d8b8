"""The initial checkpoint of a larger model, made from copies of a smaller one: bert-jax grow.

report = grow_model("work/small", Path("work/grown"), lambda small: replace(small, num_layers=28))

The larger model is written in Hugging Face's format, read back and compared bit for bit. If a
corpus is given, the losses of both models are measured. Optimizer states are not grown.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bert_jax
from bert_jax.artefacts.exchange.export import as_trained
from bert_jax.artefacts.exchange.exported_files import class_of, write_huggingface, write_json
from bert_jax.artefacts.exchange.huggingface import read_back
from bert_jax.artefacts.formats.huggingface_files import PRETRAINING_HEADS
from bert_jax.artefacts.saved.ancestors import RECORD
from bert_jax.artefacts.saved.lineage import ancestor_entry
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.artefacts.saved.runs import staged
from bert_jax.errors import UserError
from bert_jax.files.checks import DIGESTS, digests_of
from bert_jax.model.config import ModelConfig
from bert_jax.model.growth import SIZES, grow_params, grown_config
from bert_jax.training.pretrain.corpus import Corpus, open_corpus
from bert_jax.training.pretrain.evaluate import check_measurable, heldout_metrics

GROWTH_FILE = "growth.json"
"""Name of the file that `bert-jax grow` writes beside a model."""


@dataclass(frozen=True)
class Wanted:
    """Configuration whose only section, `model`, is the larger model. Options set its fields."""

    model: ModelConfig


def grow_model(
    source: str | Path,
    out: Path,
    wanted: Callable[[ModelConfig], ModelConfig],
    *,
    preserve: bool = False,
    seed: int = 0,
    corpus: str | None = None,
    max_rows: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write a larger model to `out`, check it by reading it back, and return its `growth.json`.

    Raise a UserError if the source is not a pretrained model or cannot grow to a given size, the
    corpus has another tokenizer or no held-out text, or Transformers has no class for the result.
    Raise a ProofFailedError if the model reads back differently. Errors leave `out` unchanged.

    Args:
        source: Directory of a pretrained model, of any kind that `read_model` reads.
        out: A directory that does not exist yet, or is empty.
        wanted: Function that returns the larger model's configuration, given the source's.
        preserve: Whether a wider model computes the same as the source; see `grow_params`.
        seed: Seed of the noise that `preserve` adds.
        corpus: Directory of a corpus; the losses of both models on its held-out text are measured.
        max_rows: Largest number of rows of held-out text; None means all rows.
        say: Function that receives a line about each step of the work.
    """
    stores = open_corpus(corpus) if corpus else None
    say(f"reading {source}")
    saved = as_trained(read_model(source))
    if parts := saved.params.keys() - {"encoder", *PRETRAINING_HEADS}:
        raise UserError(
            f"{saved.name} has parts that cannot be grown ({', '.join(sorted(parts))}); give a "
            "pretrained encoder or, of a fine-tuned model, the model that it started from"
        )
    if stores is not None:
        check_measurable(saved, stores, corpus or "", f"{source}")
    config = grown_config(saved.config, wanted(saved.config), saved.name)
    with staged(out) as directory:
        say(f"growing {_shape(saved.config)} to {_shape(config)}")
        grown = replace(
            saved,
            config=config,
            params=grow_params(saved.params, saved.config, config, preserve=preserve, seed=seed),
            max_length=config.num_positions,
            name=f"{out}",
        )
        write_huggingface(grown, directory)
        back = read_back(grown, directory)
        report: dict[str, Any] = {
            "source": saved.name,
            RECORD: [ancestor_entry("source", source, saved.origin.step)],
            "class": class_of(grown),
            "preserve": preserve,
            "seed": seed,
            "sizes": {
                name: [getattr(each, name) for each in (saved.config, config)] for name in SIZES
            },
            DIGESTS: digests_of(directory),
            "tokenizer_fingerprint": saved.tokenizer.fingerprint,
            "bert_jax": bert_jax.__version__,
        }
        if stores is not None:
            say(f"measuring both on the held-out text of {corpus}")
            report |= {
                "source_loss": _loss(saved, stores, max_rows),
                "loss": _loss(back, stores, max_rows),
                "unigram_entropy": stores.train.unigram_entropy,
                "corpus": stores.train.fingerprint,
            }
        write_json(directory / GROWTH_FILE, report)
    return report


def _loss(saved: SavedModel, corpus: Corpus, max_rows: int | None) -> float:
    loss, *_ = heldout_metrics(saved, corpus, max_rows=max_rows).values()
    return loss


def _shape(config: ModelConfig) -> str:
    return f"{config.num_layers} layers x {config.hidden_dim}, {config.num_heads} heads"
