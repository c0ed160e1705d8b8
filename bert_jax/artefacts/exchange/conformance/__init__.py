"""Texts, inputs and expected outputs in each export, and a program that compares a runtime."""
