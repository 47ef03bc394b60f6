"""How a step releases gradients as they are made, and what they are used for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GradientRelease:
    """Gradients of parameters leave backward one by one; see `gradients.py`.

    Attributes
    ----------
    is_added : whether ``.grad`` is there before the step, and gradients are added to it.
    updates : names of the parameters that the optimizer updates in backward, and the bytes that
        each update takes. Other gradients then stay to the end. Empty: gradients are only released.
    state_bytes : of the optimizer, between steps.
    """

    is_added: bool = True
    updates: tuple[tuple[str, int], ...] = ()
    state_bytes: int = 0
