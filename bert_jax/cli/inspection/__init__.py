"""Inspection of runs and corpora: status, replay, lineage, evaluation, corpora."""
