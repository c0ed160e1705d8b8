"""Pretraining: configuration, corpus, and the plan of a run."""
