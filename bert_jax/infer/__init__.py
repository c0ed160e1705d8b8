"""Answers of a model about texts."""

from bert_jax.infer.fill_mask import Candidate, MaskFiller, format_candidates
from bert_jax.infer.masks import MASK

__all__ = ["MASK", "Candidate", "MaskFiller", "format_candidates"]
