"""Sections of the configuration of a task, for the kinds that have a file of their own."""
