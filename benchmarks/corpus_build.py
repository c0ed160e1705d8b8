"""Rate of `bert-jax corpus` against named peers: MB of text per second on the same cores.

    python benchmarks/corpus_build.py
    python benchmarks/corpus_build.py --text book.txt.xz --vocab vocab.txt --repeats 5
    python benchmarks/corpus_build.py --text text.txt --against ray
    python benchmarks/corpus_build.py --text text.txt --against datatrove --peer-python PYTHON
    python benchmarks/corpus_build.py --text text.txt --against datatrove-dedup --peer-python PYTHON

against `tokenizers` alone, the default:

Ours: from a plain text file on disk to a complete token store: starting the workers, reading,
checking UTF-8, dividing into documents and sentences (`fast`), WordPiece, hashing, writing, fsync.

Peer: `encode_batch_fast` of Hugging Face `tokenizers` over the same paragraphs with the same
vocabulary, by its own threads (RAYON_NUM_THREADS). The text is in memory as a list of strings
before the clock starts, and nothing is done with what comes back, not even reading the ids.

against `ray`: the build by a Ray of this machine (peer: the processes of this machine), both with a
shard for each eighth of the text; the start of Ray, and of the processes, is part of it.

against `datatrove`: its reader and tokenizer stage, with the same tokenizer.json; with -dedup,
near-duplicates dropped before that, by its MinHash of 14 buckets x 8 hashes over 5-grams, and by
ours at a similarity of 0.8. Both read the same documents as JSON lines, in as many files as there
are cores. Datatrove needs an environment of its own: --peer-python is its interpreter.

All run in fresh processes, alternately; the medians of wall time are compared. CPU time is printed
as well: it tells more than wall time on a machine that does other work. Of processes that are not
children (Ray's, datatrove's) it is not counted.
"""

import argparse
import contextlib
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
TARGETS = {"tokenizers": 0.6, "ray": 0.85, "datatrove": 1.2, "datatrove-dedup": 3.0}
ROLES = ("tokenizers", "plain", "local", "ray", "jsonl", "jsonl-dedup")
"""What a process of this script does: the first is a peer, the others are ours."""
OURS = {"tokenizers": "plain", "ray": "ray", "datatrove": "jsonl", "datatrove-dedup": "jsonl-dedup"}
SHARDS = 8
SIMILARITY = 0.8


def prepare(text: str, vocab: str | None, directory: Path, parts: int) -> None:
    """Writes text.txt, the same documents in parts/*.jsonl, and tokenizer/ to `directory`."""
    from bert_jax.data.corpus.build import iter_texts
    from bert_jax.data.corpus.sources import resolve_sources
    from bert_jax.tokenization.load import load_tokenizer
    from bert_jax.tokenization.training import train_wordpiece

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
    (directory / "parts").mkdir()
    (source,) = resolve_sources([str(plain)])
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context((directory / "parts" / f"{number}.jsonl").open("w"))
            for number in range(parts)
        ]
        for number, document in enumerate(source.texts()):
            files[number % parts].write(json.dumps({"text": document, "id": str(number)}) + "\n")


def run_ours(role: str, directory: Path, cores: int) -> None:
    from bert_jax.data.corpus.build import build_corpora
    from bert_jax.data.corpus.cleaning.clean import CleaningConfig
    from bert_jax.data.corpus.passes import Recipe
    from bert_jax.data.corpus.sharded.engine import SHARD_BYTES, open_engine
    from bert_jax.tokenization.load import load_tokenizer

    tokenizer = load_tokenizer(directory / "tokenizer")
    near = SIMILARITY if role == "jsonl-dedup" else None
    recipe = Recipe(tokenizer, cleaning=CleaningConfig(near_duplicates=near))
    source = directory / ("parts/*.jsonl" if role.startswith("jsonl") else "text.txt")
    size = (directory / "text.txt").stat().st_size
    shard_bytes = {"plain": SHARD_BYTES, "local": size // SHARDS, "ray": size // SHARDS}
    before, begin = os.times(), time.perf_counter()
    engine = open_engine("ray" if role == "ray" else "local", num_workers=cores)
    with tempfile.TemporaryDirectory(dir=directory) as out:
        (built,) = build_corpora(
            [str(source)], recipe, Path(out) / "corpus", engine=engine,
            shard_bytes=shard_bytes.get(role, size // cores - 1),
        )  # fmt: skip
        engine.close()
        assert built.train is not None
        report(time.perf_counter() - begin, before, built.train.num_tokens)


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


def measure(role: str, directory: Path, cores: int, python: str) -> dict[str, float]:
    environment = {**os.environ, "RAYON_NUM_THREADS": str(cores)}
    environment["TOKENIZERS_PARALLELISM"] = "true" if role == "tokenizers" else "false"
    command = [sys.executable, __file__, "--role", role, "--directory", str(directory),
               "--cores", str(cores)]  # fmt: skip
    if role.startswith("datatrove"):
        script = str(Path(__file__).with_name("datatrove_build.py"))
        command = [python, script, str(directory), str(cores)]
        command += ["--dedup"] * role.endswith("-dedup")
    output = subprocess.run(
        command,
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
    parser.add_argument("--against", choices=[*TARGETS], default="tokenizers")
    parser.add_argument("--peer-python", default=sys.executable, help="with datatrove installed")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "tokenizers":
        run_peer(options.directory)
        return
    if options.role:
        run_ours(options.role, options.directory, options.cores)
        return
    ours = OURS[options.against]
    peer = "local" if ours == "ray" else options.against
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(options.text, options.vocab, directory, options.cores)
        megabytes = (directory / "text.txt").stat().st_size / 1e6
        print(
            f"{options.text}: {megabytes:.1f} MB, {options.cores} cores, "
            f"load of the machine {os.getloadavg()[0]:.1f}"
        )
        runs: dict[str, list[dict[str, float]]] = {ours: [], peer: []}
        for repeat in range(options.repeats):
            for role, results in runs.items():
                results.append(measure(role, directory, options.cores, options.peer_python))
                last = results[-1]
                print(f"  {repeat + 1} {role}: {last['seconds']:.2f} s, {last['cpu']:.2f} s of CPU")
    rates = {}
    for role, results in runs.items():
        rates[role] = megabytes / statistics.median(result["seconds"] for result in results)
        cpu = statistics.median(result["cpu"] for result in results)
        print(f"{role}: {rates[role]:.2f} MB/s, {megabytes / cpu:.2f} MB per second of CPU")
    target = TARGETS[options.against]
    print(f"ratio of {ours} to {peer}: {rates[ours] / rates[peer]:.2f} (target: at least {target})")


if __name__ == "__main__":
    main()
