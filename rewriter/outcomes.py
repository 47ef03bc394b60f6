"""Outcomes of a step, compared bit for bit; and what eager itself does not repeat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Outcome = dict[str, Any]
"""What a step leaves, by name: outputs, gradients, buffers, random streams."""

TIMES = 10.0
"""How much further than a second run of eager a result may be from the first, where eager does
not repeat itself. Both are draws of one rounding error; a wrong gradient is off by far more."""


def compared(
    expected: Outcome, again: Outcome, found: Outcome
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of what differs, and of what eager does not repeat.

    Parameters
    ----------
    expected, again : of two runs of eager from the same state; the same object where eager is
        known to repeat itself. found : of the rewritten step.
    """
    changing = [name for name in expected if not same(expected[name], again[name])]
    unsteady = tuple(name for name in changing if isinstance(expected[name], Tensor))
    differing = [name for name in expected if not same(expected[name], found[name])]
    wrong = tuple(
        name
        for name in differing
        if name not in unsteady or not _as_near(expected[name], again[name], found[name])
    )
    return wrong, unsteady


def same(expected: Any, found: Any) -> bool:
    """Whether two results have the same bits; NaNs of the same bits are the same."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return False
        return torch.equal(expected, found) or torch.equal(_bits(expected), _bits(found))
    return expected is found or bool(expected == found)


def _as_near(expected: Tensor, again: Tensor, found: Any) -> bool:
    """Whether `found` is about as near to `expected` as another run of eager is."""
    if not isinstance(found, Tensor) or not expected.is_floating_point():
        return False
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    noise, error = (float((t.double() - expected.double()).abs().max()) for t in (again, found))
    return error <= TIMES * noise


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, by which NaNs compare as equal."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
