"""Meshes, sharding rules, collectives and processes."""
