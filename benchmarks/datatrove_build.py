"""Datatrove's part of `corpus_build.py`: documents of JSON lines to tokens.

    python benchmarks/datatrove_build.py DIRECTORY CORES [--dedup]

Reads DIRECTORY/parts/*.jsonl, one task to a file, and writes below DIRECTORY/datatrove. Runs in an
environment with datatrove.
"""

import argparse
import json
import logging
import os
import shutil
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("cores", type=int)
    parser.add_argument("--dedup", action="store_true")
    options = parser.parse_args()
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from loguru import logger

    logger.remove()
    logging.disable()
    out = options.directory / "datatrove"
    shutil.rmtree(out, ignore_errors=True)
    tasks = len(list((options.directory / "parts").glob("*.jsonl")))

    def run(name: str, pipeline: list, tasks: int) -> None:
        LocalPipelineExecutor(
            pipeline=pipeline, tasks=tasks, workers=options.cores, logging_dir=str(out / name)
        ).run()

    reader = JsonlReader(str(options.directory / "parts"))
    tokenizer = DocumentTokenizer(
        str(out / "tokens"),
        tokenizer_name_or_path=str(options.directory / "tokenizer" / "tokenizer.json"),
        shuffle_documents=False,
        save_filename="tokens",
    )
    before, begin = os.times(), time.perf_counter()
    keep: list = []
    if options.dedup:
        from datatrove.pipeline.dedup import (
            MinhashDedupBuckets,
            MinhashDedupCluster,
            MinhashDedupFilter,
            MinhashDedupSignature,
        )
        from datatrove.pipeline.dedup.minhash import MinhashConfig

        config = MinhashConfig(n_grams=5)  # their buckets and hashes: 14 x 8
        folders = {name: str(out / name) for name in ("signatures", "buckets", "remove")}
        run("1", [reader, MinhashDedupSignature(folders["signatures"], config=config)], tasks)
        run(
            "2",
            [MinhashDedupBuckets(folders["signatures"], folders["buckets"], config=config)],
            config.num_buckets,
        )
        run("3", [MinhashDedupCluster(folders["buckets"], folders["remove"], config=config)], 1)
        keep = [MinhashDedupFilter(folders["remove"])]
    run("4", [reader, *keep, tokenizer], tasks)
    cpu = sum(os.times()[:4]) - sum(before[:4])
    print(json.dumps({"seconds": time.perf_counter() - begin, "cpu": cpu, "tokens": 0}))


if __name__ == "__main__":
    main()
