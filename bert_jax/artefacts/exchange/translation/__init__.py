"""Models that translate, out of bert_jax: files, programs of the search, and their proof."""
