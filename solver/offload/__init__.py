"""Offload: copies below the device beside recomputation, in one plan."""
