"""Sentences a second of beam search against Transformers' `generate`, with the same weights.

    python benchmarks/beam_search.py --check
    python benchmarks/beam_search.py --model RUN --repeats 5

Without --model: 3 + 3 layers, 256 wide, feed-forward 512, 4 heads, 8,000 tokens, random weights, so
that every translation has the greatest length. The model is written as a `MarianMTModel` (or the
class that computes a trained one), which the peer loads; both sides search the same sources, from
ids to ids, five beams, in float32. Our side is what `bert-jax translate` runs, and the peer runs at
the best of several batch sizes. One process, the sides take turns. Rates are by the wall and by the
processor's time. `--check` exits with 1 if the ratio by the wall is below the bar, or if one of the
peer's translations has other tokens.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import torch
from decoding import MODEL

from bert_jax.artefacts.exchange.exported_files import class_of, write_huggingface
from bert_jax.artefacts.exchange.proof import Batch
from bert_jax.artefacts.exchange.theirs import TheirModel
from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.infer.translate import Translator
from bert_jax.model.seq2seq.search import SearchConfig
from bert_jax.model.seq2seq.transformer import TransformerNetwork
from bert_jax.tasks.rows import Rows
from bert_jax.tokenization.sentencepiece import train_sentencepiece

BAR = 2.5
"""Least ratio by the wall that `--check` accepts."""


def main() -> int:
    """Measure both sides, and print sentences a second and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="run or directory that translates (default: random)")
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--source-length", type=int, default=20)
    parser.add_argument("--target-length", type=int, default=32)
    parser.add_argument("--batch-sizes", default="64,128", help="of the peer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--check", action="store_true", help=f"fail below {BAR} times the peer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    saved = read_model(options.model) if options.model else random_model()
    count, length, steps = options.sentences, options.source_length, options.target_length
    tokens = np.random.default_rng(0).integers(5, saved.config.vocab_size, (count, length))
    special = saved.tokenizer.special_ids
    tokens[:, 0], tokens[:, -1] = special.cls, special.sep
    ones = np.ones((count, length), np.int32)
    source, settings = Batch(tokens.astype(np.int32), 0 * ones, ones), SearchConfig()

    with tempfile.TemporaryDirectory() as directory:
        write_huggingface(saved, Path(directory))
        peer = TheirModel(Path(directory), class_of(saved)).whole()
    translator = Translator(
        dataclasses.replace(saved, params=jax.device_put(saved.params)),
        search=dataclasses.replace(settings, max_length=steps),
    )
    rows = Rows(list(source.tokens), np.full(count, length, np.int32))

    def translated() -> list[list[int]]:
        found = [each for each, _ in translator.outputs(rows)]
        return [each.tokens[0, : each.lengths[0]].tolist() for each in found]

    def searched(size: int) -> list[list[int]]:
        return [
            row
            for start in range(0, count, size)
            for row in peer.translate(
                Batch(*(part[start : start + size] for part in source)), settings, steps
            )
        ]

    sides: dict[str, Callable[[], list[list[int]]]] = {"bert_jax": translated}
    for size in map(int, options.batch_sizes.split(",")):
        sides[f"generate, {size} a batch"] = partial(searched, size)
    found = {name: run() for name, run in sides.items()}  # compiles, and fills caches
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(options.repeats):
        for name, run in sides.items():
            begun = time.perf_counter(), time.process_time()
            run()
            seconds[name].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    rates = {name: count / np.median(each, axis=0) for name, each in seconds.items()}
    ours = rates.pop("bert_jax")
    best = max(rates, key=lambda name: rates[name][0])
    same = np.mean([a == b for a, b in zip(found["bert_jax"], found[best], strict=True)])
    print("sentences a second by the wall, and of the processor's time")
    for name, (wall, busy) in {"bert_jax": ours, **rates}.items():
        print(f"{wall:8.1f} {busy:8.1f}  {name}")
    wall, busy = ours / rates[best]
    print(f"ratio {wall:.2f} by the wall, {busy:.2f} of processor time to {best}; "
          f"equal tokens {same:.1%}")  # fmt: skip
    return int(options.check and (wall < BAR or same < 1))


def random_model() -> SavedModel:
    """Return a translator of random weights in the form of Marian."""
    texts = [f"word{n} {n}" for n in range(2000)]
    tokenizer = train_sentencepiece(texts, 300, model="unigram", byte_fallback=False)
    network = TransformerNetwork(dataclasses.replace(MODEL, norm_eps=1e-5))
    params = jax.tree.map(np.asarray, network.init(jax.random.key(0)))
    return SavedModel(
        config=network.model, params=params, outputs=None, tokenizer=tokenizer,
        tokenizer_files=Path("nowhere"), max_length=network.model.num_positions,
        name="random weights", origin=Origin("pretrain"), network=network,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
