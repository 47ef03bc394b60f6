"""Runs a rewritten module beside eager, and compares all that a step changes."""
