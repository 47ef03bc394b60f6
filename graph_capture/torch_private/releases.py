"""The releases of torch that plans are carried out with, and the refusal of all others.

A plan stands on private parts of AOTAutograd and Inductor, which change with each release. A
release that the tests have not run with may carry a plan out in another way.
"""

from __future__ import annotations

import importlib.metadata
import re

import torch

from remat.graph_capture.errors import RewriteError

OLDEST, NEWEST = "2.11.0", "2.14.1"
"""The tests run on both (`make test-versions`), and on the one between of `constraints.txt`."""


def requirement() -> str:
    """What pip is asked for: every patch of the minor releases from `OLDEST` to `NEWEST`."""
    (major, oldest), (_, newest) = _minor(OLDEST), _minor(NEWEST)
    return f"torch>={major}.{oldest},<{major}.{newest + 1}"


def refused_release(version: str) -> str:
    """Why a release of torch is refused; empty for one that is not."""
    if _minor(OLDEST) <= _minor(version) <= _minor(NEWEST):
        return ""
    return (
        f"plans are tested with torch {OLDEST} to {NEWEST}, and torch {version} is installed: "
        f'pip install "{requirement()}", or a release of remat that knows this one'
    )


def _minor(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    # A version that cannot be read is refused, as it is before the oldest.
    return (int(found[1]), int(found[2])) if found else (0, 0)


def require_tested_release() -> None:
    reason = refused_release(importlib.metadata.version("torch"))
    if reason:
        raise RewriteError(reason)


def loses_gradients() -> bool:
    """Whether dynamo drops the backward of an `autograd.Function` that writes to its result."""
    # torch 2.11 does, with every backend: `y = x.clone(); y.mul_(3); return y` in its forward.
    return _minor(torch.__version__) < (2, 12)


def holds_tangents() -> bool:
    """Whether torch holds the gradients that a compiled backward is given until it has ended."""
    # Later releases than 2.11 hand them over in a list, from which each goes once it was read.
    return not hasattr(torch.autograd.Function, "boxed_grads_call")
