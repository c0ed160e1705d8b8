"""The verbs that take a model out or in, with their arguments; imports are made when one runs."""

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from bert_jax.cli.verbs.options import Parser
from bert_jax.errors import UserError


def add(verb: Callable[..., Parser]) -> None:
    """Add the verbs; `verb` makes a parser of a name, a function, a description and an example."""
    sub = verb(
        "export", export_, "write a model for Transformers, StableHLO, Orbax or ONNX, and prove it",
        "bert-jax export work/base --to huggingface --out out/base --license apache-2.0\n"
        "  bert-jax export work/mrpc --to stablehlo --out out/mrpc",
    )  # fmt: skip
    sub.option(
        "workdir",
        "of a pretraining, translation or fine-tuning run (its best model), or a directory in "
        "Hugging Face's format",
        metavar="WORKDIR",
    )
    sub.option(
        "--to",
        "huggingface: what AutoModelFor... and AutoTokenizer load. sentence-transformers: an "
        "encoder that makes vectors. stablehlo: one program for "
        "CPU, CUDA and TPU; of a model that translates the whole search. orbax: parameters as a "
        "plain checkpoint. onnx: for onnxruntime. peft: the low-rank updates and the head of a "
        "run with lora.rank alone, for PEFT",
        required=True,
        choices=["huggingface", "sentence-transformers", "stablehlo", "orbax", "onnx", "peft"],
    )  # fmt: skip
    sub.option(
        "--out", "directory to write; it appears when everything is written and proven",
        required=True, type=Path, metavar="DIR",
    )  # fmt: skip
    sub.option("--tolerance", "largest difference of a state or logit from the source's", 1e-4)
    sub.option(
        "--license", "for the model card, in the Hub's abbreviation: apache-2.0, cc-by-4.0, other "
        "...", "unknown",
    )  # fmt: skip
    sub.option(
        "--quantize", "onnx: matrices in 8 bits, by ONNX Runtime's own quantizer; the proof says "
        "what that costs", choices=["int8"],
    )  # fmt: skip
    sub.add_argument(
        "--name", default="", help="title of the model card (default: the name of WORKDIR)"
    )
    sub.add_argument(
        "--part",
        choices=["discriminator", "generator"],
        default="",
        help="model of a run of replaced-token detection (default: discriminator)",
    )

    sub = verb(
        "average", average, "write the average of checkpoints of one or several runs as a model",
        "bert-jax average work/tiny --last 5 --out work/mean --evaluate\n"
        "  bert-jax average work/decay-a work/decay-b@19000 --out work/soup",
    )  # fmt: skip
    sub.add_argument(
        "checkpoints",
        nargs="+",
        metavar="CHECKPOINT",
        help="WORKDIR@STEP of a pretraining run, or WORKDIR for its newest that was read back",
    )
    sub.option(
        "--out", "directory to write, for every verb that reads a pretrained model",
        required=True, type=Path, metavar="DIR",
    )  # fmt: skip
    sub.option("--last", "average the newest K checkpoints of each WORKDIR", type=int, metavar="K")
    sub.option(
        "--method",
        "mean, of equal weights; or ema, an exponential moving average in the order that is given",
        "mean", choices=["mean", "ema"],
    )  # fmt: skip
    sub.option(
        "--decay",
        "ema: weight of the average of all checkpoints before, at each one (default: 0.9)",
        type=float, metavar="D",
    )  # fmt: skip
    sub.flag("--evaluate", "print the held-out loss of each checkpoint and of the average")
    sub.option("--corpus", "--evaluate: another corpus (default: that of the newest checkpoint)")
    sub.option("--rows", "--evaluate: at most so many rows; default: all", type=int)

    sub = verb(
        "import", import_,
        "import a BERT, RoBERTa, ELECTRA or DistilBERT of other software, and prove it",
        "bert-jax import bert-base-cased --out work/cased\n"
        "  bert-jax import uncased_L-12_H-768_A-12 --out work/uncased --add-tokens domain.txt",
    )  # fmt: skip
    sub.option(
        "source",
        "a directory in Hugging Face's format, a TensorFlow checkpoint of the original code "
        "(its directory or prefix), or a name on the Hugging Face Hub",
        metavar="SRC",
    )
    sub.option("--out", "directory to write", required=True, type=Path, metavar="DIR")
    sub.option(
        "--add-tokens",
        "grow the vocabulary by the tokens of a file, one a line; each begins as the mean of the "
        "pieces that it had",
        type=Path, metavar="FILE",
    )  # fmt: skip
    sub.option(
        "--gelu",
        "what gelu means in a TensorFlow checkpoint: tanh as in the original code (default), or "
        "erf as in its first release and in Transformers",
        choices=["tanh", "erf"],
    )
    sub.option(
        "--tolerance",
        "largest difference of a state or logit from the source's, where Transformers is installed",
        1e-4,
    )

    sub = verb(
        "grow", grow, "make the initial checkpoint of a larger model from a smaller one",
        "bert-jax grow work/small --out work/grown --config=configs/pretrain/modern_tiny.py \\\n"
        "      --config.model.num_layers=12 --corpus work/corpus\n"
        "  bert-jax grow work/small --out work/grown --config.model.num_layers=12 \\\n"
        "      --config.model.hidden_dim=384 --config.model.num_heads=6\n"
        "  bert-jax pretrain --config=... --config.init=work/grown --workdir=work/large",
    )  # fmt: skip
    sub.set_defaults(takes_fields=True)
    sub.option(
        "source",
        "work directory of a pretraining run (its newest intact checkpoint), or a directory in "
        "Hugging Face's format, such as bert-jax import or export writes",
        metavar="SOURCE",
    )
    sub.option(
        "--out", "directory to write; it appears when everything is written and read back",
        required=True, type=Path, metavar="DIR",
    )  # fmt: skip
    sub.option(
        "--config",
        "a pretraining configuration, whose section model has the sizes; default: that of SOURCE. "
        "Either is changed with --config.model.FIELD=VALUE",
        metavar="FILE",
    )
    sub.flag(
        "--preserve",
        "divide weights by the number of copies of what they read, so that a wider model starts "
        "with nearly the loss of SOURCE; else the values of SOURCE stay, as in ModernBERT's tiling",
    )
    sub.option("--seed", "of the noise that --preserve adds to copies; their sum stays", 0)
    sub.option(
        "--corpus",
        "measure the masked-LM loss of both models on the held-out text of this corpus",
        metavar="DIR",
    )
    sub.option("--rows", "held-out rows at most", 1024)


def export_(arguments: argparse.Namespace) -> int:
    """Export a model."""
    from bert_jax.artefacts.exchange.export import export
    from bert_jax.artefacts.exchange.onnx.int8 import table

    # Orbax's threads log the traceback of a write that failed; `export` raises the error itself.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    parity = export(
        arguments.workdir, arguments.to, arguments.out, tolerance=arguments.tolerance,
        license=arguments.license, name=arguments.name, part=arguments.part,
        quantize=arguments.quantize or "", say=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    print(f"{arguments.workdir} -> {arguments.out} ({parity['format']}, {parity['class']})")
    for path in sorted(arguments.out.iterdir()):
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        more = "" if path.is_file() else f" in {len(files)} files"
        print(f"  {path.name}  {sum(p.stat().st_size for p in files):,} bytes{more}")
    gaps = [f"{name} {gap:.1e}" for name, gap in parity["differences"].items()]
    print(f"  largest differences from the source: {', '.join(gaps) or 'none, bit for bit'}")
    translations = parity.get("translations", {})
    for name, proof in parity.get("proofs", {}).items():
        print(f"  proof by {name}: {'passed' if proof['ran'] else 'did not run, ' + proof['why']}")
        translations = proof.get("translations", translations)
    for name, found in translations.items():
        print(f"  {name} search: {found['equal']} equal translations, {found['ties']} ties")
    if (found := parity.get("quantized")) is not None:
        sizes = found["bytes"]
        print(f"  int8: {sizes['before']:,} bytes became {sizes['after']:,}; against the source:")
        for name, gap, equal, cosine in table(found):
            more = f", {equal} equal predictions" if equal else ""
            more += f", least cosine {cosine}" if cosine else ""
            print(f"    {name}: largest difference {gap}{more}")
    for part in parity["untrained_parts"]:
        print(f"  {part}: has initial values, the model has none of its own")
    for part in parity["left_out"]:
        print(f"  {part}: left out, {parity['class']} has no such head")
    return 0


def average(arguments: argparse.Namespace) -> int:
    """Average checkpoints."""
    from bert_jax.artefacts.saved.average import average
    from bert_jax.cli.inspection.evaluate import compared_lines

    rows, corpus = arguments.rows, arguments.corpus
    if not arguments.evaluate and (rows is not None or corpus is not None):
        raise UserError("--rows and --corpus are for --evaluate, which is not given")
    if rows is not None and rows < 1:
        raise UserError(f"--rows is {rows}; it must be at least 1")
    made = average(
        arguments.checkpoints, arguments.out, method=arguments.method, decay=arguments.decay,
        last=arguments.last, progress=sys.stderr.isatty(),
    )  # fmt: skip
    total = sum(each["weight"] for each in made["sources"])
    print(f"{arguments.out}: {made['method']} of {len(made['sources'])} checkpoints")
    for each in made["sources"]:
        share = each["weight"] / total
        print(f"  {each['workdir']}@{each['step']}  digest {each['digest']}  weight {share:.4f}")
    if arguments.evaluate:
        names = [f"{each['workdir']}@{each['step']}" for each in made["sources"]]
        for line in compared_lines([*names, str(arguments.out)], corpus=corpus, max_rows=rows):
            print(line, flush=True)
    return 0


def import_(arguments: argparse.Namespace) -> int:
    """Import a model."""
    from bert_jax.artefacts.exchange.importing import import_model

    if not arguments.tolerance >= 0:
        raise UserError(f"--tolerance is {arguments.tolerance}; it must not be below 0")
    report = import_model(
        arguments.source,
        arguments.out,
        add_tokens=arguments.add_tokens,
        gelu=arguments.gelu,
        tolerance=arguments.tolerance,
    )
    print(f"{report['source']} ({report['source_class']}) -> {arguments.out} ({report['class']})")
    for note in report["notes"]:
        print(f"  {note}")
    compared = report["compared"]
    if isinstance(compared, dict):
        gaps = [f"{name} {gap:.1e}" for name, gap in compared["differences"].items()]
        print(f"  largest differences from the source: {', '.join(gaps)}")
        counts = [compared.get(f"texts_with_equal_{what}") for what in ("ids", "offsets")]
        print("  texts with equal token ids: {}; with equal offsets: {}".format(*counts))
        if compared.get("pairs_have_equal_ids") is False:
            print("  a pair of texts has other special tokens here than in Transformers")
    else:
        print(f"  {compared}")
    return 0


def grow(arguments: argparse.Namespace) -> int:
    """Grow a model."""
    from bert_jax.config.command_line import load_config, overridden
    from bert_jax.model.config import ModelConfig
    from bert_jax.training.pretrain.config import PretrainConfig
    from bert_jax.training.pretrain.growing import Wanted, grow_model

    for name, least in (("rows", 1), ("seed", 0)):
        if (value := getattr(arguments, name)) < least:
            raise UserError(f"--{name} is {value}; it must be at least {least}")

    def wanted(small: ModelConfig) -> ModelConfig:
        if arguments.config is None:
            return overridden(Wanted(small), arguments.fields).model
        config = load_config(PretrainConfig, arguments.config, arguments.fields)
        return config.with_vocabulary(config.model.vocab_size or small.vocab_size).model

    report = grow_model(
        arguments.source, arguments.out, wanted, preserve=arguments.preserve, seed=arguments.seed,
        corpus=arguments.corpus, max_rows=arguments.rows,
        say=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    print(f"{report['source']} -> {arguments.out} ({report['class']})")
    for name, (before, after) in report["sizes"].items():
        if before != after:
            print(f"  model.{name}  {before:,} -> {after:,}")
    if "loss" in report:
        print(
            f"  held-out masked-LM loss before step 1: {report['loss']:.3f} nats; of the source "
            f"{report['source_loss']:.3f}; unigram entropy {report['unigram_entropy']:.3f}"
        )
    print(
        f"  train it with bert-jax pretrain --config.init={arguments.out}; the optimizer's moments "
        "start fresh"
    )
    return 0
