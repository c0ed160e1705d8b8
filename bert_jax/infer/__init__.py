"""What a model answers about texts."""

from bert_jax.infer.fill_mask import MASK, Candidate, MaskFiller, format_candidates

__all__ = ["MASK", "Candidate", "MaskFiller", "format_candidates"]
