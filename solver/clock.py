"""The clock of a solve: when it began, and how much of its time limit is left."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from remat.solver.interrupts import is_interrupted


@dataclass(slots=True)
class Clock:
    """Seconds that a solve has taken and has left.

    A clock that is monotonic: setting the machine's time moves no limit.
    """

    time_limit_s: float = 60.0
    began_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the solve began."""
        return time.monotonic() - self.began_s

    @property
    def left_s(self) -> float:
        """Seconds left of the time limit; 0 or less once it is over, or Ctrl-C ended the job."""
        left_s = self.time_limit_s - self.elapsed_s
        return min(left_s, 0.0) if is_interrupted() else left_s

    @contextmanager
    def limited_to(self, time_limit_s: float) -> Generator[None]:
        """Within the block, another time limit, counted from the same beginning."""
        whole_s, self.time_limit_s = self.time_limit_s, time_limit_s
        try:
            yield
        finally:
            self.time_limit_s = whole_s
