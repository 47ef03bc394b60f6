"""How a step releases gradients as they are made, and what they are used for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GradientRelease:
    """Gradients of parameters leave backward one by one; see `gradients.py`.

    `updates` are of the parameters that the optimizer updates in backward, with the bytes that each
    takes. Other gradients then stay to the end. Empty: gradients are only released.
    """

    is_added: bool = True  # to a ``.grad`` that is there before the step
    updates: tuple[tuple[str, int], ...] = ()
    state_bytes: int = 0  # of the optimizer, between steps
