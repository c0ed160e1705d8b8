"""Several runs one after another in each process of a pod, each with one bit that flips.

python flipped_runs.py CONFIG.json CORPUS OUT SEED EVERY NUMBER
"""

import json
import sys
from pathlib import Path

from bit_flips import Flipping, random_flips

from bert_jax.config.mapping import build
from bert_jax.distributed.parallel import processes
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.train import train
from bert_jax.training.steps.bad_step import BadStepError
from bert_jax.training.steps.recheck import SilentCorruptionError


def main() -> None:
    """Print a line of JSON for each run; run 0 has no flip."""
    file, corpus_dir, out, seed, every, number = sys.argv[1:]
    config = build(PretrainConfig, json.loads(Path(file).read_text()))
    corpus = open_corpus(corpus_dir)
    steps = config.training.num_steps
    flips = random_flips(int(number), devices=4, steps=steps, every=int(every), seed=int(seed))
    processes.join("on", 300)
    with Flipping().patched() as flipping:
        for place, flip in enumerate([None, *flips]):
            flipping.flip, error = flip, ""
            workdir = Path(out) / str(place)
            try:
                train(config, workdir, corpus=corpus, echo=lambda _: None)
            except (SilentCorruptionError, BadStepError) as caught:
                error = f"{type(caught).__name__}: {caught}"
            flipping.flip, flipping.armed = None, False
            print(json.dumps({"run": place, "flip": flip, "error": error}), flush=True)
    processes.leave(0)


if __name__ == "__main__":
    main()
