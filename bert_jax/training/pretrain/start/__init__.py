"""Starts of a pretraining run from a model or from a checkpoint of another run."""
