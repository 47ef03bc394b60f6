"""Runs whole optimizer steps: microbatches, gradients, updates, and what lives below the device."""
