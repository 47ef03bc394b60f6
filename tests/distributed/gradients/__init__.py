"""Gradients of parts, beside those of the whole model on one rank."""
