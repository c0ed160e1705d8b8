"""Rate of `bert-jax corpus` against `tokenizers` alone: MB of text per second on the same cores.

    python benchmarks/corpus_build.py
    python benchmarks/corpus_build.py --text book.txt.xz --vocab vocab.txt --repeats 5

Ours: from a plain text file on disk to a complete token store: starting the workers, reading,
checking UTF-8, dividing into documents and sentences (`fast`), WordPiece, hashing, writing, fsync.

Peer: `encode_batch_fast` of Hugging Face `tokenizers` over the same paragraphs with the same
vocabulary, by its own threads (RAYON_NUM_THREADS). The text is in memory as a list of strings
before the clock starts, and nothing is done with what comes back, not even reading the ids.

Both run in fresh processes, alternately; the medians of wall time are compared. CPU time is printed
as well: it tells more than wall time on a machine that does other work.
"""

import argparse
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEER_BATCH = 1000  # paragraphs in a call
TARGET = 0.6


def prepare(text: str, vocab: str | None, directory: Path) -> None:
    """Writes text.txt and tokenizer/ to `directory`."""
    from bert_jax.corpus.build import iter_texts
    from bert_jax.corpus.sources import resolve_sources
    from bert_jax.tokenization.load import load_tokenizer
    from bert_jax.tokenization.wordpiece_training import train_wordpiece

    plain = directory / "text.txt"
    if text == "python-docs":
        (source,) = resolve_sources([text])
        plain.write_text("\n\n".join(source.texts()), encoding="utf-8")
    elif text.endswith(".xz"):
        with lzma.open(text) as file:
            plain.write_bytes(file.read())
    else:
        plain.write_bytes(Path(text).read_bytes())
    tokenizer = (
        load_tokenizer(vocab) if vocab else train_wordpiece(iter_texts([str(plain)]), 30_000)
    )
    tokenizer.save(directory / "tokenizer")


def run_ours(directory: Path, cores: int) -> None:
    from bert_jax.corpus.build import build_corpus
    from bert_jax.tokenization.load import load_tokenizer

    tokenizer = load_tokenizer(directory / "tokenizer")
    before = os.times()
    with tempfile.TemporaryDirectory(dir=directory) as out:
        built = build_corpus(
            [str(directory / "text.txt")], tokenizer, Path(out) / "corpus", num_workers=cores
        )
    report(built.seconds, before, built.train.num_tokens)


def run_peer(directory: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer" / "tokenizer.json"))
    text = (directory / "text.txt").read_text(encoding="utf-8")
    paragraphs = [line for line in text.split("\n") if line]
    before, begin = os.times(), time.perf_counter()
    for start in range(0, len(paragraphs), PEER_BATCH):
        tokenizer.encode_batch_fast(
            paragraphs[start : start + PEER_BATCH], add_special_tokens=False
        )
    report(time.perf_counter() - begin, before, 0)


def report(seconds: float, before: os.times_result, tokens: int) -> None:
    """One line of JSON for the process that started this one."""
    cpu = sum(os.times()[:4]) - sum(before[:4])
    print(json.dumps({"seconds": seconds, "cpu": cpu, "tokens": tokens}))


def measure(role: str, directory: Path, cores: int) -> dict[str, float]:
    environment = {**os.environ, "RAYON_NUM_THREADS": str(cores)}
    environment["TOKENIZERS_PARALLELISM"] = "true" if role == "peer" else "false"
    command = [sys.executable, __file__, "--role", role, "--directory", str(directory)]
    output = subprocess.run(
        [*command, "--cores", str(cores)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    return json.loads(output.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text", default="python-docs", help="a text file, .txt.xz, or python-docs"
    )
    parser.add_argument("--vocab", help="a trained vocabulary; default: train one of 30,000")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--role", choices=["ours", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "ours":
        run_ours(options.directory, options.cores)
        return
    if options.role == "peer":
        run_peer(options.directory)
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(options.text, options.vocab, directory)
        megabytes = (directory / "text.txt").stat().st_size / 1e6
        print(
            f"{options.text}: {megabytes:.1f} MB, {options.cores} cores, "
            f"load of the machine {os.getloadavg()[0]:.1f}"
        )
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
        for repeat in range(options.repeats):
            for role, results in runs.items():
                results.append(measure(role, directory, options.cores))
                last = results[-1]
                print(f"  {repeat + 1} {role}: {last['seconds']:.2f} s, {last['cpu']:.2f} s of CPU")
    rates = {}
    for role, results in runs.items():
        rates[role] = megabytes / statistics.median(result["seconds"] for result in results)
        cpu = statistics.median(result["cpu"] for result in results)
        print(f"{role}: {rates[role]:.2f} MB/s, {megabytes / cpu:.2f} MB per second of CPU")
    ratio = rates["ours"] / rates["peer"]
    print(f"ratio: {ratio:.2f} (target: at least {TARGET})")


if __name__ == "__main__":
    main()
