"""Write tests/golden/finetuning/tiny.npz: 20 fine-tuning steps of Transformers' BERT classes.

    python tests/golden/make_finetuning_golden.py        (needs the `parity` extra)

Runs are named by our objectives. The file has three, the live test all of `CLASSES`: without
dropout, with torch's AdamW, weight decay except of biases and norms, clipping at 1.0, linear
warm-up and decay. Entries, under Hugging Face's names: `weights/<name>` of the encoder that all
begin with, and of each run `<run>/weights/<name>` (the head), `<run>/batches/<array>` (5, B, ...),
`<run>/order` (20,), numbers of batches, `<run>/losses` and `<run>/grad_norms` (20,), the latter
before clipping.

Rows are padded, but those of `span` are not: Transformers lets padding be an answer, we do not.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

SHAPE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
}
CLASSES = {
    "class": ("BertForSequenceClassification", 3, "single_label_classification"),
    "classes": ("BertForSequenceClassification", 4, "multi_label_classification"),
    "score": ("BertForSequenceClassification", 1, "regression"),
    "tags": ("BertForTokenClassification", 5, None),
    "span": ("BertForQuestionAnswering", 2, None),
}
"""By run: their class, the number of labels, and which loss it takes."""
GOLDEN = ("class", "tags", "span")
NUM_STEPS, NUM_BATCHES, ROWS, LENGTH = 20, 5, 8, 24
OPTIMIZER = {
    "learning_rate": 5e-3,
    "warmup_steps": 4,
    "weight_decay": 0.1,
    "b1": 0.9,
    "b2": 0.999,
    "eps": 1e-6,
    "clip_norm": 1.0,
}


def make_model(run: str, seed: int):
    """A random model without dropout; models of one seed have the same encoder."""
    name, num_labels, problem = CLASSES[run]
    config = transformers.BertConfig(
        **SHAPE,
        num_labels=num_labels,
        problem_type=problem,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = getattr(transformers, name)(config)
    generator = torch.Generator().manual_seed(seed)
    # Norms near 1, biases and kernels larger than BERT's 0.02, so that attention is not uniform.
    # A parameter at a time in order of its name, the pooler last, since not all models have one.
    names = sorted(
        dict(model.named_parameters()), key=lambda n: ("bert." not in n, "pooler" in n, n)
    )
    with torch.no_grad():
        for parameter in map(model.get_parameter, names):
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_(noise + 1 if is_norm else noise)
    return model.train()


def make_batches(run: str, seed: int) -> dict[str, np.ndarray]:
    """Five batches of rows in two parts whose labels depend on the tokens."""
    rng = np.random.default_rng(seed)
    shape = (NUM_BATCHES, ROWS)
    lengths = np.full(shape, LENGTH) if run == "span" else rng.integers(6, LENGTH + 1, shape)
    columns = np.arange(LENGTH)
    segment_ids = (columns < lengths[..., None]).astype(np.int32)
    tokens = rng.integers(5, SHAPE["vocab_size"], (*shape, LENGTH)).astype(np.int32) * segment_ids
    first = tokens[..., 1]
    if run == "class":
        labels = first % 3
    elif run == "classes":
        labels = (first[..., None] >> np.arange(4) & 1).astype(np.float32)
    elif run == "score":
        labels = ((first - 52) / 27).astype(np.float32)
    elif run == "tags":
        labelled = (segment_ids > 0) & (columns > 0) & (rng.random(tokens.shape) < 0.6)
        labels = np.where(labelled, tokens % 5, -1)
    else:
        start = first % (LENGTH - 4) + 1
        labels = np.stack([start, start + tokens[..., 2] % 3], -1)
    return {
        "tokens": tokens,
        "type_ids": (columns >= lengths[..., None] // 2).astype(np.int32) * segment_ids,
        "segment_ids": segment_ids,
        "labels": labels if labels.dtype == np.float32 else labels.astype(np.int32),
    }


def make_order(seed: int) -> np.ndarray:
    """Each batch once in a pass, in an order of its own."""
    rng = np.random.default_rng(seed)
    return np.concatenate(
        [rng.permutation(NUM_BATCHES) for _ in range(NUM_STEPS // NUM_BATCHES)]
    ).astype(np.int32)


def rate(step: int) -> float:
    """Of the peak: update 0 has a part of it, update `warmup_steps` all of it.

    Transformers' own schedule begins with an update of rate 0; it is equal from the peak on.
    """
    warmup = OPTIMIZER["warmup_steps"]
    return (step + 1) / warmup if step < warmup else (NUM_STEPS - step) / (NUM_STEPS - warmup)


def train(run: str, model, batches: dict[str, np.ndarray], order: np.ndarray) -> dict:
    """Losses and norms of the gradient; the model is changed."""
    decayed, kept = [], []
    for name, parameter in model.named_parameters():
        (kept if name.endswith("bias") or "LayerNorm" in name else decayed).append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": OPTIMIZER["weight_decay"]},
            {"params": kept, "weight_decay": 0.0},
        ],
        lr=OPTIMIZER["learning_rate"],
        betas=(OPTIMIZER["b1"], OPTIMIZER["b2"]),
        eps=OPTIMIZER["eps"],
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses, norms = [], []
    for number in order:
        output = model(
            input_ids=torch.tensor(batches["tokens"][number]).long(),
            token_type_ids=torch.tensor(batches["type_ids"][number]).long(),
            attention_mask=torch.tensor(batches["segment_ids"][number]).long(),
            **_labels(run, batches["labels"][number]),
        )
        optimizer.zero_grad()
        output.loss.backward()
        norms.append(
            torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_norm"]).item()
        )
        losses.append(output.loss.item())
        optimizer.step()
        schedule.step()
    return {"losses": np.array(losses), "grad_norms": np.array(norms)}


def _labels(run: str, labels: np.ndarray) -> dict[str, torch.Tensor]:
    if run == "span":
        starts, ends = torch.tensor(labels).long().T
        return {"start_positions": starts, "end_positions": ends}
    if run == "tags":
        return {"labels": torch.tensor(np.where(labels < 0, -100, labels)).long()}
    return {"labels": torch.tensor(labels) if run != "class" else torch.tensor(labels).long()}


def weights_of(model) -> dict[str, np.ndarray]:
    """Their state dict."""
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def main() -> None:
    """Write the file."""
    encoder = {
        name: array
        for name, array in weights_of(make_model("class", seed=0)).items()
        if name.startswith("bert.")
    }
    arrays = {f"weights/{name}": array for name, array in encoder.items()}
    for seed, run in enumerate(GOLDEN):
        model, batches, order = make_model(run, seed=0), make_batches(run, seed), make_order(seed)
        for name, array in weights_of(model).items():
            if not name.startswith("bert."):
                arrays[f"{run}/weights/{name}"] = array
            elif not np.array_equal(array, encoder[name]):
                raise AssertionError(f"{run}: {name} is not that of the other runs")
        arrays |= {f"{run}/batches/{name}": array for name, array in batches.items()}
        arrays[f"{run}/order"] = order
        arrays |= {f"{run}/{n}": a for n, a in train(run, model, batches, order).items()}
        print(run, arrays[f"{run}/losses"].round(3), arrays[f"{run}/grad_norms"].round(1))
    path = Path(__file__).parent / "finetuning" / "tiny.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
