"""Whole optimizer steps on ranks."""
