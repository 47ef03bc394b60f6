"""Analyses of a plan: why it is as it is, and what else could be done."""
