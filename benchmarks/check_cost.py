"""The cost of comparing an export with its digests, as a share of the verb that reads the export.

    python benchmarks/check_cost.py
    python benchmarks/check_cost.py --check

`bert-jax fill-mask DIR TEXT` of a model of BERT-base's shape (see inference_start.py), in turns
with `parity.json` in the directory and without, which leaves the comparison out. Each run is a
child of its own; medians of its processor seconds and of its wall seconds.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from inference_start import TEXT, run, write_model

from bert_jax.artefacts.exchange.huggingface_files import write_json
from bert_jax.files.checks import DIGESTS, digests_of

BAR = 0.05
"""Largest share that `--check` accepts."""


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="base", help="tiny, mini, small, base (default: base)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help=f"fail above {BAR:.0%}")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), options.model)
        record = {DIGESTS: digests_of(Path(directory))}
        for number in range(2 * options.repeats + 1):
            compared = number % 2 == 1
            if compared:
                write_json(Path(directory, "parity.json"), record)
            begin = time.perf_counter()
            used, _ = run(["-m", "bert_jax.cli", "fill-mask", directory, TEXT, "--json"])
            if number:  # the first one fills caches
                seconds[compared].append((used, time.perf_counter() - begin))
            Path(directory, "parity.json").unlink(missing_ok=True)
    worst = 0.0
    print(f"{options.model}, {options.repeats} repeats")
    print(f"{'seconds':12}{'without':>10}{'compared':>10}{'cost':>8}")
    for column, name in enumerate(("processor", "wall")):
        without, compared_too = (
            statistics.median(each[column] for each in seconds[key]) for key in (False, True)
        )
        cost = compared_too / without - 1
        worst = max(worst, cost)
        print(f"{name:12}{without:10.2f}{compared_too:10.2f}{cost:8.1%}")
    return int(options.check and worst > BAR)


if __name__ == "__main__":
    raise SystemExit(main())
