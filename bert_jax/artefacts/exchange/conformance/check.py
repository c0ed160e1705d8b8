"""Compare what other software computes for this model with the outputs that bert_jax expects.

    python conformance/check.py [MODEL_DIR]

runs a directory with the software for which it was exported, without bert_jax. The texts, token ids
and tolerances are in cases.json, and the expected outputs in expected.npz. Each printed line names
a batch, the number of a text and an output. The exit code is 0 if everything agrees, else 1.
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
INPUTS = ("input_ids", "token_type_ids", "attention_mask")


def compare(answers):
    """Print the differences between `answers` and the expected outputs; return true if all agree.

    To compare a server, send the texts (with the prompt) of each batch in cases.json to it, and:

        from check import compare
        answers = {"mixed": {"logits": [...]}, "long": {"logits": [...]}}  # an array for each text
        raise SystemExit(not compare(answers))

    A text's array is (C,) or, if the output is `per_token`, (tokens, C); padding may follow.
    """
    cases, agree = json.loads((HERE / "cases.json").read_text("utf-8")), True
    for key, values in np.load(HERE / "expected.npz").items():
        name, number, output = key.split("/")
        about, batch = cases["outputs"][output], cases["batches"][name]
        mask = batch.get("decoder_attention_mask", batch["attention_mask"])[int(number)]
        found = checked(answers[name][output][int(number)], sum(mask) * about["per_token"])
        gap = np.abs(found - values).max() if found.shape == values.shape else np.inf
        good = bool(gap <= about["tolerance"])  # false if a number is not finite
        said = f"{key}: largest difference {gap:.1e}, tolerance {about['tolerance']:.1e}"
        print(said if good else f"{said}: WRONG")
        agree &= good
    return agree


def checked(row, length):
    """Return the compared numbers of a text's output as an array (P, N), float32.

    P is the number of tokens, at most 8; N counts at most 64 values and the maximum of all values.
    The output `row` has the shape (L,), (L, C) or (L, L, C), or (C,) if the `length` is 0.
    """
    row = np.asarray(row, np.float32)
    places = np.unique(np.linspace(0, length - 1, 8).astype(int))
    if not length:
        row, places = row[None], np.zeros(1, int)
    row = row[places[places < len(row)]]
    row = (row[:, places] if row.ndim == 3 else row).reshape(len(row), -1)
    columns = np.unique(np.linspace(0, row.shape[1] - 1, 64).astype(int))
    return np.concatenate([row[:, columns], row.max(1, keepdims=True)], 1)


def compare_tokens(tokenize, cases):
    """Print texts whose token ids or types are not as expected; return true if all texts agree."""
    names, wrong = INPUTS[: 1 + ("token_type_ids" in cases["inputs"])], []
    for key, batch in cases["batches"].items():
        for number, (first, *second) in enumerate(batch["texts"]):
            found = tokenize(batch["prompt"] + first, *second)
            length = sum(batch["attention_mask"][number])
            if any(list(found[name]) != batch[name][number][:length] for name in names):
                wrong.append(f"{key}/{number}")
    print(f"token ids: {f'WRONG for {wrong}' if wrong else 'equal for all texts'}")
    return not wrong


def by_huggingface(directory, cases):
    """Return the tokenizer, and a function that runs a batch in the class of transformers."""
    import torch
    import transformers

    model = getattr(transformers, cases["class"]).from_pretrained(directory).eval()

    def run(batch):
        inputs = {name: torch.tensor(batch[name]) for name in cases["inputs"]}
        if cases["class"].endswith("ForMultipleChoice"):  # each text is the only choice
            inputs = {name: ids[:, None] for name, ids in inputs.items()}
        with torch.no_grad():
            found = model(**inputs)
        return {name: found[name].numpy() for name in cases["outputs"]}

    return transformers.AutoTokenizer.from_pretrained(directory), run


def by_sentence_transformers(directory, cases):
    """Return the tokenizer, and a function that encodes a batch with the model's own prompts."""
    import sentence_transformers

    settings = (directory / "config_sentence_transformers.json").read_text("utf-8")
    name = json.loads(settings).get("model_type", "SentenceTransformer")
    model = getattr(sentence_transformers, name)(str(directory), device="cpu")
    model.max_seq_length = cases["max_length"]

    def run(batch):
        texts, prompt = [text for (text,) in batch["texts"]], batch["prompt"] and batch["name"]
        task = {"task": batch["task"]} if "task" in batch else {}
        found = model.encode(texts, prompt_name=prompt or None, **task)
        if name == "SparseEncoder":
            found = np.stack([each.to_dense() for each in found])
        return {"sentence_embedding": found}

    return model.tokenizer, run


def by_cross_encoder(directory, cases):
    """Return the tokenizer, and a function that scores a batch with the model's own activation."""
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(directory), device="cpu", max_length=cases["max_length"])
    return model.tokenizer, lambda batch: {"scores": np.c_[model.predict(batch["texts"])]}


def by_onnx(directory, cases):
    """Return the tokenizer, and a function that runs a batch in onnxruntime on the CPU."""
    import onnxruntime

    path, providers = str(directory / "model.onnx"), ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(path, providers=providers)

    def run(batch):
        feeds = {each.name: np.int64(batch[each.name]) for each in session.get_inputs()}
        return dict(zip(cases["outputs"], session.run([*cases["outputs"]], feeds), strict=True))

    return tokenizer_of(directory), run


def by_stablehlo(directory, cases):
    """Return the tokenizer, and a function that runs a batch of model.stablehlo with jax."""
    import jax.export
    import safetensors.numpy

    program = jax.export.deserialize(bytearray((directory / "model.stablehlo").read_bytes()))
    weights = safetensors.numpy.load_file(directory / "model.safetensors")

    def run(batch):
        return jax.jit(program.call)(weights, *(np.int32(batch[name]) for name in INPUTS))

    return tokenizer_of(directory), run


def tokenizer_of(directory):
    """Load tokenizer.json as a function of one or two texts, with the arguments of transformers."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))

    def tokenize(*texts, max_length, truncation):
        tokenizer.enable_truncation(max_length)
        row = tokenizer.encode(*texts)
        return {"input_ids": row.ids, "token_type_ids": row.type_ids}

    return tokenize


def main(directory=HERE.parent):
    """Compare the outputs of a directory with the expected outputs; return the exit code."""
    cases = json.loads((HERE / "cases.json").read_text("utf-8"))
    tokenizer, run = globals()[f"by_{cases['format'].replace('-', '_')}"](Path(directory), cases)
    tokenize = partial(tokenizer, truncation=True, max_length=cases["max_length"])
    answers = {name: run(batch) for name, batch in cases["batches"].items()}
    return int(not all([compare_tokens(tokenize, cases), compare(answers)]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
