"""bert_jax: from raw text to a pretrained BERT-style encoder, in JAX."""

__version__ = "0.1.0"
