"""Applies a plan for a cluster to a model on its ranks."""
