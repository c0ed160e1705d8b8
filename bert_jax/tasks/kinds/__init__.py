"""Kinds of tasks: the fields of the section `task` that each kind has."""
