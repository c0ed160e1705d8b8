"""Corpora of several shards: tasks, the engine that runs them, and where their work lies."""
