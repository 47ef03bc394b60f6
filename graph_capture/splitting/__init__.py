"""Regions of a step that may run in pieces: found, replaced by ops of our own, priced."""
