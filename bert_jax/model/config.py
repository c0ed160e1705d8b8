"""The architecture of an encoder, as one frozen dataclass."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from bert_jax.config.bounds import Bounded, Count, Natural, Positive, Rate
from bert_jax.errors import UserError

VOCAB_MULTIPLE = 128
"""Multiple to which the embedding table's rows are padded: the number of vector lanes of a TPU."""

ARCHITECTURE = (
    "num_positions", "num_types", "embedding_dim", "hidden_dim", "num_layers", "num_heads",
    "num_kv_heads", "mlp_dim", "gated", "activation", "norm", "norm_eps", "norm_bias", "norm_order",
    "embedding_norm", "first_norm", "positions", "rope_theta", "local_rope_theta", "local_window",
    "attention_pattern", "attention_bias", "mlp_bias", "pooler", "pooler_activation",
    "head_transform", "head_bias", "head_activation", "decoder_bias", "tied", "scale_embeddings",
    "relative_terms", "relative_shared", "relative_norm", "relative_buckets", "relative_distance",
)  # fmt: skip
"""Fields that, with `vocab_size`, fully determine what a model computes from its parameters."""


class LayerKind(NamedTuple):
    """Kind of a layer: the properties in which layers of the same encoder may differ."""

    letter: str = "G"
    """Letter of `attention_pattern`: G for global attention, L for local."""
    first: bool = False
    """Whether the layer is first and has no norm before its attention (`first_norm` is false)."""


@dataclass(frozen=True)
class ModelConfig(Bounded, section="model"):
    """Architecture of an encoder of the BERT family; the defaults describe BERT-base.

    Sources: Devlin et al. 2018, section 3, and the `bert_config.json` of the published checkpoints.
    Fields that BERT lacks are from Warner et al. 2024 (ModernBERT), section 2, unless noted.
    Single letters, such as D, name array axes; see "Axis letters" in the README.
    """

    vocab_size: Count = 30522
    """Number of tokens in the vocabulary; the embedding table has `padded_vocab_size` rows."""
    num_positions: Count = 512
    """Maximum length of a sequence in tokens; also the number of rows of a position table."""
    num_types: Natural = 2
    """Number of sentence types (2 for sentences A and B); 0 means no type embeddings."""
    hidden_dim: Count = 768  # D
    embedding_dim: Natural = 0
    """Width of the embedding tables (E); 0 means hidden_dim. If the width is not hidden_dim, a
    projection to hidden_dim precedes the first layer, as in ELECTRA."""
    num_layers: Count = 12  # N
    num_heads: Count = 12  # H
    num_kv_heads: Natural = 0  # G
    """Number of key and value heads; 0 means num_heads. Each key and value head serves
    num_heads / num_kv_heads query heads (grouped-query attention, Ainslie et al. 2023)."""
    mlp_dim: Count = 3072  # F
    gated: bool = False
    """Whether the feed-forward network has a gate: down(activation(gate(x)) * up(x)) instead of
    down(activation(up(x))) (Shazeer 2020)."""
    hidden_dropout_rate: Rate = 0.1
    """Dropout rate of attention outputs; default of embedding_dropout_rate and mlp_dropout_rate."""
    attention_dropout_rate: Rate = 0.1
    """Dropout rate of attention probabilities."""
    embedding_dropout_rate: Rate | None = None
    """Dropout rate of the embeddings; None means hidden_dropout_rate."""
    mlp_dropout_rate: Rate | None = None
    """Dropout rate of the feed-forward outputs; None means hidden_dropout_rate."""
    norm: Literal["layer", "rms"] = "layer"
    """Normalisation. `rms` only divides by the root mean square (Zhang & Sennrich 2019)."""
    norm_eps: float = 1e-12
    norm_bias: bool = True
    """Whether layer norms have a bias; RMS norms never do."""
    norm_order: Literal["post", "pre"] = "post"
    """Position of norms. `post`: norm(x + f(x)). `pre`: x + f(norm(x)), with a final norm."""
    embedding_norm: bool = True
    """Whether the embeddings are normalised."""
    first_norm: bool = True
    """Whether the first layer has a norm before attention; ModernBERT's first layer has none."""
    positions: Literal["learned", "rope", "sinusoidal", "relative"] = "learned"
    """Encoding of positions. `learned` is a table; `rope` rotates queries and keys (Su et al. 2021,
    RoFormer); `sinusoidal` adds sines and cosines to embeddings (Vaswani et al. 2017, 3.5);
    `relative` adds products of contents and distances to scores (He et al. 2021, DeBERTa, 3.1)."""
    relative_terms: Literal["c2p|p2c", "c2p", "p2c"] = "c2p|p2c"
    """Relative terms of a score: query times distance (c2p), distance times key (p2c), or both."""
    relative_shared: bool = True
    """Whether the tokens' query and key maps are also applied to the embeddings of distances."""
    relative_norm: bool = True
    """Whether the embeddings of distances are normalised."""
    relative_buckets: Natural = 256
    """Number of distance embeddings per direction; far distances share them. 0 means no sharing."""
    relative_distance: Natural = 0
    """Distance from which all larger distances share one embedding; 0 means num_positions."""
    scale_embeddings: bool = False
    """Whether token embeddings are multiplied by sqrt(width) (Vaswani et al. 2017, section 3.4). If
    so, the standard deviation of the initial table is 1 / sqrt(width) instead of `init_std`."""
    rope_theta: Positive = 10000.0
    """RoPE base (theta) in global layers."""
    local_rope_theta: Positive = 10000.0
    """RoPE base (theta) in local layers."""
    attention_pattern: str = "G"
    """Repeated pattern of the layers' attention: G is global, L is local. ModernBERT has GLL."""
    local_window: Natural = 0
    """Largest distance, in tokens, at which a query in a local layer sees a key. With 64, a query
    sees at most 129 keys, including the key at its own position."""
    attention_bias: bool = True
    mlp_bias: bool = True
    init: Literal["bert", "scaled"] = "bert"
    """Initialisation of weights. `bert` uses init_std in all layers. `scaled` divides init_std by
    sqrt(2 num_layers) for the output projections of attention and feed-forward."""
    init_std: float = 0.02
    """Standard deviation of the normal distribution of initial weights. The distribution is
    truncated at 2 init_std, so that the weights have standard deviation 0.88 init_std."""
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    """Activation of the feed-forward networks. `gelu` is the exact form with erf; the original
    TensorFlow code of BERT used the approximation `gelu_tanh`."""
    pooler: bool = True
    """Whether the encoder has a pooler, a dense layer over the last state of the first token.
    Next-sentence prediction and BERT's classifiers read the pooler's output."""
    head_transform: bool = True
    """Whether the masked-LM head has a dense layer and a norm before the decoder."""
    head_bias: bool = True
    """Whether the dense layer of the masked-LM head has a bias."""
    head_activation: Literal["", "gelu", "gelu_tanh", "relu", "silu"] = ""
    """Activation of the masked-LM head; if empty, `activation`."""
    decoder_bias: bool = True
    tied: bool = True
    """Whether the masked-LM head's decoder shares the token embedding table."""
    pooler_activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Activation of the pooler: BERT and RoBERTa have `tanh`, DistilBERT `relu`, ELECTRA `gelu`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and products; `auto` means bfloat16 on TPU and GPU, float32 on CPU.
    Parameters are always float32."""
    attention_impl: Literal["auto", "xla", "splash", "cudnn", "fused", "triton"] = "auto"
    """Implementation of attention; `auto` picks one for the device and the sizes."""
    scan_unroll: Count = 24
    """Number of layers in one iteration of the scan. With `num_layers` or more, there is none."""
    remat: Literal["none", "dots", "full"] = "none"
    """Rematerialisation of forward operations in the backward pass, to save memory: `none`, `dots`
    (all except products with weight matrices) or `full` (all). Recurrent networks ignore it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for whole, part in (("hidden_dim", "num_heads"), ("num_heads", "num_kv_heads")):
            size, count = getattr(self, whole), getattr(self, part)
            if count and size % count:
                raise UserError(
                    f"model.{whole} {size} is not divisible by model.{part} {count}; change one of "
                    "them"
                )
        pattern = self.attention_pattern
        if not pattern or set(pattern) - set("GL"):
            raise UserError(
                f"model.attention_pattern is {pattern!r}; expected letters G (global) and L "
                "(local), as in GLL"
            )
        if "L" in pattern and not self.local_window:
            raise UserError(
                f"model.attention_pattern {pattern!r} has local layers, but model.local_window is "
                "0: set local_window to the largest distance at which a query sees keys, such as 64"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise UserError(
                f"model.positions is 'rope', which rotates pairs of numbers, but a head has "
                f"{self.head_dim} numbers (hidden_dim {self.hidden_dim} / num_heads "
                f"{self.num_heads}); expected an even number"
            )
        if self.positions == "sinusoidal" and self.embedding_width % 2:
            raise UserError(
                "model.positions is 'sinusoidal', which needs a sine and a cosine per frequency, "
                f"but the embeddings have width {self.embedding_width}; expected an even width"
            )
        if self.positions == "relative":
            self._check_relative()
        if not self.first_norm and self.norm_order == "post":
            raise UserError(
                "model.first_norm is false, but model.norm_order is 'post', and only 'pre' layers "
                "begin with a norm; set first_norm to true or norm_order to 'pre'"
            )

    def _check_relative(self) -> None:
        if self.num_kv_heads not in (0, self.num_heads):
            raise UserError(
                f"model.positions is 'relative', which needs as many key heads as query heads, but "
                f"model.num_kv_heads is {self.num_kv_heads}; set it to 0"
            )
        buckets, distance = self.relative_buckets, self.relative_distance
        if buckets == 1 or 0 < distance <= buckets // 2 + 1:
            raise UserError(
                f"model.relative_buckets is {buckets} and model.relative_distance is {distance}; "
                "expected 0 or at least 2 buckets, and a distance above half their number plus 1"
            )

    def rate_of(self, part: Literal["embedding", "mlp"]) -> float:
        """Return the dropout rate of the embeddings or of the feed-forward outputs."""
        rate: float | None = getattr(self, f"{part}_dropout_rate")
        return self.hidden_dropout_rate if rate is None else rate

    def window(self, letter: str) -> int | None:
        """Return the largest query-key distance in layers of kind `letter`; None means no limit."""
        return self.local_window if letter == "L" else None

    def layer_kind(self, index: int) -> LayerKind:
        """Return the kind of layer `index`, counted from 0."""
        letter = self.attention_pattern[index % len(self.attention_pattern)]
        return LayerKind(letter, first=index == 0 and not self.first_norm)

    @property
    def embedding_width(self) -> int:
        """Width of the embedding tables (E)."""
        return self.embedding_dim or self.hidden_dim

    @property
    def projects_embeddings(self) -> bool:
        """Whether a projection maps embeddings to `hidden_dim`, because the widths differ."""
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
"""Published sizes, from Devlin et al. 2018 (base, large) and Turc et al. 2019 (all others)."""
