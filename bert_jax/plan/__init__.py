"""Ahead-of-time compilation for TPU topologies: what a step costs before anybody pays for it."""
