"""Heads and MLPs in chunks: found in a graph, replaced, and held to the bits of the whole op."""
