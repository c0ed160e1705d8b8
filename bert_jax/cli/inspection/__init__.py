"""Answers about runs and corpora: status, replay, lineage, evaluation, corpora."""
