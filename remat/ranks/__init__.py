"""Ranks that act together: one plan for all, and an error of one that reaches all."""
