"""Gradients as they arrive, are handed over, clipped and used by updates."""
