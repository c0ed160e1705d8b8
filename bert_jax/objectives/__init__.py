"""Objectives: the things that a run can learn."""
