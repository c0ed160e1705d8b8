"""Verbs that export, import, average and grow models. Verbs import their modules when they run."""

import logging
import sys
from typing import Annotated, ClassVar, Literal

from bert_jax.cli.verbs import groups
from bert_jax.cli.verbs.options import File, Given, ModelPlace, Text


class Export(groups.OfModel, groups.IntoDirectory, groups.License, groups.Tolerance):
    """Export a model to another format, and compare the outputs.

    A fine-tuning run's best model is exported.

    $ bert-jax export work/base --to huggingface --out out/base --license apache-2.0
    $ bert-jax export work/mrpc --to stablehlo --out out/mrpc
    """

    to: Literal[
        "huggingface", "sentence-transformers", "cross-encoder", "stablehlo", "orbax", "onnx",
        "peft",
    ]  # fmt: skip
    """Format. huggingface: for AutoModelFor... and AutoTokenizer. sentence-transformers: for an
    encoder that makes vectors. cross-encoder: for CrossEncoder, which scores pairs. stablehlo: one
    program for CPU, CUDA and TPU; a translator's program includes the beam search. orbax:
    parameters as a plain checkpoint. onnx: for ONNX Runtime. peft: only the low-rank updates and
    the head of a run with lora.rank, in PEFT's format."""
    quantize: Literal["int8"] | None = None
    """Quantization of matrices to 8 bits (only --to onnx). The loss of precision is measured."""
    name: Text = ""
    """Title of the model card (default: the name of MODEL)."""
    part: Literal["discriminator", "generator"] | None = None
    """Model to export from a run of replaced-token detection (default: discriminator)."""

    def __call__(self) -> int:
        from bert_jax.artefacts.exchange.export import export
        from bert_jax.artefacts.exchange.onnx.runtime import table

        # Orbax's threads log the traceback of a failed write; `export` raises the error itself.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        parity = export(
            self.model, self.to, self.out, tolerance=self.tolerance,
            license=self.license or "unknown", name=self.name, part=self.part or "",
            quantize=self.quantize or "", say=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip
        print(f"{self.model} -> {self.out} ({parity['format']}, {parity['class']})")
        for path in sorted(self.out.iterdir()):
            files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
            more = "" if path.is_file() else f" in {len(files)} files"
            print(f"  {path.name}  {sum(p.stat().st_size for p in files):,} bytes{more}")
        gaps = [f"{name} {gap:.1e}" for name, gap in parity["differences"].items()]
        print(f"  largest differences from the source: {', '.join(gaps) or 'none, bit for bit'}")
        translations = parity.get("translations", {})
        for name, proof in parity.get("proofs", {}).items():
            how = "passed" if proof["ran"] else f"did not run, {proof['why']}"
            print(f"  proof by {name}: {how}")
            translations = proof.get("translations", translations)
        for name, found in translations.items():
            print(f"  {name} search: {found['equal']} equal translations, {found['ties']} ties")
        if (found := parity.get("quantized")) is not None:
            sizes = "{before:,} bytes became {after:,}".format_map(found["bytes"])
            print(f"  int8: {sizes}; against the source:")
            for name, gap, equal, cosine in table(found):
                more = f", {equal} equal predictions" if equal else ""
                more += f", least cosine {cosine}" if cosine else ""
                print(f"    {name}: largest difference {gap}{more}")
        for part in parity["untrained_parts"]:
            print(f"  {part}: has initial values, since the model lacks this part")
        for part in parity["left_out"]:
            print(f"  {part}: left out, since {parity['class']} has no such head")
        return 0


class Average(groups.IntoDirectory, groups.StoreRows):
    """Average checkpoints of one or several runs into a model.

    Every verb that reads a pretrained model can read the average.

    $ bert-jax average work/tiny --last 5 --out work/mean --evaluate
    $ bert-jax average work/decay-a work/decay-b@19000 --out work/soup
    """

    checkpoints: Given[tuple[Annotated[str, "WORKDIR[@STEP]"], ...]]
    """Checkpoints of pretraining runs (without @STEP: the newest that was read back intact)."""
    last: Annotated[int | None, "K"] = None
    """Number of newest checkpoints of each WORKDIR to average (default: 1)."""
    method: Literal["mean", "ema"] = "mean"
    """Kind of average. mean: equal weights. ema: exponential moving average in the given order."""
    decay: Annotated[float | None, "D"] = None
    """Weight of the average so far when ema adds the next checkpoint (default: 0.9)."""
    evaluate: bool = False
    """Print the held-out loss of each checkpoint and of the average."""

    def __call__(self) -> int:
        from bert_jax.artefacts.saved.average import average
        from bert_jax.cli.inspection.evaluate import compared_lines

        self.only_with("--evaluate", self.evaluate, "--rows", "--corpus")
        rows, corpus = self.rows, self.corpus
        made = average(
            self.checkpoints, self.out, method=self.method, decay=self.decay,
            last=self.last, progress=True,
        )  # fmt: skip
        total = sum(each["weight"] for each in made["sources"])
        print(f"{self.out}: {made['method']} of {len(made['sources'])} checkpoints")
        names = [f"{each['workdir']}@{each['step']}" for each in made["sources"]]
        for name, each in zip(names, made["sources"], strict=True):
            print(f"  {name}  digest {each['digest']}  weight {each['weight'] / total:.4f}")
        if self.evaluate:
            for line in compared_lines([*names, str(self.out)], corpus=corpus, max_rows=rows):
                print(line, flush=True)
        return 0


class Import(groups.IntoDirectory, groups.Tolerance):
    """Import a published model, and check it.

    The families are BERT, RoBERTa, ELECTRA, DistilBERT, ModernBERT, DeBERTa, Marian and others. If
    Transformers is installed, the outputs and token ids of both implementations are compared.

    $ bert-jax import bert-base-cased --out work/cased
    $ bert-jax import uncased_L-12_H-768_A-12 --out work/uncased --add-tokens domain.txt
    """

    model: Given[ModelPlace]
    """Directory in Hugging Face's format (model.safetensors, or flax_model.msgpack), TensorFlow
    checkpoint of the original code (its directory or prefix), or name on the Hugging Face Hub."""
    add_tokens: File | None = None
    """File of tokens to add to the vocabulary, one per line. A new token's embedding starts as
    the mean embedding of the tokens into which the old vocabulary splits the new token."""
    gelu: Literal["tanh", "erf"] | None = None
    """Formula of gelu for a TensorFlow checkpoint: tanh, the approximation in the original code
    (default), or erf, the exact form, which the first release of that code and Transformers use."""

    def __call__(self) -> int:
        from bert_jax.artefacts.exchange.importing import import_model

        report = import_model(
            self.model, self.out, add_tokens=self.add_tokens, gelu=self.gelu,
            tolerance=self.tolerance,
        )  # fmt: skip
        print(f"{report['source']} ({report['source_class']}) -> {self.out} ({report['class']})")
        for note in report["notes"]:
            print(f"  {note}")
        compared = report["compared"]
        if isinstance(compared, dict):
            gaps = [f"{name} {gap:.1e}" for name, gap in compared["differences"].items()]
            print(f"  largest differences from the source: {', '.join(gaps)}")
            counts = [compared.get(f"texts_with_equal_{what}") for what in ("ids", "offsets")]
            print("  texts with equal token ids: {}; with equal offsets: {}".format(*counts))
            if compared.get("pairs_have_equal_ids") is False:
                print("  pairs of texts have other special tokens here than in Transformers")
        else:
            print(f"  {compared}")
        return 0


class Grow(groups.OfModel, groups.IntoDirectory, groups.StoreRows, groups.Seed):
    r"""Make the initial weights of a larger model from a smaller model.

    MODEL is a pretraining run (its newest intact checkpoint) or an output of `import` or `export`.
    With --corpus, the masked-LM loss of both models is measured on the held-out text of a corpus.
    --config.model.FIELD=VALUE sets a size of the larger model.

    $ bert-jax grow work/small --out work/grown --config=modern_tiny \
        --config.model.num_layers=12 --corpus work/corpus
    $ bert-jax grow work/small --out work/grown --config.model.num_layers=12 \
        --config.model.hidden_dim=384 --config.model.num_heads=6
    $ bert-jax pretrain --config=... --config.init=work/grown --workdir=work/large
    """

    config: Annotated[str | None, "FILE"] = None
    """Pretraining configuration; its section model has the new sizes (default: MODEL's sizes)."""
    preserve: bool = False
    """Divide weights by the number of copies of their inputs, so that a wider model starts with
    nearly the loss of MODEL. Otherwise, weights are copied unchanged, as in ModernBERT's tiling."""

    CONFIGURED: ClassVar[bool] = True

    def __call__(self) -> int:
        from bert_jax.config.command_line import load_config, overridden
        from bert_jax.model.config import ModelConfig
        from bert_jax.training.pretrain.config import PretrainConfig
        from bert_jax.training.pretrain.growing import Wanted, grow_model

        def wanted(small: ModelConfig) -> ModelConfig:
            if self.config is None:
                return overridden(Wanted(small), self.overrides).model
            config = load_config(PretrainConfig, self.config, self.overrides)
            return config.with_vocabulary(config.model.vocab_size or small.vocab_size).model

        self.only_with("--corpus", self.corpus, "--rows")
        self.only_with("--preserve", self.preserve, "--seed")
        report = grow_model(
            self.model, self.out, wanted, preserve=self.preserve, seed=self.seed,
            corpus=self.corpus, max_rows=self.rows or 1024,
            say=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip
        print(f"{report['source']} -> {self.out} ({report['class']})")
        for name, (before, after) in report["sizes"].items():
            if before != after:
                print(f"  model.{name}  {before:,} -> {after:,}")
        if "loss" in report:
            print(
                f"  held-out masked-LM loss before step 1: {report['loss']:.3f} nats (source: "
                f"{report['source_loss']:.3f}); unigram entropy "
                f"{report['unigram_entropy']:.3f}"
            )
        print(
            f"  train it with bert-jax pretrain --config.init={self.out}; the optimizer's moments "
            "start fresh"
        )
        return 0
