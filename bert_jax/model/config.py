"""The architecture of an encoder, as one frozen value."""

from dataclasses import dataclass
from typing import Literal

from bert_jax.errors import UserError

VOCAB_MULTIPLE = 128
"""The embedding table's rows are padded to a multiple of this, the lane width of a TPU."""

ARCHITECTURE = (
    "num_positions", "num_types", "embedding_dim", "hidden_dim", "num_layers", "num_heads",
    "mlp_dim", "norm_eps", "activation", "pooler_activation",
)  # fmt: skip
"""Fields that say what is computed from given parameters; with `vocab_size`, all of them."""


@dataclass(frozen=True)
class ModelConfig:
    """An encoder of the BERT family; the defaults are BERT-base as published.

    Source: Devlin et al. 2018, section 3, and the `bert_config.json` of the published checkpoints.
    Single letters in comments are the axis letters of the README.
    """

    vocab_size: int = 30522
    """Tokens the tokenizer knows. The parameter has `padded_vocab_size` rows."""
    num_positions: int = 512
    """Longest sequence that the position table covers."""
    num_types: int = 2
    """Sentence types (A and B)."""
    hidden_dim: int = 768  # D
    embedding_dim: int = 0
    """Width of the embedding tables (E); 0: hidden_dim. Another width than hidden_dim adds a map of
    the embeddings to hidden_dim before the first layer, as in ELECTRA."""
    num_layers: int = 12  # N
    num_heads: int = 12  # H
    mlp_dim: int = 3072  # F
    hidden_dropout_rate: float = 0.1
    attention_dropout_rate: float = 0.1
    norm_eps: float = 1e-12
    init_std: float = 0.02
    """Scale of the truncated normal, before truncation at two of it (its own std is 0.88 of it)."""
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """`gelu` is the exact erf form; the original TensorFlow code used `gelu_tanh`."""
    pooler_activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Activation between the two maps of a classification: BERT and RoBERTa have `tanh`, DistilBERT
    `relu`, ELECTRA `gelu`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. `auto`: bfloat16 on TPU and GPU, float32 on CPU. Parameters stay float32."""
    attention_impl: Literal["auto", "xla", "splash", "cudnn", "fused"] = "auto"
    scan_unroll: int = 24
    """Layers unrolled per scan iteration; at or above `num_layers` the loop disappears."""
    remat: Literal["none", "dots", "full"] = "none"
    """Recomputation in the backward pass: none, all but matrix products, or whole layers."""

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built."""
        for name in (
            "vocab_size", "num_positions", "num_types", "hidden_dim", "num_layers", "num_heads",
            "mlp_dim", "scan_unroll",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if self.embedding_dim < 0:
            raise UserError(
                f"model.embedding_dim is {self.embedding_dim}; it must be at least 1, or 0 for the "
                "width of the model"
            )
        if self.hidden_dim % self.num_heads:
            raise UserError(
                f"model.hidden_dim {self.hidden_dim} is not divisible by model.num_heads "
                f"{self.num_heads}"
            )
        for name in ("hidden_dropout_rate", "attention_dropout_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be in [0, 1)")

    @property
    def embedding_width(self) -> int:
        """Width of the embedding tables (E)."""
        return self.embedding_dim or self.hidden_dim

    @property
    def projects_embeddings(self) -> bool:
        """Whether a map leads from the embeddings to the layers, because their widths differ."""
        return self.embedding_width != self.hidden_dim

    @property
    def head_dim(self) -> int:
        """Width of one attention head (K)."""
        return self.hidden_dim // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table (V): `vocab_size` rounded up to `VOCAB_MULTIPLE`."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


_SIZES = (
    ("tiny", 2, 128), ("mini", 4, 256), ("small", 4, 512), ("medium", 8, 512), ("base", 12, 768),
    ("large", 24, 1024),
)  # fmt: skip
SIZES: dict[str, ModelConfig] = {
    name: ModelConfig(num_layers=layers, hidden_dim=dim, num_heads=dim // 64, mlp_dim=4 * dim)
    for name, layers, dim in _SIZES
}
"""The published sizes. Sources: Devlin et al. 2018 (base, large); Turc et al. 2019 (the others)."""
