"""How long something took of this thread's time, and how much of that others had the core.

A thread that computes takes as much of a core as passes on the clock, unless others are given the
core: it is then switched off without having asked for it. Time that it waits of its own accord, for
threads that work for it, is time that the work takes.
"""

from __future__ import annotations

import sys
import time

if sys.platform == "linux":
    import resource

    def _switches() -> tuple[int, int]:
        """How often this thread was switched off by others, and how often it waited."""
        used = resource.getrusage(resource.RUSAGE_THREAD)
        return used.ru_nivcsw, used.ru_nvcsw

else:

    def _switches() -> tuple[int, int]:
        """Not known: then no time counts as that of others."""
        return 0, 0


class Watch:
    """Started as it is made."""

    def __init__(self) -> None:
        self._switches = _switches()
        self._wall_s, self._own_s = time.perf_counter(), time.thread_time()

    def _spans(self) -> tuple[float, float, int, int]:
        """Seconds on the clock and of this thread, and switches by others and of its own accord."""
        wall_s, own_s = time.perf_counter() - self._wall_s, time.thread_time() - self._own_s
        (others, own), (others_before, own_before) = _switches(), self._switches
        return wall_s, min(own_s, wall_s), others - others_before, own - own_before

    @property
    def taken_us(self) -> float:
        """The time since the start, without what others had, where the two can be told apart."""
        wall_s, own_s, by_others, by_itself = self._spans()
        return 1e6 * (own_s if by_others and not by_itself else wall_s)

    @property
    def away(self) -> float:
        """The part of the time since the start in which others may have had the core."""
        wall_s, own_s, by_others, _ = self._spans()
        return 1 - own_s / wall_s if by_others and wall_s > 0 else 0.0
