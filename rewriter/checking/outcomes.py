"""Outcomes of a step, compared bit for bit, or to a tolerance.

On a CUDA device eager is compared with itself first: sums in no fixed order differ in eager too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from remat.graph_capture.joint.tensor_bits import bits_of

Outcome = Mapping[str, Any]
"""What a step leaves, by name: outputs, gradients, buffers, random streams."""

TIMES = 10.0
"""Where eager does not repeat itself, a result may be this many times as far from its first run as
its second run is. Both distances are rounding errors; a wrong gradient is off by far more."""


TOLERANCE = 0.01
"""For compiled steps: how far a result may be from eager's, as a part of its norm. Kernels that are
fused otherwise round otherwise, and batch norm makes that as large as 1e-3. A wrong gradient, such
as that of another dropout mask, is off by its own size."""
LEAST_PART = 1e-3
"""A result counts as at least this part of the norm of all results of its kind. Smaller ones are
made of rounding errors, such as the gradient of a bias before a batch norm."""
ROUNDINGS = 16
"""A result of a type with few bits may always be off by this many units in the last place."""
MOST_ROUNDING = ROUNDINGS * torch.finfo(torch.bfloat16).eps
"""A result that is larger than noise may be off by no more than this part, 0.125, however far
rounding moves it. That of another dropout mask is off by more, from one element in a hundred on."""


class Repeats:
    """How far runs of eager from the same state are from the first of them.

    Parameters
    ----------
    expected : of the first run.

    Attributes
    ----------
    noise : by the name of each tensor that another run gave otherwise, the largest distance of an
        element; 0 where there is none to take.
    """

    def __init__(self, expected: Outcome) -> None:
        self.expected = expected
        self.noise: dict[str, float] = {}

    def add(self, again: Outcome) -> None:
        """Take in what another run gave."""
        for name in not_repeated(self.expected, again):
            noise = distance(self.expected[name], again.get(name))
            self.noise[name] = max(self.noise.get(name, 0.0), 0.0 if math.isnan(noise) else noise)


def compared(repeats: Repeats, found: Outcome) -> tuple[str, ...]:
    """Names of what differs from the first run of eager.

    What eager does not repeat differs if it is further off than `TIMES` what runs of eager are.

    Parameters
    ----------
    found : of the rewritten step.
    """
    expected, noise = repeats.expected, repeats.noise
    differing = [name for name in expected if not same(expected[name], found.get(name))]
    return tuple(
        name
        for name in differing
        if not distance(expected[name], found.get(name)) <= TIMES * noise.get(name, -math.inf)
    )


def not_repeated(expected: Outcome, again: Outcome) -> tuple[str, ...]:
    """Names of tensors that two runs of eager, from the same state, do not give alike."""
    changing = [name for name in expected if not same(expected[name], again.get(name))]
    return tuple(name for name in changing if isinstance(expected[name], Tensor))


def distance(expected: Any, found: Any) -> float:
    """The largest difference between elements; NaN where there is none to take."""
    if not _has_error(expected, found):
        return float("nan")
    return float((found.double() - expected.double()).abs().max())


def compared_nearly(
    expected: Outcome,
    found: Outcome,
    tolerance: float,
    moved: Mapping[str, float] | None = None,
) -> tuple[tuple[str, ...], float]:
    """Names of what is further off than `tolerance`, and the largest relative error.

    What is no tensor of floating-point numbers, such as a random stream, has to be equal.

    Parameters
    ----------
    moved : how far rounding alone moves results. They may be off by `TIMES` that, up to
        `MOST_ROUNDING`. One that is not larger than `TIMES` that is noise, and may be off by the
        tolerance of all results of its kind together.
    """
    errors: dict[str, float] = {}
    wrong: list[str] = []
    for name, like in expected.items():
        if not _has_error(like, found.get(name)):
            wrong += [] if same(like, found.get(name)) else [name]
            continue
        rounding = TIMES * (moved or {}).get(name, 0.0)
        size, least = _size(expected, name, rounding), _least(like, rounding) if tolerance else 0.0
        errors[name] = _norm(found[name].double() - like.double()) / size if size else 0.0
        if not errors[name] <= max(tolerance, least):
            wrong.append(name)
    return tuple(wrong), max(errors.values(), default=0.0)


def _size(expected: Outcome, name: str, rounding: float) -> float:
    """What an error is a part of: the result's norm, or that of all, if it is no more than noise.

    Noise sums up to other noise in other code, most where many roundings go one way. So only its
    part in all results of its kind says whether it matters.
    """
    norm, of_all = _norm(expected[name]), _norm_of_kind(expected, name)
    return of_all if 0 < norm <= rounding else max(norm, LEAST_PART * of_all)


def _least(like: Tensor, rounding: float) -> float:
    """The part of its size that a result may be off by in any case."""
    own, norm = ROUNDINGS * torch.finfo(like.dtype).eps, _norm(like)
    return max(own, min(MOST_ROUNDING, rounding / norm)) if norm > rounding else own


def _has_error(expected: Any, found: Any) -> bool:
    """Whether the two differ by an amount. Equal ones do not, even where they are infinite."""
    return (
        isinstance(expected, Tensor)
        and isinstance(found, Tensor)
        and expected.is_floating_point()
        and (expected.dtype, expected.shape) == (found.dtype, found.shape)
        and not same(expected, found)
    )


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())


def _norm_of_kind(outcome: Outcome, name: str) -> float:
    """Norm of all gradients together, or of all outputs, or of all buffers."""
    kind = name.split()[0]
    alike = [t for other, t in outcome.items() if other.split()[0] == kind]
    return sum(_norm(t) ** 2 for t in alike if isinstance(t, Tensor)) ** 0.5


def same(expected: Any, found: Any) -> bool:
    """Whether two results have the same bits; a NaN equals a NaN of the same bits."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return False
        return torch.equal(expected, found) or torch.equal(bits_of(expected), bits_of(found))
    return expected is found or bool(expected == found)
