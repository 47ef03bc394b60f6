"""Blocks of a model as one rank of a cluster runs them."""
