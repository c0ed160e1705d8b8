"""Write tests/golden/model/tiny.npz: a tiny random BERT of Transformers, its inputs and outputs.

    python tests/golden/make_model_golden.py        (needs the `parity` extra)

Entries: `weights/<name>`, `inputs/<name>`, and for each activation `<activation>/mlm`,
`<activation>/nsp`, `<activation>/loss`, `<activation>/gradients/<name>`, all under Hugging Face
names. The inputs have padded rows, both sentence types, and unused mask positions.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForPreTraining

SHAPE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
}
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
"""Our name -> theirs."""


def make_model(activation: str, seed: int, **changes) -> BertForPreTraining:
    """A random model without dropout whose biases and norms are not at their initial 0 and 1."""
    torch.manual_seed(seed)
    config = BertConfig(
        **{**SHAPE, **changes},
        hidden_act=ACTIVATIONS[activation],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than BERT's 0.02, so that attention is far from uniform.
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_inputs(seed: int, rows: int = 4, length: int = 24, vocab_size: int = 99) -> dict:
    """Rows of differing lengths in two parts, with masked positions of differing number."""
    rng = np.random.default_rng(seed)
    lengths = np.linspace(length // 3, length, rows).astype(int)
    num_masked = 5
    columns = np.arange(length)
    segment_ids = (columns < lengths[:, None]).astype(np.int32)
    positions = np.stack([np.sort(rng.permutation(n)[:num_masked]) for n in lengths])
    weights = np.ones((rows, num_masked), np.float32)
    weights[0, 3:] = 0
    return {
        "tokens": rng.integers(0, vocab_size, (rows, length)).astype(np.int32) * segment_ids,
        "type_ids": (columns >= lengths[:, None] // 2).astype(np.int32) * segment_ids,
        "segment_ids": segment_ids,
        "positions": (positions * weights).astype(np.int32),
        "labels": rng.integers(0, vocab_size, (rows, num_masked)).astype(np.int32),
        "weights": weights,
        "nsp_labels": rng.integers(0, 2, rows).astype(np.int32),
    }


def run(model: BertForPreTraining, inputs: dict) -> dict:
    """Logits at every position, the pretraining loss and its gradients."""
    labels = np.full(inputs["tokens"].shape, -100)
    for row, column in zip(*np.nonzero(inputs["weights"]), strict=True):
        labels[row, inputs["positions"][row, column]] = inputs["labels"][row, column]
    model.zero_grad()
    output = model(
        input_ids=torch.tensor(inputs["tokens"], dtype=torch.long),
        token_type_ids=torch.tensor(inputs["type_ids"], dtype=torch.long),
        attention_mask=torch.tensor(inputs["segment_ids"], dtype=torch.long),
        labels=torch.tensor(labels, dtype=torch.long),
        next_sentence_label=torch.tensor(inputs["nsp_labels"], dtype=torch.long),
    )
    output.loss.backward()
    return {
        "mlm": output.prediction_logits.detach().numpy(),
        "nsp": output.seq_relationship_logits.detach().numpy(),
        "loss": output.loss.detach().numpy(),
        "gradients": {name: p.grad.numpy() for name, p in model.named_parameters()},
    }


def main() -> None:
    """Write the file."""
    arrays = {f"inputs/{name}": value for name, value in make_inputs(seed=1).items()}
    for activation in ACTIVATIONS:
        model = make_model(activation, seed=0)
        for name, parameter in model.named_parameters():
            arrays[f"weights/{name}"] = parameter.detach().numpy()
        result = run(model, make_inputs(seed=1))
        for name, gradient in result.pop("gradients").items():
            arrays[f"{activation}/gradients/{name}"] = gradient
        arrays |= {f"{activation}/{name}": value for name, value in result.items()}
    path = Path(__file__).parent / "model" / "tiny.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
