"""Whole optimizer steps: order, recomputation and tiers of all that a step holds, in one plan."""
