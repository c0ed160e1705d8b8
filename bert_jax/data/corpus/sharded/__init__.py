"""Corpora of several shards: tasks, engines that run them, and the workspace for results."""
