"""Classes of Transformers that read a source and write a target, and our networks."""
