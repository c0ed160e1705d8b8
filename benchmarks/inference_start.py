"""Processor seconds from the command to the answer: `bert-jax fill-mask` against Transformers.

    python benchmarks/inference_start.py
    python benchmarks/inference_start.py --repeats 3 --check

A model of BERT-base's shape with random weights and 30,522 tokens is written in Hugging Face's
format. Each run is a child of its own, in turns: `bert-jax fill-mask DIR TEXT`, and a Python that
imports Transformers, makes its pipeline "fill-mask" of the same directory and asks the same. User
and system time of the child count, imports, reading and compilation included. Both must find the
same tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BAR = 0.5
"""Largest ratio of our processor time to theirs that `--check` accepts."""
TEXT = "word12 word345 [MASK] word678."
THEIRS = """
import json, sys, transformers
fill = transformers.pipeline("fill-mask", model=sys.argv[1])
masks = [[{"id": found["token"]} for found in fill(sys.argv[2])]]
print(json.dumps({"masks": masks}))
"""


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="base", help="tiny, mini, small, base (default: base)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--check", action="store_true", help=f"fail above {BAR} times theirs")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), options.model)
        sides = {
            "bert_jax": ["-m", "bert_jax.cli", "fill-mask", directory, TEXT, "--json"],
            "Transformers": ["-c", THEIRS, directory, TEXT],
        }
        tokens = {name: run(command)[1] for name, command in sides.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.repeats):
            for name, command in sides.items():
                seconds[name].append(run(command)[0])
    print(f"{options.model}, {options.repeats} repeats")
    print(f"{'':14}{'CPU seconds':>12}{'min':>8}{'max':>8}")
    for name, found in seconds.items():
        print(f"{name:14}{statistics.median(found):12.2f}{min(found):8.2f}{max(found):8.2f}")
    ratio = statistics.median(seconds["bert_jax"]) / statistics.median(seconds["Transformers"])
    print(f"bert_jax / Transformers: {ratio:.2f}")
    if tokens["bert_jax"] != tokens["Transformers"]:
        print(f"the answers differ: {tokens}", file=sys.stderr)
        return 1
    if options.check and ratio > BAR:
        print(f"above {BAR}", file=sys.stderr)
        return 1
    return 0


def run(command: list[str]) -> tuple[float, set[int]]:
    """Run a child; return its processor seconds and the tokens that it found."""
    before = os.times()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    after = os.times()
    seconds = after.children_user - before.children_user
    (mask,) = json.loads(done.stdout)["masks"]
    tokens = {found["id"] for found in mask}
    return seconds + after.children_system - before.children_system, tokens


def write_model(directory: Path, size: str) -> None:
    """Write a pretrained model with random weights and made-up words in Hugging Face's format."""
    import dataclasses

    import jax
    import numpy as np

    from bert_jax.artefacts.exchange.exported_files import write_huggingface
    from bert_jax.artefacts.saved.model import Origin, SavedModel
    from bert_jax.model.config import SIZES
    from bert_jax.model.heads import init_params
    from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
    from bert_jax.tokenization.wordpiece import WordPieceTokenizer

    config = dataclasses.replace(SIZES[size], vocab_size=30522, dtype="float32")
    words = [f"word{number}" for number in range(config.vocab_size - len(SPECIAL_TOKENS) - 1)]
    saved = SavedModel(
        config=config,
        params=jax.tree.map(np.asarray, init_params(config, jax.random.key(0))),
        outputs=None,
        tokenizer=WordPieceTokenizer([*SPECIAL_TOKENS, ".", *words]),
        tokenizer_files=directory,
        max_length=config.num_positions,
        name="random",
        origin=Origin("huggingface"),
    )
    write_huggingface(saved, directory)


if __name__ == "__main__":
    raise SystemExit(main())
