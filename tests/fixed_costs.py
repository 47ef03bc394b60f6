"""Costs that no clock decides: each op takes as long as what it moves says.

Plans of captured models then are the same on every machine, busy or not. Each op still runs, so
that errors and layouts are seen; it runs once, and the step as a whole is not timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from remat.graph_capture.costs import cache, measuring, op_costs
from remat.graph_capture.devices import meter
from remat.graph_capture.devices.links import LinkPair, LinkSpeed
from remat.graph_capture.devices.meter import CpuMeter, Run
from remat.rewriter.inductor.kernel_costs import CallCosts

BYTES_PER_US = 1000.0
STEP_US = 1000.0
LINK = LinkSpeed(gb_s=1.25, both_gb_s=1.0, latency_us=10.0)
ELEMENT_US = 1e-4
"""Of a slow part of a kernel of Inductor's, which would be compiled to be timed."""


def moved_us(meter: CpuMeter, run: Run, moved_bytes: int = 0) -> float:
    """In place of `CpuMeter.median_us`."""
    run()
    return 1.0 + moved_bytes / BYTES_PER_US


def same_us(meter: CpuMeter, run: Run) -> float:
    """In place of `CpuMeter.step_us`."""
    run()
    return STEP_US


def own_file_name(which: str) -> str:
    """In place of `file_name`: processes that tests start may keep clocked costs beside it."""
    return CLOCKED[cache, "file_name"](f"fixed {which}")


def same_pair(device: str, nvme_path: str = "", *, measure_again: bool = False) -> LinkPair:
    """In place of `measured_pair`."""
    return LinkPair(LINK, LINK, nvme_path or "a folder")


REPLACED: dict[tuple[Any, str], Any] = {
    (meter, "PASSES"): 1,
    (CpuMeter, "median_us"): moved_us,
    (CpuMeter, "step_us"): same_us,
    (CpuMeter, "is_quiet"): lambda _: False,
    (measuring, "measured_pair"): same_pair,
    (cache, "file_name"): own_file_name,
    (op_costs, "step_rounds"): lambda *_: None,
    (CallCosts, "bytes_per_us"): lambda _: BYTES_PER_US,
    (CallCosts, "us_per_element"): lambda _, parts: dict.fromkeys(parts, ELEMENT_US),
}
NEVER_QUIET = "is_quiet"
"""No cost is measured again because a clock says so, not even where a test asks for the clock."""
CLOCKED = {(owner, name): getattr(owner, name) for owner, name in REPLACED if name != NEVER_QUIET}


@contextmanager
def patched(values: Mapping[tuple[Any, str], Any]) -> Iterator[pytest.MonkeyPatch]:
    """With these attributes of modules and classes."""
    with pytest.MonkeyPatch.context() as patch:
        for (owner, name), value in values.items():
            patch.setattr(owner, name, value)
        yield patch
