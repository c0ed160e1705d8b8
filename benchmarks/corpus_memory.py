"""Memory of a corpus build against the size of its text: the slope, and the largest process.

    python benchmarks/corpus_memory.py --sizes 1000 2000 3000

Text of so many MB is generated, documents of random words, and built by the processes of this
machine. All processes of the build are watched; printed are the largest sum of their memory (PSS,
where the system tells it, else RSS) and the slope from the smallest to the largest text.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

TARGET_GIB = 1.5
_WORDS = 20_000


def generate(path: Path, megabytes: int, seed: int = 0) -> None:
    """Write documents of a few paragraphs; words are as frequent as in a language."""
    draw = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(draw.choices(letters, range(26, 0, -1), k=draw.randint(2, 9)))
             for _ in range(_WORDS)]  # fmt: skip
    weights = [1 / (rank + 1) for rank in range(_WORDS)]
    with path.open("w") as file:
        while file.tell() < megabytes * 1e6:
            text = draw.choices(words, weights, k=50_000)
            for begin in range(0, len(text), 250):
                for sentence in range(begin, begin + 250, 10):
                    file.write(" ".join(text[sentence : sentence + 10]).capitalize() + ". ")
                file.write("\n\n")


def memory(processes: list[psutil.Process]) -> int:
    """Bytes that the processes hold together."""
    total = 0
    for process in processes:
        try:
            found = process.memory_full_info()
            total += getattr(found, "pss", found.rss)
        except psutil.Error:
            continue
    return total


def measure(command: list[str]) -> tuple[float, float]:
    """Largest memory in GiB of a command and its children, and its seconds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    watched, largest, begin = psutil.Process(process.pid), 0, time.perf_counter()
    ended = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not ended.wait(0.5):
            try:
                largest = max(largest, memory([watched, *watched.children(recursive=True)]))
            except psutil.Error:
                return

    thread = threading.Thread(target=watch)
    thread.start()
    code = process.wait()
    ended.set()
    thread.join()
    if code:
        raise SystemExit(f"exit code {code} from {' '.join(command)}")
    return largest / 2**30, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 2000, 3000], help="MB")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard-mb", type=float, help="default: that of bert-jax corpus")
    parser.add_argument("--options", default="", help="further ones of bert-jax corpus")
    options = parser.parse_args()
    found: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for size in sorted(options.sizes):
            text = directory / "text.txt"
            generate(text, size)
            cli = [sys.executable, "-m", "bert_jax.cli"]
            if not (directory / "tokenizer").exists():
                subprocess.run(
                    [*cli, "tokenizer", f"--input={text}", "--vocab-size=8000", "--max-mb=8",
                     f"--out={directory / 'tokenizer'}"],
                    check=True, stdout=subprocess.DEVNULL,
                )  # fmt: skip
            command = [
                *cli, "corpus", f"--input={text}", f"--tokenizer={directory / 'tokenizer'}",
                f"--out={directory / 'corpus'}", f"--num-workers={options.workers}",
                "--overwrite", *options.options.split(),
            ]  # fmt: skip
            if options.shard_mb:
                command.append(f"--shard-mb={options.shard_mb}")
            found[size], seconds = measure(command)
            print(f"{size:,} MB: {found[size]:.3f} GiB, {seconds:.0f} s", flush=True)
    first, last = min(found), max(found)
    if first < last:
        slope = (found[last] - found[first]) * 2**30 / ((last - first) * 1e6)
        print(f"slope: {slope:.3f} bytes of memory a byte of text")
    print(f"largest: {max(found.values()):.2f} GiB (target: at most {TARGET_GIB})")


if __name__ == "__main__":
    main()
