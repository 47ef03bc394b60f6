"""What is asked of the job, and how its stages are timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from remat.graph_capture.derived.sharding import NO_SHARDING, Sharding
from remat.graph_capture.devices.device_table import CPU, is_in_table
from remat.graph_capture.graph import Optimizer

if TYPE_CHECKING:
    from remat.graph_capture.prices.profile import Profile


class Shown(Protocol):
    """Told how far a stage is, in parts of a total or in words."""

    def __call__(self, done: int = 0, total: int | None = None, *, text: str = "") -> None:
        """Show it."""
        ...


class Stopwatch:
    """Names and times the stages of a job. The command line's subclass shows them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, text: str) -> Generator[Shown]:
        """Time what runs inside under `name`; `text` is for the person who waits."""
        start = time.perf_counter()
        try:
            with self.show(text) as progress:
                yield progress
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def show(self, text: str) -> Generator[Shown]:
        """Show `text` while the stage runs; the base class shows nothing."""
        del text
        yield _silent


def _silent(done: int = 0, total: int | None = None, *, text: str = "") -> None:
    del done, total, text


@dataclass(frozen=True)
class Request:
    """What to plan for, how long to try, and whether to check even what may not fit in memory."""

    budget: str
    solver: str = "auto"
    time_limit_s: float = 60.0
    optimizer: Optimizer = "none"
    accumulate: bool = False
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    order: str = "fixed"
    device: str = CPU
    profile: Profile | None = None
    sharding: Sharding = NO_SHARDING
    check: bool = False

    @property
    def is_run_here(self) -> bool:
        """Whether the plan is one of the very step that can run on this machine, alone."""
        return not is_in_table(self.device) and self.sharding == NO_SHARDING
