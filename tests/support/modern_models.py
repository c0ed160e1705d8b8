"""Small random models of modern families, as Transformers saves them; needs torch."""

from pathlib import Path
from typing import Any

from family_models import wordpiece

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 6,
    "num_attention_heads": 4, "max_position_embeddings": 140, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}
_LOCAL = {"local_attention": 16}
_SAME = {
    key: {"rope_theta": 160_000.0, "rope_type": "default"}
    for key in ("full_attention", "sliding_attention")
}
DEBERTA: dict[str, Any] = {
    "relative_attention": True, "position_biased_input": False, "position_buckets": 16,
    "pos_att_type": "p2c|c2p", "share_att_key": True, "norm_rel_ebd": "layer_norm",
}  # fmt: skip
"""Fields of DeBERTa-v3, with fewer buckets."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert": ("ModernBert", _LOCAL),
    "ettin": ("ModernBert", {**_LOCAL, "rope_parameters": _SAME}),
    "granite": ("ModernBert", {**_LOCAL, "hidden_activation": "silu"}),
    "biases": ("ModernBert", {**_LOCAL, **BIASES}),
    "untied": ("ModernBert", {**_LOCAL, "tie_word_embeddings": False, "decoder_bias": False}),
    "eurobert": ("EuroBert", {"num_key_value_heads": 2, "mask_token_id": 4}),
    "eurobert biases": (
        "EuroBert", {"attention_bias": True, "mlp_bias": True, "mask_token_id": 4}
    ),
    "nomic": ("NomicBert", {}),
    "deberta": ("DebertaV2", DEBERTA),
    "deberta of one term": (
        "DebertaV2",
        {**DEBERTA, "pos_att_type": ["p2c"], "share_att_key": False, "max_relative_positions": 20},
    ),
    "deberta without buckets": (
        "DebertaV2",
        {
            **DEBERTA, "position_buckets": -1, "norm_rel_ebd": "none", "share_att_key": False,
            "max_relative_positions": 12,
        },
    ),
}  # fmt: skip
"""Families and fields of their configurations."""


def modern_model(variant: str, task: str = "ForMaskedLM", **fields: Any) -> Any:
    """Return a random model of Transformers; norms are moved from 1, and biases from 0."""
    import torch
    import transformers

    torch.manual_seed(0)
    family, own = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, **own, **fields}, attn_implementation="eager"
    )
    model = getattr(transformers, family + task)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def save_modern(directory: Path, variant: str, task: str = "ForMaskedLM", **fields: Any) -> Any:
    """Save a random model with a tokenizer; return the model."""
    tokenizer = wordpiece("BertTokenizer")
    model = modern_model(variant, task, **{"vocab_size": len(tokenizer), **fields})
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model
