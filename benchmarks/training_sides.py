"""The two sides of `train_step.py`: this package's training step, and Transformers' in PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

BERT, MODERN = "bert", "modernbert"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "smoke": (BERT, {"num_layers": 1, "hidden_dim": 32, "num_heads": 2, "mlp_dim": 64}),
    "mini": (BERT, {"num_layers": 4, "hidden_dim": 256, "num_heads": 4, "mlp_dim": 1024}),
    "bert_base": (BERT, {"num_layers": 12, "hidden_dim": 768, "num_heads": 12, "mlp_dim": 3072}),
    "bert_large": (BERT, {"num_layers": 24, "hidden_dim": 1024, "num_heads": 16, "mlp_dim": 4096}),
    "smoke_modern": (
        MODERN,
        {"num_layers": 2, "hidden_dim": 32, "num_heads": 2, "mlp_dim": 48, "local_window": 8},
    ),
    "ettin_17m": (
        MODERN,
        {
            "num_layers": 7, "hidden_dim": 256, "num_heads": 4, "mlp_dim": 384,
            "local_rope_theta": 160_000.0,
        },
    ),
    "modernbert_base": (
        MODERN,
        {"num_layers": 22, "hidden_dim": 768, "num_heads": 12, "mlp_dim": 1152},
    ),
}  # fmt: skip
"""Kind and sizes of each model."""

MODERN_FIELDS: dict[str, Any] = {
    "num_types": 0, "norm_order": "pre", "norm_eps": 1e-5, "norm_bias": False, "first_norm": False,
    "positions": "rope", "rope_theta": 160_000.0, "attention_pattern": "GLL", "local_window": 64,
    "gated": True, "attention_bias": False, "mlp_bias": False, "pooler": False, "head_bias": False,
    "init": "scaled", "attention_dropout_rate": 0.0, "hidden_dropout_rate": 0.0,
}  # fmt: skip
"""Fields of ModernBERT; no dropout, which the class of Transformers lacks where ours has it."""

LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 1e-4, 0.01, 1.0

RunSteps = Callable[[int], float]
"""Runs that many steps to their end and returns the last loss."""


class Words(NamedTuple):
    """Vocabulary of a kind of model."""

    size: int
    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
    first: int
    """First of the ids that rows are drawn from."""
    end: int
    """End of the ids that rows are drawn from."""
    rate: float
    """Share of the tokens that are masked."""


WORDS = {
    BERT: Words(30522, 0, 100, 101, 102, 103, 1000, 30522, 0.15),
    MODERN: Words(50368, 50283, 50280, 50281, 50282, 50284, 100, 50000, 0.30),
}


@dataclass(frozen=True)
class Case:
    """A model and the rows it trains on."""

    model: str
    length: int
    rows: int

    @property
    def kind(self) -> str:
        """Kind of the model."""
        return MODELS[self.model][0]

    @property
    def words(self) -> Words:
        """Vocabulary of the model."""
        return WORDS[self.kind]

    @property
    def positions(self) -> int:
        """Masked positions of a row."""
        return max(1, round(self.words.rate * self.length))

    def model_config(self) -> Any:
        """Return the configuration of our model."""
        from bert_jax.model.config import ModelConfig

        fields = {"num_positions": max(512, self.length), "vocab_size": self.words.size}
        if self.kind == MODERN:
            fields |= MODERN_FIELDS
        return ModelConfig(**fields | MODELS[self.model][1])

    def flops(self) -> int:
        """Count the operations of a step, useful ones only (`bert_jax/model/flops.py`)."""
        from bert_jax.model.flops import train_flops

        return self.rows * train_flops(self.model_config(), self.length, self.positions)


def make_batch(case: Case) -> dict[str, Any]:
    """Make full rows of random words: what the pipeline would deliver, without its corpus."""
    import numpy as np

    rng, words, shape = np.random.default_rng(0), case.words, (case.rows, case.length)
    tokens = rng.integers(words.first, words.end, shape).astype(np.uint16)
    tokens[:, 0], tokens[:, -1] = words.cls, words.sep
    type_ids, pairs = np.zeros(shape, np.uint8), np.full(case.rows, -1, np.int32)
    if case.kind == BERT:
        tokens[:, case.length // 2] = words.sep
        type_ids[:, case.length // 2 + 1 :] = 1
        pairs = rng.integers(0, 2, case.rows).astype(np.int32)
    return {
        "tokens": tokens,
        "type_ids": type_ids,
        "segment_ids": np.ones(shape, np.uint8),
        "pair_labels": pairs,
        "row_index": np.arange(case.rows, dtype=np.uint32),
    }


def our_steps(case: Case) -> RunSteps:
    """Make this package's step, which masks on the device."""
    import jax

    from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh, place_batch
    from bert_jax.objectives.masked_lm import MaskedLM
    from bert_jax.objectives.masking import MaskingConfig
    from bert_jax.tokenization.special_ids import SpecialIds
    from bert_jax.training.steps.optim import OptimizerConfig
    from bert_jax.training.steps.state import StepConfig, jitted_init
    from bert_jax.training.steps.step import make_train_step

    words = case.words
    config = StepConfig(
        objective=MaskedLM(
            model=case.model_config(),
            masking=MaskingConfig(rate=words.rate, max_predictions=case.positions),
            special_ids=SpecialIds(words.pad, words.unk, words.cls, words.sep, words.mask),
            pairs=case.kind == BERT,
        ),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, clip_norm=CLIP_NORM
        ),
        num_steps=1_000_000,
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    step, host_batch = make_train_step(config, mesh), make_batch(case)
    state = jitted_init(config, mesh)(jax.random.key(0))

    def run(count: int) -> float:
        nonlocal state
        for _ in range(count):
            state, metrics = step(state, place_batch(host_batch, mesh))
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return run


def peer_steps(
    case: Case,
    *,
    gather: bool,
    device: str = "cpu",
    compiler: str | None = None,
    attention: str = "sdpa",
    num_threads: int | None = None,
) -> RunSteps:
    """Make the step of Transformers and PyTorch, on rows that are masked already.

    Args:
        case: what to train.
        gather: whether the masked positions alone are projected onto the vocabulary. ModernBERT
            has `sparse_prediction` for it, of which the sizes are not known when compiling: a
            compiled step takes the states at given places instead, as BERT's does.
        device: "cpu" (float32) or "cuda" (bfloat16 autocast).
        compiler: torch.compile's backend; None runs eagerly.
        attention: implementation of attention, as Transformers names it.
        num_threads: threads of PyTorch on the CPU.
    """
    import torch

    torch.manual_seed(0)
    if num_threads:
        torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision("high")
    model = _peer_model(case, attention, sparse=gather).to(device).train()
    decayed: dict[bool, list[Any]] = {True: [], False: []}
    for parameter in model.parameters():  # biases and norms have one axis
        decayed[parameter.ndim > 1].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed[True], "weight_decay": WEIGHT_DECAY},
            {"params": decayed[False], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        eps=1e-6,
        fused=True,
    )
    published = case.kind == MODERN and compiler is None
    loss_function = _peer_loss(case, model, device, gather and not published)
    if compiler is not None:
        loss_function = torch.compile(loss_function, backend=compiler)

    def run(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = loss_function()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
        return float(loss.detach())  # waits for the device

    return run


def _peer_model(case: Case, attention: str, sparse: bool) -> Any:
    import transformers

    ours = case.model_config()
    shared = {
        "vocab_size": case.words.size,
        "hidden_size": ours.hidden_dim,
        "num_hidden_layers": ours.num_layers,
        "num_attention_heads": ours.num_heads,
        "intermediate_size": ours.mlp_dim,
        "max_position_embeddings": ours.num_positions,
        "attn_implementation": attention,
    }
    if case.kind == BERT:
        return transformers.BertForPreTraining(transformers.BertConfig(**shared))
    thetas = {"full_attention": ours.rope_theta, "sliding_attention": ours.local_rope_theta}
    config = transformers.ModernBertConfig(
        **shared,
        local_attention=2 * ours.local_window,
        sparse_prediction=sparse,
        rope_parameters={
            name: {"rope_type": "default", "rope_theta": theta} for name, theta in thetas.items()
        },
    )
    return transformers.ModernBertForMaskedLM(config)


def _peer_loss(case: Case, model: Any, device: str, gather: bool) -> Callable[[], Any]:
    """Make the loss of one batch, as published or of the masked positions alone."""
    import numpy as np
    import torch

    rng, batch = np.random.default_rng(1), make_batch(case)
    tokens = batch["tokens"].astype(np.int64)
    labels = np.full_like(tokens, -100)
    for row in range(case.rows):
        words = np.flatnonzero((tokens[row] != case.words.cls) & (tokens[row] != case.words.sep))
        chosen = rng.permutation(words)[: case.positions]
        labels[row, chosen] = tokens[row, chosen]
        tokens[row, chosen] = case.words.mask

    def place(array: Any) -> Any:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    inputs, targets = {"input_ids": place(tokens)}, {"labels": place(labels)}
    if device == "cpu":  # on a GPU full rows go without, for the kernels that take no mask
        inputs["attention_mask"] = place(np.ones_like(tokens))
    if case.kind == BERT:
        inputs["token_type_ids"] = place(batch["type_ids"])
        targets["next_sentence_label"] = place(batch["pair_labels"])
    places, words = place(np.flatnonzero(labels >= 0)), place(labels[labels >= 0])
    cross_entropy = torch.nn.functional.cross_entropy

    def published_loss() -> Any:
        return model(**inputs, **targets).loss

    def gathered_loss() -> Any:
        if case.kind == MODERN:
            hidden = model.model(**inputs).last_hidden_state.flatten(0, 1)[places]
            return cross_entropy(model.decoder(model.head(hidden)).float(), words)
        hidden, pooled = model.bert(**inputs)[:2]
        logits, pairs = model.cls(hidden.flatten(0, 1)[places], pooled)
        return cross_entropy(logits, words) + cross_entropy(pairs, targets["next_sentence_label"])

    return gathered_loss if gather else published_loss
