"""Configurations: files, command lines and the frozen dataclasses they become."""
