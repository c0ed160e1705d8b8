"""Analytic floating-point operations of a training step, for model FLOPs utilisation (MFU).

Only matrix products count. A product of (m, k) and (k, n) has 2 m k n operations, because a
multiply and an add count as two. The vocabulary projection runs at the P masked positions, over the
padded vocabulary. In attention, each visible query-key pair counts: L * L pairs in a global layer.
The backward pass costs twice as much as the forward pass, because each product has two operands to
differentiate. Lookups, norms, softmax, activations, dropout and the optimizer do not count. Forward
operations that rematerialisation repeats count once, so rematerialisation does not raise the MFU
(Chowdhery et al. 2022, PaLM, appendix B).
"""

from collections import Counter
from itertools import cycle, islice

from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import ARC_WIDTH, RELATION_WIDTH

TRAIN_OVER_FORWARD = 3
"""Cost of a training step in forward passes: 1 for the forward pass, 2 for the backward pass."""


def encoder_flops(config: ModelConfig, length: int) -> int:
    """Count the operations of one row's forward pass through embeddings and layers."""
    e, d, f = config.embedding_width, config.hidden_dim, config.mlp_dim
    map_to_layers = 2 * length * e * d * config.projects_embeddings
    kv_heads = config.num_kv_heads or config.num_heads
    projections = 2 * length * d * (2 * d + 2 * kv_heads * config.head_dim)
    mlp = (3 if config.gated else 2) * 2 * length * d * f
    letters = Counter(islice(cycle(config.attention_pattern), config.num_layers))
    pairs = sum(count * seen_keys(config, length, letter) for letter, count in letters.items())
    terms = len(config.relative_terms.split("|")) * (config.positions == "relative")
    attention = 2 * (2 + terms) * pairs * d
    return map_to_layers + config.num_layers * (projections + mlp) + attention


def decoder_flops(config: ModelConfig, source_length: int, target_length: int) -> int:
    """Count the operations of one row's forward pass through a decoder, whose layers are global."""
    d, kv = config.hidden_dim, (config.num_kv_heads or config.num_heads) * config.head_dim
    tokens = config.projects_embeddings * 2 * config.embedding_width * d
    own = 2 * d * (2 * d + 2 * kv) + 2 * d * 2 * d  # self-attention; query and output of `cross`
    own += (3 if config.gated else 2) * 2 * d * config.mlp_dim
    seen = target_length * (target_length + 1) // 2 + target_length * source_length
    layer = target_length * own + source_length * 2 * d * 2 * kv + 2 * 2 * seen * d
    return target_length * tokens + config.num_layers * layer


def seen_keys(config: ModelConfig, length: int, letter: str) -> int:
    """Count the visible query-key pairs in one row that has a single segment."""
    window = min(length - 1, length if (found := config.window(letter)) is None else found)
    return length * (2 * window + 1) - window * (window + 1)


def vocabulary_flops(config: ModelConfig, num_masked: int) -> int:
    """Count the forward operations of the masked-LM head at `num_masked` positions."""
    e = config.embedding_width
    transform = 2 * config.hidden_dim * e * config.head_transform
    return num_masked * (transform + 2 * e * config.padded_vocab_size)


def replaced_flops(config: ModelConfig, length: int) -> int:
    """Count the forward operations of the head that detects replaced tokens."""
    return length * (2 * config.hidden_dim**2 + 2 * config.hidden_dim)


def train_flops(config: ModelConfig, length: int, num_masked: int) -> int:
    """Count one row's operations in a training step of a pretraining model, including its heads.

    Padding costs as much as text. `num_masked` is P, the number of positions that get logits.
    MFU = train_flops(config, L, P) * rows / (seconds per step * peak operations per second).
    """
    # Pooler and next-sentence head
    pairs = (2 * config.hidden_dim**2 + 2 * config.hidden_dim * 2) * config.pooler
    heads = pairs + vocabulary_flops(config, num_masked)
    return TRAIN_OVER_FORWARD * (encoder_flops(config, length) + heads)


def biaffine_flops(config: ModelConfig, length: int, num_relations: int) -> int:
    """Count the operations of one row's forward pass through a biaffine head."""
    vectors = 2 * length * config.hidden_dim * 2 * (ARC_WIDTH + RELATION_WIDTH)
    arcs = 2 * length * ARC_WIDTH * (ARC_WIDTH + length)
    relations = 2 * length * RELATION_WIDTH * num_relations * (RELATION_WIDTH + length + 1)
    return vectors + arcs + relations


def task_flops(config: ModelConfig, length: int, network: str, num_labels: int) -> int:
    """Count one row's operations in a fine-tuning step; `network` is the kind of the head."""
    d = config.hidden_dim
    head = 2 * length * d * num_labels
    if network == "parsing":
        head = biaffine_flops(config, length, num_labels)
    elif network == "classification":
        head = 2 * d * d + 2 * d * num_labels
    return TRAIN_OVER_FORWARD * (encoder_flops(config, length) + head)
