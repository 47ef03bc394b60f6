"""The releases of torch that plans are carried out with, and the refusal of all others.

A plan stands on private parts of AOTAutograd and Inductor, which change with each release. A
release that the tests have not run with may carry a plan out in another way.
"""

from __future__ import annotations

import importlib.metadata
import re

from remat.graph_capture.errors import RewriteError

OLDEST, NEWEST = (2, 11), (2, 14)
"""Both are tested, and so is what lies between."""


def refused_release(version: str) -> str:
    """Why a release of torch is refused; empty for one that is not."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return ""
    oldest, newest, above = (
        ".".join(map(str, release)) for release in (OLDEST, NEWEST, (NEWEST[0], NEWEST[1] + 1))
    )
    return (
        f"plans are tested with torch {oldest} to {newest}, and torch {version} is installed: "
        f'pip install "torch>={oldest},<{above}", or a release of remat that knows this one'
    )


def require_tested_release() -> None:
    """Raise `RewriteError` under a release of torch that is not tested."""
    reason = refused_release(importlib.metadata.version("torch"))
    if reason:
        raise RewriteError(reason)
