"""How far from eager's the results of a rewritten module may be: by default not at all."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from remat.rewriter.checking.outcomes import TOLERANCE

SPLIT_FLOAT32, SPLIT_HALF = 1e-5, 2e-2
"""For pieces whose sums have another order: how far a result may be from eager's, as a part of its
norm. The first is for steps in float32, the second where 16 bits are in use."""
FLOAT32_BYTES = 4


Rounding = Literal["", "inductor", "pieces"]
"""What rounds otherwise than eager: Inductor's code, pieces that sum in another order; or none."""


def rounding_of(module: nn.Module) -> Rounding:
    """What in a rewritten module rounds otherwise than eager; empty where all bits are eager's."""
    kind: Any = type(module)  # of its own, which holds the plan
    if not hasattr(kind, "_remat_compiled_step"):
        return ""
    if kind._remat_compiled_step.by_inductor:
        return "inductor"
    return "" if all(one.exact for one in kind._remat_schedule.pieces) else "pieces"


def tolerance_of(module: nn.Module) -> float:
    """0 unless Inductor made the module's code, or its pieces sum in another order than eager."""
    rounding, kind = rounding_of(module), type(module)
    if rounding != "pieces":
        return TOLERANCE if rounding else 0.0
    is_half = any(is_on for _, is_on, _ in kind._remat_guards.recipe.autocast)  # pyright: ignore
    is_half |= any(parameter.itemsize < FLOAT32_BYTES for parameter in module.parameters())
    return SPLIT_HALF if is_half else SPLIT_FLOAT32
