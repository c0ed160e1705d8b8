"""Texts a second of `bert_jax.load(DIR).classify` against Transformers, with the same weights.

    python benchmarks/inference.py --glue DIR/glue
    python benchmarks/inference.py --glue DIR/glue --texts 256 --repeats 5 --check
    python benchmarks/inference.py --device gpu --texts 4096 --batch-sizes 32,128,256

A model of BERT-base's shape with random weights is written in Hugging Face's format and read by
both sides; the tokenizer is trained on the texts, which are a mixture of SST-2, MRPC and RTE in
file order, pairs as pairs. The peers are Transformers' text-classification pipeline in PyTorch, at
the best of several batch sizes, and plain PyTorch on batches sorted by length, which no pipeline
offers. The sides take turns in one process; a pass includes tokenization and making labels of
logits. On a GPU all compute in bfloat16. Without torch and transformers ours runs alone.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

BAR = 1.0
"""Least ratio to the pipeline that `--check` accepts."""

Text = tuple[str, str | None]


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--glue", type=Path, help="directory with SST-2, MRPC, RTE")
    parser.add_argument("--model", default="base", help="tiny, mini, small, base (default: base)")
    parser.add_argument("--texts", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch-sizes", default="1,8,16,32", help="of the peers")
    parser.add_argument("--ours-only", action="store_true", help="without torch and transformers")
    parser.add_argument("--check", action="store_true", help=f"fail below {BAR} times the pipeline")
    parser.add_argument("--json", action="store_true", help="one JSON object a side")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:  # both sides share the card's memory
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing and not options.ours_only:
        print(f"missing: {', '.join(missing)}; ours alone", file=sys.stderr)
        options.ours_only = True
    texts = read_texts(options.glue, options.texts)
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), options.model, texts)
        sides = {"bert_jax": ours(directory, texts)}
        if not options.ours_only:
            sizes = [int(size) for size in options.batch_sizes.split(",")]
            cuda = options.device == "gpu"
            sides |= peers(directory, texts, sizes, options.threads, cuda)
        labels = {}
        for name, run in sides.items():  # compiles, and fills caches
            labels[name] = run()
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.repeats):
            for name, run in sides.items():
                begun = time.perf_counter()
                run()
                rates[name].append(len(texts) / (time.perf_counter() - begun))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    if options.json:
        for name, median in medians.items():
            case = f"classify, {options.model}, {len(texts)} texts"
            print(json.dumps({"case": case, "side": name, "texts_per_second": median}))
        return 0
    print(
        f"{options.model}, {len(texts)} texts, {options.threads} threads, {options.repeats} repeats"
    )
    print(f"{'':28}{'texts/s':>9}{'min':>8}{'max':>8}{'same labels':>13}")
    for name, median in medians.items():
        same = sum(a == b for a, b in zip(labels["bert_jax"], labels[name], strict=True))
        print(
            f"{name:28}{median:9.2f}{min(rates[name]):8.2f}{max(rates[name]):8.2f}"
            f"{same:>9}/{len(texts)}"
        )
    if options.ours_only:
        return 0
    ratio = 0.0
    for kind in ("pipeline", "sorted"):
        best = max((name for name in medians if name.startswith(kind)), key=medians.__getitem__)
        found = statistics.median(
            a / b for a, b in zip(rates["bert_jax"], rates[best], strict=True)
        )
        print(f"bert_jax / {best}: {found:.3f}")
        ratio = ratio or found
    if options.check and ratio < BAR:
        print(f"below {BAR}", file=sys.stderr)
        return 1
    return 0


def read_texts(glue: Path | None, number: int) -> list[Text]:
    """Texts and pairs of three tasks in turn; without files, made-up ones of like lengths."""
    if glue is None:
        return [(f"a film number {n} " * (1 + n % 17), None) for n in range(number)]
    from bert_jax.tasks.text.sources import read_glue

    columns = [read_glue(glue, name, "dev").examples for name in ("sst2", "mrpc", "rte")]
    mixed = [example for examples in zip(*columns, strict=False) for example in examples]
    return [(example.text, example.text_pair) for example in mixed[:number]]


def write_model(directory: Path, size: str, texts: list[Text]) -> None:
    """A classifier with random weights, and a vocabulary of the texts, in Hugging Face's format."""
    import dataclasses

    import jax
    import numpy as np

    from bert_jax.artefacts.exchange.exported_files import write_huggingface
    from bert_jax.artefacts.formats.huggingface_files import TaskOutputs
    from bert_jax.artefacts.saved.model import Origin, SavedModel
    from bert_jax.model.config import SIZES
    from bert_jax.model.task_heads import TaskHeadConfig, init_task_params
    from bert_jax.tokenization.training import train_wordpiece

    tokenizer = train_wordpiece((part for pair in texts for part in pair if part), 8192)
    config = dataclasses.replace(
        SIZES[size], init_std=0.04, vocab_size=tokenizer.vocab_size, dtype="float32"
    )
    head = TaskHeadConfig("classification", 2)
    saved = SavedModel(
        config=config,
        params=jax.tree.map(np.asarray, init_task_params(config, head, jax.random.key(0))),
        outputs=TaskOutputs(head, "single_label", ("no", "yes")),
        tokenizer=tokenizer,
        tokenizer_files=directory,
        max_length=config.num_positions,
        name="random",
        origin=Origin("huggingface"),
    )
    write_huggingface(saved, directory)


def ours(directory: str, texts: list[Text]) -> Callable[[], list[str]]:
    """A pass over all texts, to labels."""
    import bert_jax

    model = bert_jax.load(directory)
    firsts, seconds = zip(*texts, strict=True)
    return lambda: [answer["label"] for answer in model.classify(firsts, seconds)]


def peers(
    directory: str, texts: list[Text], sizes: list[int], threads: int, cuda: bool
) -> dict[str, Callable[[], list[str]]]:
    """Transformers' pipeline, and PyTorch on sorted batches; bfloat16 on a GPU."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = transformers.BertForSequenceClassification.from_pretrained(directory).eval()
    if cuda:
        model = model.to("cuda", torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    pipeline = transformers.pipeline(
        "text-classification", model=model, tokenizer=tokenizer, device=model.device
    )
    inputs = [
        first if second is None else {"text": first, "text_pair": second} for first, second in texts
    ]

    def piped(size: int) -> list[str]:
        found = pipeline(inputs, batch_size=size, truncation=True)
        return [each["label"] for each in found]

    @torch.inference_mode()
    def sorted_batches(size: int) -> list[str]:
        rows = [
            tokenizer(first, second, truncation=True, max_length=512) for first, second in texts
        ]
        order = sorted(range(len(rows)), key=lambda n: len(rows[n]["input_ids"]))
        labels = [""] * len(rows)
        for start in range(0, len(order), size):
            part = order[start : start + size]
            batch = tokenizer.pad([rows[n] for n in part], return_tensors="pt").to(model.device)
            for n, label in zip(part, model(**batch).logits.argmax(-1).tolist(), strict=True):
                labels[n] = model.config.id2label[label]
        return labels

    sides: dict[str, Callable[[], list[str]]] = {}
    for size in sizes:
        sides[f"pipeline, batch {size}"] = lambda size=size: piped(size)  # type: ignore[misc]
        sides[f"sorted torch, batch {size}"] = lambda size=size: sorted_batches(size)  # type: ignore[misc]
    return sides


if __name__ == "__main__":
    raise SystemExit(main())
