"""Gradients as they arrive, are released, clipped and used by updates."""
