"""Offsets for the buffers of a step in one arena near the most live bytes."""
