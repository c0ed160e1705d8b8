"""Memory of a corpus build and of the training of a vocabulary, against the size of the text.

    python benchmarks/corpus_memory.py --sizes 1000 2000 3000

Text of so many MB is generated: words are as frequent as in a language (Zipf, with ever new rare
words), and one document in ten is a near-duplicate. `bert-jax tokenizer` learns from all of it,
and `bert-jax corpus` drops near-duplicates. Peaks are VmHWM of /proc, which a program does not
inherit; their sum is over processes that live at once, and counts shared pages several times.
"""

import argparse
import contextlib
import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

CLI = [sys.executable, "-m", "bert_jax.cli"]
COPIES, CHANGED, RECENT = 0.1, 0.01, 1000
"""Share of copies among the documents, share of changed words, and documents to copy from."""
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou"]


@functools.lru_cache(1 << 18)
def word(rank: int) -> str:
    """Spell the word of a rank; frequent words are short."""
    rest, last = divmod(rank, len(_SYLLABLES))
    return (word(rest) if rest else "") + _SYLLABLES[last]


def generate(path: Path, megabytes: int, seed: int) -> None:
    """Write documents of 50 to 500 words, in sentences of 12."""
    draw, recent, left = np.random.default_rng(seed), list[np.ndarray](), megabytes * 1e6
    with path.open("w") as file:
        while left > 0:
            if recent and draw.random() < COPIES:
                ranks = recent[draw.integers(len(recent))].copy()
                ranks[draw.random(len(ranks)) < CHANGED] = 1
            else:
                ranks = draw.zipf(1.3, draw.integers(50, 500)) % 10**12
                ranks[ranks == 1] = draw.integers(1, 40, (ranks == 1).sum())  # no word has 25%
                recent = [*recent[-RECENT:], ranks]
            words = list(map(word, ranks.tolist()))
            lines = (words[begin : begin + 12] for begin in range(0, len(words), 12))
            left -= file.write("\n".join(f"{' '.join(e).capitalize()}." for e in lines) + "\n\n")


def peak(process: psutil.Process) -> int:
    """Return the peak of a process in bytes; 0 if it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return sum(int(each.split()[1]) << 10 for each in lines if each.startswith("VmHWM:"))
    return 0


def measure(command: list[str]) -> tuple[float, float, float]:
    """Peaks in GiB of the largest process and of all, and seconds, of a command with children."""
    running, begin = subprocess.Popen(command, stdout=subprocess.DEVNULL), time.perf_counter()
    watched, largest, together = psutil.Process(running.pid), 0, 0
    while running.poll() is None:
        with contextlib.suppress(psutil.Error):
            found = list(map(peak, [watched, *watched.children(recursive=True)]))
            largest, together = max([largest, *found]), max(together, sum(found))
        time.sleep(0.1)
    if running.returncode:
        raise SystemExit(f"exit code {running.returncode} from {' '.join(command)}")
    return largest / 2**30, together / 2**30, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 2000, 3000], help="MB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokenizer", default="--memory=1", help="options of the training")
    parser.add_argument("--corpus", default="--drop-duplicates=near", help="options of the build")
    given = parser.parse_args()
    for size in sorted(given.sizes):
        with tempfile.TemporaryDirectory() as name:
            text, vocabulary = Path(name, "text.txt"), Path(name, "tokenizer")
            generate(text, size, given.seed)
            commands = {
                "tokenizer": [f"--out={vocabulary}", "--vocab-size=8000", *given.tokenizer.split(),
                              *[f"--max-mb={size + 1}"] * ("--engine" not in given.tokenizer)],
                "corpus": [f"--tokenizer={vocabulary}", f"--out={Path(name, 'corpus')}",
                           f"--num-workers={given.workers}", *given.corpus.split()],
            }  # fmt: skip
            for verb, options in commands.items():
                largest, together, seconds = measure([*CLI, verb, f"--input={text}", *options])
                peaks = f"largest process {largest:.3f} GiB, all processes {together:.3f} GiB"
                print(f"{verb} of {size:,} MB: {peaks}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
