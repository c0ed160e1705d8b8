"""Logits of a fine-tuned model, from its tokens."""

from bert_jax.model.heads import encode
from bert_jax.model.task_heads import head_logits


def apply_task(config, head, params, tokens, type_ids, segment_ids, stream=None):
    """Encode rows, and apply the head to the states."""
    hidden = encode(config, params, tokens, type_ids, segment_ids, stream)
    return head_logits(config, head, params, hidden, segment_ids, stream)
