"""Texts a second of `bert_jax.load(DIR).embed` against `SentenceTransformer.encode`, same files.

    python benchmarks/embedding_encode.py --check
    python benchmarks/embedding_encode.py --models mini --texts 1024 --repeats 7
    python benchmarks/embedding_encode.py --device gpu --texts 8192 --batch-sizes 32,256

A model of random weights and BERT's shape is written in the layout of sentence-transformers (mean
of the tokens, length 1) and read by both sides; the tokenizer is trained on the texts, whose
lengths are mixed: 3 to 300 words, most of them short, in random order. Both sides sort by length
and pad; theirs is taken at the best of several batch sizes, the first of which is its default. The
sides take turns in one process, with the same number of threads; a pass includes tokenization and
ends with vectors as numpy arrays. Vectors are compared: the least cosine is printed.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

BARS = {"base": 0.9, "mini": 1.0}
"""Least ratios that `--check` accepts."""
LEAST_COSINE = 0.99999


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--models", default="mini,base", help="sizes (default: mini,base)")
    parser.add_argument("--texts", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch-sizes", default="32,8", help="of sentence-transformers")
    parser.add_argument("--batch-tokens", type=int, help="of bert_jax (default: its own)")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: processor seconds of all threads, for a machine that does other work; give the "
        "process one core (taskset -c 0)",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help=f"fail below {BARS}")
    parser.add_argument("--json", action="store_true", help="one JSON object a side")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:  # both sides share the card's memory
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    texts = made_texts(options.texts)
    failed = False
    for size in options.models.split(","):
        with tempfile.TemporaryDirectory() as directory:
            write_model(Path(directory), size, texts)
            failed |= not measured(directory, size, texts, options)
    return int(failed and options.check)


def measured(directory: str, size: str, texts: list[str], options: argparse.Namespace) -> bool:
    """Measures a model, prints its rates, and says whether the bar is met."""
    import numpy as np

    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    sides = {"bert_jax": ours(directory, texts, options)}
    sides |= theirs(directory, texts, options)
    vectors = {name: run() for name, run in sides.items()}  # compiles, and fills caches
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.repeats):
        for name, run in sides.items():
            begun = clock()
            run()
            rates[name].append(len(texts) / (clock() - begun))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    if options.json:
        for name, median in medians.items():
            case = f"embed, {size}, {len(texts)} texts"
            print(json.dumps({"case": case, "side": name, "texts_per_second": median}))
        return True
    print(
        f"{size}, {len(texts)} texts, {options.threads} threads, {options.repeats} repeats, "
        f"seconds of {options.clock}"
    )
    print(f"{'':36}{'texts/s':>9}{'min':>8}{'max':>8}{'least cosine':>14}")
    least = 1.0
    for name, median in medians.items():
        cosine = float(np.min((vectors["bert_jax"] * vectors[name]).sum(1)))
        least = min(least, cosine)
        print(f"{name:36}{median:9.2f}{min(rates[name]):8.2f}{max(rates[name]):8.2f}{cosine:14.7f}")
    best = max((name for name in medians if name != "bert_jax"), key=medians.__getitem__)
    ratio = statistics.median(a / b for a, b in zip(rates["bert_jax"], rates[best], strict=True))
    print(f"bert_jax / {best}: {ratio:.3f}")
    bar = BARS.get(size, 0.0)
    if ratio < bar or least < LEAST_COSINE:
        print(f"{size}: below {bar}, or vectors differ", file=sys.stderr)
        return False
    return True


def made_texts(number: int) -> list[str]:
    """Texts of invented words: half of them have fewer than 20 words, the longest 300."""
    import numpy as np

    random = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnoprstuvwy"))
    words = ["".join(random.choice(letters, random.integers(2, 9))) for _ in range(4000)]
    lengths = np.clip(random.lognormal(3.0, 0.9, number), 3, 300).astype(int)
    chosen = np.minimum(random.zipf(1.2, int(lengths.sum())) - 1, len(words) - 1)
    parts = np.split(chosen, np.cumsum(lengths)[:-1])
    return [" ".join(words[n] for n in part) for part in parts]


def write_model(directory: Path, size: str, texts: list[str]) -> None:
    """An encoder with random weights, and a vocabulary of the texts."""
    import jax
    import numpy as np

    from bert_jax.artefacts.exchange.sentence_transformers import write
    from bert_jax.artefacts.saved.model import Origin, SavedModel
    from bert_jax.model.config import SIZES
    from bert_jax.model.embedding import EmbeddingConfig
    from bert_jax.model.heads import init_params
    from bert_jax.tokenization.training import train_wordpiece

    tokenizer = train_wordpiece(texts, 8192)
    config = dataclasses.replace(
        SIZES[size], init_std=0.04, vocab_size=tokenizer.vocab_size, dtype="float32"
    )
    params = jax.tree.map(np.asarray, init_params(config, jax.random.key(0)))
    saved = SavedModel(
        config=config,
        params={"encoder": params["encoder"]},
        outputs=None,
        tokenizer=tokenizer,
        tokenizer_files=directory,
        max_length=config.num_positions,
        name="random",
        origin=Origin("huggingface"),
        embedding=EmbeddingConfig("mean"),
    )
    write(saved, directory)


def ours(
    directory: str, texts: list[str], options: argparse.Namespace
) -> "Callable[[], np.ndarray]":
    """A pass over all texts."""
    import bert_jax

    limits = {} if options.batch_tokens is None else {"batch_tokens": options.batch_tokens}
    model = bert_jax.load(directory, **limits)
    return lambda: model.embed(texts)


def theirs(
    directory: str, texts: list[str], options: argparse.Namespace
) -> "dict[str, Callable[[], np.ndarray]]":
    """Passes of sentence-transformers, by batch size; bfloat16 on a GPU, as ours."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    cuda = options.device == "gpu"
    model = SentenceTransformer(
        directory, device="cuda" if cuda else "cpu", local_files_only=True,
        model_kwargs={"dtype": torch.bfloat16} if cuda else {},
    )  # fmt: skip

    def encode(size: int) -> "np.ndarray":
        return model.encode(texts, batch_size=size, show_progress_bar=False)

    return {
        f"sentence-transformers, batch {size}": lambda size=int(size): encode(size)  # type: ignore[misc]
        for size in options.batch_sizes.split(",")
    }


if __name__ == "__main__":
    raise SystemExit(main())
