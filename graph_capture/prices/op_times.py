"""The times of many ops, taken in several passes over all of them.

A core that others share changes its speed by a fifth for seconds on end. Prices taken in one slow
spell cannot be compared with the rest, so each op is timed in several passes, and the middle one of
its times counts. Seen on such a core: the products of an LSTM were priced at 865 us in one go, took
980 a minute later, and 1,060 in the step.
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
    """The time of each op that runs: the median over the meter's passes.

    Parameters
    ----------
    made : makes the run of an op, with its inputs. They are dropped before the next op.
    moved_bytes : of the inputs and outputs of each op.
    failed : called with an op that cannot be run, and the error. The op is not tried again.
    first : called with an op and its run before the op is timed. It must run it.
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
