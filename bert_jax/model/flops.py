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


def forward_flops(config: ModelConfig, length: int, num_masked: int) -> int:
    """Operations of one row's forward pass.

    Args:
      config: the architecture.
      length: L, padding included, since it is computed like text.
      num_masked: P, positions per row that get vocabulary logits.
    """
    d, f = config.hidden_dim, config.mlp_dim
    projections = 4 * 2 * length * d * d  # query, key, value, output
    attention = 2 * 2 * length * length * d  # scores, and weights times values, over all heads
    mlp = 2 * 2 * length * d * f
    pooler = 2 * d * d
    nsp = 2 * d * 2
    mlm = num_masked * (2 * d * d + 2 * d * config.padded_vocab_size)
    return config.num_layers * (projections + attention + mlp) + pooler + nsp + mlm


def train_flops(config: ModelConfig, length: int, num_masked: int) -> int:
    """Operations of one row in a training step; multiply by the global number of rows for a step.

    MFU = train_flops(config, L, P) * rows / (seconds per step * peak operations per second).
    """
    return TRAIN_OVER_FORWARD * forward_flops(config, length, num_masked)
