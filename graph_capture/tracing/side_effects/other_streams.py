"""Random numbers that forward draws from other streams than torch's own: seen, and refused.

A trace holds what was drawn while it was made. Torch's default stream is part of the plan; numbers
of `random` and NumPy, and a seed that forward sets, would be the same at each step.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, cast

import numpy as np
import torch

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.provenance import is_users, line_of_user, source_of

_NUMPY = "numpy.random"
_PYTHON = "random"
_SEEDS = ("manual_seed", "seed", "set_rng_state")
"""Functions of torch and of `torch.random` that put its generator elsewhere."""


def streams() -> dict[str, Any]:
    """Where each stream that a trace should not move stands now."""
    _, keys, *rest = cast("tuple[str, np.ndarray, int, int, float]", np.random.get_state())
    return {
        _PYTHON: random.getstate(),
        _NUMPY: (keys.tobytes(), *rest),
    }


def require_unmoved(kind: str, before: dict[str, Any], again: Callable[[], Any]) -> None:
    """Refuse a forward that has moved a stream since `before`.

    Parameters
    ----------
    again : runs forward once more, to find the line that draws.

    Raises
    ------
    CaptureError : names the stream and the line.
    """
    now = streams()
    moved = next((name for name in before if now[name] != before[name]), None)
    if moved is None:
        return
    line = _line_that_draws(again, moved)
    place = f" ({line})" if line else ""
    raise CaptureError(
        f"forward of {kind} draws from {moved}{place}, and a plan would have the same numbers at "
        "each step. Draw with torch (torch.rand, torch.randint) and use the tensor without "
        ".item(); or draw outside forward and pass the number as an argument, where "
        "remat.plan_cache makes a plan for each value"
    )


def _line_that_draws(run: Callable[[], Any], moved: str) -> str:
    """``file:line`` of the user's after which a stream first stands elsewhere while `run` runs."""
    before, found, last = streams()[moved], list[str](), [""]

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        if not is_users(frame) or found:
            return None
        if event in ("line", "return"):
            if streams()[moved] != before:
                found.append(last[0])
                return None
            last[0] = source_of(frame)
        return look

    tracing = sys.gettrace()
    sys.settrace(look)
    try:
        # Whatever this run raises, the refusal that follows says more.
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.settrace(tracing)
    return found[0] if found else ""


@contextlib.contextmanager
def no_seed(kind: str) -> Generator[None]:
    """Refuse functions of torch that put its generator elsewhere, while forward runs.

    Raises
    ------
    CaptureError : forward calls one; names the line.
    """

    def refused(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise CaptureError(
                f"forward of {kind} calls torch.{name}{line_of_user()}, and a step of a plan "
                "draws from the stream as it stands. Call it outside forward, before the step"
            )

        return refuse

    places = [(module, name) for module in (torch, torch.random) for name in _SEEDS]
    before = [(module, name, getattr(module, name)) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, refused(name))
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
