"""Analytic floating-point operations of a training step, for model FLOPs utilisation (MFU).

Counted: matrix products, a multiply and an add each as one operation (2 m k n); as they are run:
the vocabulary projection only at the P masked positions, over the padded vocabulary. The backward
pass costs twice the forward, since each product has two operands to differentiate. Not counted:
lookups, norms, softmax, activations, dropout, the optimizer, and what rematerialisation repeats,
so that MFU does not rise by recomputing (Chowdhery et al. 2022, PaLM, appendix B).
"""

from bert_jax.model.config import ModelConfig

TRAIN_OVER_FORWARD = 3
"""Forward, and a backward of twice its cost."""


def encoder_flops(config: ModelConfig, length: int) -> int:
    """Count the operations of one row's way through embeddings and layers."""
    e, d, f = config.embedding_width, config.hidden_dim, config.mlp_dim
    map_to_layers = 2 * length * e * d * config.projects_embeddings
    projections = 4 * 2 * length * d * d  # query, key, value, output
    attention = 2 * 2 * length * length * d  # scores, and weights times values, over all heads
    mlp = 2 * 2 * length * d * f
    return map_to_layers + config.num_layers * (projections + attention + mlp)


def vocabulary_flops(config: ModelConfig, num_masked: int) -> int:
    """Count the operations of the masked-LM head at `num_masked` positions."""
    e = config.embedding_width
    return num_masked * (2 * config.hidden_dim * e + 2 * e * config.padded_vocab_size)


def replaced_flops(config: ModelConfig, length: int) -> int:
    """Count the operations of the head that detects replaced tokens."""
    return length * (2 * config.hidden_dim**2 + 2 * config.hidden_dim)


def train_flops(config: ModelConfig, length: int, num_masked: int) -> int:
    """Count the operations of one row in a training step of a pretraining model, with both heads.

    `length` is L, padding included, since padding is computed like text; `num_masked` is P, the
    positions of a row that get vocabulary logits.
    MFU = train_flops(config, L, P) * rows / (seconds per step * peak operations per second).
    """
    pairs = 2 * config.hidden_dim**2 + 2 * config.hidden_dim * 2  # pooler and head
    heads = pairs + vocabulary_flops(config, num_masked)
    return TRAIN_OVER_FORWARD * (encoder_flops(config, length) + heads)


def task_flops(config: ModelConfig, length: int, network: str, num_labels: int) -> int:
    """Count the operations of one row in a fine-tuning step; `network` is the kind of the head."""
    d = config.hidden_dim
    pooled = network == "classification"
    head = 2 * d * d + 2 * d * num_labels if pooled else 2 * length * d * num_labels
    return TRAIN_OVER_FORWARD * (encoder_flops(config, length) + head)
