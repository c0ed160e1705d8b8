"""The model card (README.md) of an export, written from the records of its run."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.artefacts.exchange import exported_files as files
from bert_jax.artefacts.exchange.huggingface import pipeline_of
from bert_jax.artefacts.exchange.onnx.runtime import said_of
from bert_jax.artefacts.exchange.sentence_transformers import said_of_vectors
from bert_jax.artefacts.formats.entries import named
from bert_jax.artefacts.formats.families import MODERN
from bert_jax.artefacts.formats.huggingface_files import LONG_TEXTS, THRESHOLDS, TaskOutputs
from bert_jax.artefacts.saved.ancestors import RECORD
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.data.phases import described
from bert_jax.objectives.config import OBJECTIVES
from bert_jax.terminal import markdown_table, plain

_LIBRARIES = {
    "huggingface": "transformers", "peft": "peft",
    "sentence-transformers": "sentence-transformers", "cross-encoder": "sentence-transformers",
}  # fmt: skip
_OBJECTIVES = {
    "single_label": "one class for a text or a pair of texts",
    "multi_label": "any number of classes for a text or a pair of texts",
    "regression": "a number for a text or a pair of texts",
    "tags": "a tag for each word",
    "span": "the span of a text that answers a question",
    "arcs": "the head of each word and the relation to that head",
    "choice": "a score for each of several continuations of a text; the highest wins",
}
_MAX_LABELS = 40
_UNSAID = "The documentation of bert_jax describes how to load the format `{}`."


def model_card(
    saved: SavedModel, parity: Mapping[str, Any], *, license: str, name: str, loading: str = ""
) -> str:
    """Return the card as Markdown, with the YAML header that the Hugging Face Hub reads.

    `parity` is the content of `parity.json`. `license` is "unknown" if the user gave none.
    `loading` is the loading section that the format's module writes, or "".
    """
    sections = [
        _front_matter(saved, parity, license),
        f"# {name}",
        _what(saved, parity),
        _data(saved),
        _lineage(parity.get(RECORD, ())),
        _training(saved, parity.get("spent")),
        _metrics(saved),
        _contamination(parity),
        f"## Loading\n\n{loading or _UNSAID.format(parity['format'])}",
        _proof(parity),
        _license(license),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(saved: SavedModel, parity: Mapping[str, Any], license: str) -> str:
    fields: dict[str, Any] = {"license": license}
    if parity["format"] in _LIBRARIES:
        fields["library_name"] = _LIBRARIES[parity["format"]]
    if saved.network is not None:
        fields |= {"pipeline_tag": "translation", "tags": ["jax", "bert_jax"]}
    else:
        pipeline = None if parity["class"] == "none" else pipeline_of(saved)
        fields["pipeline_tag"] = pipeline or "feature-extraction"
        if parity["format"] == "cross-encoder":
            fields["pipeline_tag"] = "text-ranking"
        fields["tags"] = ["bert", "jax", "bert_jax"]
        if saved.embedding is not None:
            fields["pipeline_tag"] = "sentence-similarity"
            fields["tags"].append("sentence-transformers")
    # A JSON string is also a YAML string, whatever characters a name has.
    lines = [f"{key}: {json.dumps(value)}" for key, value in fields.items()]
    return "\n".join(["---", *lines, "---"])


def _what(saved: SavedModel, parity: Mapping[str, Any]) -> str:
    text = _encoder(saved, parity) if saved.network is None else _translator(saved, parity)
    if parity["untrained_parts"]:
        text += (
            "\n\nThe class requires these parts, which have untrained initial values: "
            f"{', '.join(parity['untrained_parts'])}. Do not use their outputs."
        )
    if parity["left_out"]:
        text += (
            f"\n\nThe export lacks the parts {', '.join(parity['left_out'])}, because "
            f"`{parity['class']}` does not have them."
        )
    return text


def _encoder(saved: SavedModel, parity: Mapping[str, Any]) -> str:
    model, outputs = saved.config, saved.outputs
    family, made = "encoder", "No class of Transformers computes it; it is"
    if parity["class"] != "none":
        name, made = files.family_of(saved), f"It is `{parity['class']}`"
        family = MODERN[name].name if name in MODERN else "BERT"
    article = "An" if family[0] in "AEe" else "A"
    kind = f"{article} {family} that was read from Hugging Face's format and written again."
    if verb := {"pretrain": "pretrained", "finetune": "fine-tuned"}.get(saved.origin.kind):
        kind = f"{article} {family} {verb} with bert_jax for {saved.origin.step:,} updates."
    count = sum(array.size for array in files.state_dict_of(saved).values())
    text = (
        f"{kind} {made} in the format `{parity['format']}`. It has {model.num_layers} layers "
        f"of width {model.hidden_dim}, {model.num_heads} attention heads and {count:,} parameters. "
        f"It reads at most {saved.max_length} tokens; the vocabulary has {model.vocab_size:,} "
        f"tokens ({saved.tokenizer.kind})."
    )
    if outputs is not None:
        text += f" It predicts {_OBJECTIVES[outputs.objective]}."
        if outputs.labels:
            names = ", ".join(f"`{plain(label)}`" for label in outputs.labels[:_MAX_LABELS])
            more = len(outputs.labels) - _MAX_LABELS
            text += f" Labels: {names}{f' and {more} more' if more > 0 else ''}."
        text += _answers(saved, outputs)
    if saved.embedding is not None:
        text += f" {said_of_vectors(saved)}"
    return text


def _answers(saved: SavedModel, outputs: TaskOutputs) -> str:
    """Describe how logits become answers: temperature, thresholds, windows of long texts."""
    said = ""
    if temperature := saved.origin.metrics.get("temperature"):
        said += (
            f"\n\nThe logits are divided by {temperature:.4g}, a temperature fitted on the dev "
            "data, so that their probabilities are calibrated."
        )
    if outputs.thresholds:
        said += (
            "\n\nEach label has its own threshold, chosen for the highest F1 on the dev data. "
            f"`bert_jax.load` reads the thresholds from `{THRESHOLDS}` in `config.json`. Other "
            "software uses 0.5 for all labels."
        )
    if outputs.long.how != "cut":
        how = {
            "head_tail": "reads the beginning and the end of a longer text",
            "windows": "reads longer texts in windows, and the answer is the "
            f"{outputs.long.pooling.replace('_', ' and ')} of their logits",
        }[outputs.long.how]
        said += (
            f"\n\nAn input row has at most {saved.max_length} tokens. `bert_jax.load` {how} "
            f"(`{LONG_TEXTS}` in `config.json`). The exported model itself computes the logits of "
            "one row, and other software cuts longer texts."
        )
    return said


def _translator(saved: SavedModel, parity: Mapping[str, Any]) -> str:
    model = saved.config
    made = f"trained with bert_jax for {saved.origin.step:,} updates"
    if saved.origin.kind != "pretrain":
        made = "read from Hugging Face's format and written again"
    count = sum(array.size for array in named(saved.params, model.vocab_size).values())
    return (
        f"A model that translates, {made}. It is `{parity['class']}` in the format "
        f"`{parity['format']}`. It has {count:,} parameters; its encoder has {model.num_layers} "
        f"layers of width {model.hidden_dim}. A source and a translation have at most "
        f"{saved.max_length} tokens each. The vocabulary, which both share, has "
        f"{model.vocab_size:,} tokens ({saved.tokenizer.kind})."
    )


def _data(saved: SavedModel) -> str:
    config = saved.origin.config
    if saved.origin.kind == "pretrain":
        corpora = _corpora(config)
        if saved.network is not None:
            return f"## Data\n\nTrained on the translation pairs of {corpora}."
        name = saved.origin.objective or "masked_lm"
        said = f"Pretrained on {corpora}"
        if saved.origin.pairing is not None:
            said += f", {OBJECTIVES[name].learned(saved.origin.pairing)}"
        if name == "replaced_tokens":
            said += f". This is the {'discriminator' if 'rtd' in saved.params else 'generator'}"
        return f"## Data\n\n{said}."
    if saved.origin.kind == "finetune":
        task = config.get("task", {})
        parts = [f"`{plain(task['name'])}`"] if task.get("name") else []
        named_parts = [part for part in ("train", "dev", "data") if task.get(part)]
        parts += [f"{part}: `{files.last_part(task[part])}`" for part in named_parts]
        said = f"Fine-tuned on data of the kind {task.get('kind', '')} ({', '.join(parts)})"
        given = "" if config.get("reinitialise") else config.get("init")
        start = f"`{files.last_part(given)}`" if given else "random weights"
        return f"## Data\n\n{said}, starting from {start}."
    return "## Data\n\nUnknown: the files of the source model do not name its training data."


def _corpora(config: Mapping[str, Any]) -> str:
    """Name the corpora that the phases read, as `PretrainConfig.mixture_of` decides."""
    data, places = config.get("data", {}), []
    for phase in config.get("training", {}).get("phases") or [{}]:
        mixed = phase.get("mixture") or data.get("mixture") or [data]
        places += [part.get("corpus") for part in ([phase] if phase.get("corpus") else mixed)]
    names = [f"`{files.last_part(place)}`" for place in dict.fromkeys(places)]
    return f"the {'corpora' if len(names) > 1 else 'corpus'} {', '.join(names)}"


def _training(saved: SavedModel, spent: Mapping[str, Any] | None) -> str:
    config = saved.origin.config
    if saved.origin.kind not in ("pretrain", "finetune"):
        return ""
    training, optimizer = config.get("training", {}), config.get("optimizer", {})
    tried = config.get("sweep", {}).get("learning_rates", [])
    rows = [("updates", f"{saved.origin.step:,}")]
    for phase in training.get("phases", []):
        said = f"{phase['batch_size']} rows of {phase['length']} tokens"
        own = described(phase)
        part = f"share {phase['share']:g} of the updates"
        if steps := phase.get("steps"):
            part = f"{steps:,} updates"
        rows.append((part, f"{said}; {own}" if own else said))
    for key in ("num_epochs", "batch_size"):
        if key in training:
            rows.append((key.replace("_", " "), f"{training[key]:g}"))
    for key in ("name", "learning_rate", "schedule", "weight_decay"):
        if key in optimizer and not (tried and key == "learning_rate"):
            said = "optimizer" if key == "name" else key.replace("_", " ")
            rows.append((said, f"{optimizer[key]}"))
    if tried:
        rows.append(("learning rates tried", ", ".join(f"{rate:g}" for rate in tried)))
    if saved.network is not None:
        smoothing = config.get("objective", {}).get("label_smoothing", 0)
        rows.append(("label smoothing", f"{smoothing:g}"))
    elif "rate" in (masking := config.get("masking", {})):
        rows.append(("masked tokens", f"{masking['rate']:g}"))
    if spent:
        rows.append(("time, measured", f"{spent['hours']:.3g} hours on {plain(spent['devices'])}"))
        rows.append(("operations, computed from the batches", f"{spent['flops']:.3g} FLOPs"))
    return "## Training\n\n" + markdown_table([("", ""), *rows])


def _lineage(entries: Sequence[Mapping[str, Any]], depth: int = 0) -> str:
    """List ancestors (see `saved.ancestors`), each below the model that was made from it."""
    lines = []
    for each in entries:
        step = f"step {each['step']:,}" if "step" in each else ""
        facts = (each["kind"], step, each.get("note"), each.get("digest", "")[:12])
        said = plain(", ".join(filter(None, facts)))
        lines.append(f"{'  ' * depth}- {plain(each['role'])}: `{plain(each['name'])}` ({said})")
        lines += [below] if (below := _lineage(each.get("parents", ()), depth + 1)) else []
    return ("" if depth or not lines else "## Lineage\n\n") + "\n".join(lines)


def _metrics(saved: SavedModel) -> str:
    origin = saved.origin
    if not origin.metrics:
        ours = origin.kind in ("pretrain", "finetune")
        return "## Metrics\n\nNo metrics are known for these weights." if ours else ""
    split = "held-out text" if origin.kind == "pretrain" else "dev"
    known = {split: {"scores": origin.metrics, "intervals": {}, "chose": split == "dev"}}
    reports = [*(origin.reports or known).items()][::-1]  # test data, if any, come last
    return "\n\n".join(["## Metrics", *(_scores(*each) for each in reports)])


def _scores(split: str, report: Mapping[str, Any]) -> str:
    """Return a table of the scores on a split, with their intervals where the run has them."""
    ends = {key: "{:.4g} to {:.4g}".format(*each) for key, each in report["intervals"].items()}
    rows = [("metric", "value", "95% interval")]
    for key, value in report["scores"].items():
        if value is not None:
            shown = f"{value:.4g}" if value % 1 else f"{value:,.0f}"
            rows.append((plain(key), shown, ends.get(key, "")))
    count = f"{report['examples']:,} examples, " if "examples" in report else ""
    chose = (
        "the set that chose the epoch" if report.get("chose", True) else "not used for selection"
    )
    return f"On {split}, {count}{chose}.\n\n{markdown_table(rows)}"


def _contamination(parity: Mapping[str, Any]) -> str:
    """Report evaluation texts that the model's corpora contain, if the corpora were searched."""
    reports = parity.get("contamination", [])
    if not reports:
        return ""
    rows = [("evaluation", "examples")]
    for each in reports:
        seen = f"{each['seen']:,} of {each['examples']:,} seen, {each['whole']:,} in full"
        name = f"{plain(each['evaluation'])} in {plain(each['corpus'])}"
        rows.append((name, f"{seen}, {each['short']:,} too short to be judged"))
    return (
        "## Contamination\n\nEvaluation texts in the pretraining corpus, by "
        f"{reports[0]['ngram']}-grams of normalised words: an example counts as seen if the corpus "
        "has one of its n-grams.\n\n" + markdown_table(rows)
    )


def _proof(parity: Mapping[str, Any]) -> str:
    rows = [(key, f"{gap:.1e}") for key, gap in parity["differences"].items()]
    ran = parity.get("proofs", {})
    said = [
        f"{key} {'ran' if found['ran'] else 'did not run: ' + found['why']}"
        for key, found in ran.items()
    ]
    by = f". The proof by {'; by '.join(said)}." if said else "."
    table = markdown_table([("output", "difference"), *rows]) if rows else "none: all are equal."
    quantized = said_of(parity["quantized"]) if "quantized" in parity else ""
    checks = "conformance/check.py" in parity.get("sha256", ())
    check = "; `python DIR/conformance/check.py` compares them without bert_jax" if checks else ""
    return (
        "## Parity\n\nThis export was read back and compared with its source on "
        f"{parity['texts']} texts in many scripts ({parity['tokens']:,} tokens). Two float32 "
        f"numbers may differ by up to {parity['tolerance']:.0e}. The "
        f"largest absolute differences are:\n\n{table}\n\n"
        f"{_translations(parity)}{quantized}`parity.json` has the versions and digests{by}"
        f"\n\n`conformance/` has texts and the expected outputs{check}."
    )


def _translations(parity: Mapping[str, Any]) -> str:
    theirs = parity.get("proofs", {}).get("transformers", {})
    return "".join(
        f"Translations by {name} search: {each['equal']} equal, {each['ties']} different but "
        "equally probable.\n\n"
        for name, each in parity.get("translations", theirs.get("translations", {})).items()
    )


def _license(license: str) -> str:
    if license == "unknown":
        return (
            "## Licence\n\nUnknown: no licence was stated when this model was exported. Ask its "
            "authors, and mind the licence of its training data."
        )
    return f"## Licence\n\n`{license}`, as stated when the model was exported."
