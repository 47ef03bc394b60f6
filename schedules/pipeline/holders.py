"""What holds the bytes of a stage, by the names that plans for clusters keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

STATES, PARAMETERS, GRADIENTS = "optimizer states and masters", "parameters", "gradients"
BORDERS = "borders"
ACTIVATIONS = "saved activations"
FOR_WEIGHTS = "for gradients of weights"
"""What waits for them, where a schedule makes them apart."""
RUNNING = "while a block runs"
STANDING = STATES, PARAMETERS, GRADIENTS, BORDERS
"""Live throughout the step."""
HOLDERS = *STANDING, ACTIVATIONS, FOR_WEIGHTS, RUNNING


def holders_in(stages: Iterable[Mapping[str, int]]) -> list[str]:
    """Those to show: what waits for gradients of weights only if a stage has it."""
    has_waiting = any(FOR_WEIGHTS in held for held in stages)
    return [name for name in HOLDERS if name != FOR_WEIGHTS or has_waiting]
