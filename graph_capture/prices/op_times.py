"""The times of many ops, each taken a few times, seconds apart.

Other work slows a core for seconds on end. What is measured in one go while it is slow, or while it
is not, is then wrong beside what is measured before or after.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from remat.graph_capture.devices.meter import Meter, Run

Failed = Callable[[str, RuntimeError], None]


def times_us(
    made: Mapping[str, Callable[[], Run]],
    moved_bytes: Mapping[str, int],
    meter: Meter,
    failed: Failed,
    *,
    first: Callable[[str, Run], None] = lambda _, run: run(),
    after: Callable[[int], None] = lambda _: None,
    between: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Median over the meter's passes of the time of each op that runs.

    Parameters
    ----------
    made : makes an op's run, with its inputs, which are let go of after each.
    moved_bytes : of an op's inputs and outputs.
    failed : is told of an op that cannot be run; it is not tried again.
    first : what is done with the first run of an op, which must run it.
    after : called with the number of ops timed so far, over all passes.
    between : called after each pass.
    """
    found: dict[str, list[float]] = {key: [] for key in made}
    for number in range(meter.passes):
        for at, key in enumerate(made):
            if key in found:
                try:
                    run = made[key]()
                    if number == 0:
                        first(key, run)
                    found[key].append(meter.median_us(run, moved_bytes[key]))
                except RuntimeError as error:
                    del found[key]
                    failed(key, error)
            after(number * len(made) + at + 1)
        if between is not None:
            between()
    return {key: statistics.median(each) for key, each in found.items()}
