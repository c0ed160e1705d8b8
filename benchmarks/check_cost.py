"""The cost of comparing what is read with its digests, as a share of the verb that reads it.

    python benchmarks/check_cost.py
    python benchmarks/check_cost.py --check

Two verbs, each in turns as it is and with the comparison left out, in children of their own:

- `bert-jax fill-mask DIR TEXT` of an export of BERT-base's shape (see inference_start.py).
- `bert-jax pretrain` of BERT-tiny from the command to the end of its first three steps, which
  includes the compilation and the first save, with a store of one shard that is read whole.

Medians of the children's processor seconds and wall seconds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from inference_start import TEXT, write_model

from bert_jax.artefacts.exchange.exported_files import write_json
from bert_jax.data.store_writer import ShardWriter, write_manifest
from bert_jax.files.checks import DIGESTS, digests_of
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

BAR = 0.05
"""Largest share that `--check` accepts."""
CONFIG = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({
        "model": {"num_layers": 2, "hidden_dim": 128, "num_heads": 2, "mlp_dim": 512},
        "training": {"num_steps": 3, "phases": ({"length": 128, "batch_size": 32},)},
    })
"""
CHILD = """
import sys
from bert_jax.data import store
from bert_jax.files import checks
if sys.argv[1] == "without":
    store.check_digests = checks.check_recorded = lambda *_: None
from bert_jax.cli.main import main
raise SystemExit(main(sys.argv[2:]))
"""
SIDES = ("without", "compared")


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="base", help="tiny, mini, small, base (default: base)")
    parser.add_argument(
        "--tokens", type=int, default=100, help="millions of tokens of the store (default: 100)"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help=f"fail above {BAR:.0%}%")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    worst = 0.0
    print(f"{options.model}, {options.tokens} M tokens, {options.repeats} repeats")
    print(f"{'seconds':22}{'without':>10}{'compared':>10}{'cost':>8}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, store, run = (directory / each for each in ("model", "store", "run"))
        write_model(model, options.model)
        write_json(model / "parity.json", {DIGESTS: digests_of(model)})
        write_store(store, options.tokens)
        (directory / "tiny.py").write_text(CONFIG)
        verbs = {
            "fill-mask": ["fill-mask", f"{model}", TEXT, "--json"],
            "pretrain": [
                "pretrain", f"--config={directory}/tiny.py", f"--config.data.corpus={store}"
            ],
        }  # fmt: skip
        for verb, arguments in verbs.items():
            seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
            for number in range(2 * options.repeats + 1):
                side, more = SIDES[number % 2], []
                if verb == "pretrain":
                    more = [f"--workdir={run}-{number}"]
                found = measure(side, [*arguments, *more])
                if number:  # the first one fills caches
                    seconds[side].append(found)
            for column, kind in enumerate(("processor", "wall")):
                without, compared = (
                    statistics.median(each[column] for each in seconds[side]) for side in SIDES
                )
                cost = compared / without - 1
                worst = max(worst, cost)
                print(f"{f'{verb}, {kind}':22}{without:10.2f}{compared:10.2f}{cost:8.1%}")
    return int(options.check and worst > BAR)


def measure(side: str, arguments: list[str]) -> tuple[float, float]:
    """Run a child; return its processor seconds and wall seconds."""
    before, begin = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", CHILD, side, *arguments], check=True, stdout=subprocess.DEVNULL
    )
    wall, after = time.perf_counter() - begin, os.times()
    system = after.children_system - before.children_system
    return after.children_user - before.children_user + system, wall


def write_store(path: Path, millions: int) -> None:
    """Write a store of random tokens in documents of 50 sentences of 20 tokens."""
    words = [f"word{number}" for number in range(30_522 - len(SPECIAL_TOKENS))]
    tokenizer, random = WordPieceTokenizer([*SPECIAL_TOKENS, *words]), np.random.default_rng(0)
    with ShardWriter(path / "shards" / "00000", tokenizer) as writer:
        for _ in range(millions):
            tokens = random.integers(5, tokenizer.vocab_size, 1_000_000)
            writer.append(tokens, np.full(50_000, 20), np.full(1000, 50))
        write_manifest(path, [writer.finish()], tokenizer)


if __name__ == "__main__":
    raise SystemExit(main())
