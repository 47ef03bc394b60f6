"""The times of many ops, taken in several passes over all of them.

A core that others share changes its speed by a fifth for seconds on end. Prices taken in one slow
spell cannot be compared with the rest, so each op is timed in several passes, and the middle one of
its times counts. Seen on such a core: the products of an LSTM were priced at 865 us in one go, took
980 a minute later, and 1,060 in the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from remat.graph_capture.devices.meter import Meter, Run

Failure = RuntimeError | IndexError | ValueError | MemoryError
"""How kernels refuse made data."""
Failed = Callable[[str, Failure], None]
Times = dict[str, list[float]]
"""Microseconds that each op took, one a pass."""
STALLED = 5.0
"""No slow spell makes an op so many times slower."""
KEEP_S = 2.0
"""Seconds after which times are handed out to be kept, in case the process is ended."""


def times_us(
    made: Mapping[str, Callable[[], Run]],
    moved_bytes: Mapping[str, int],
    meter: Meter,
    failed: Failed,
    *,
    first: Callable[[str, Run], None] = lambda _, run: run(),
    after: Callable[[int], None] = lambda _: None,
    between: Callable[[], None] | None = None,
    begun: Mapping[str, Sequence[float]] | None = None,
    keep: Callable[[Times], None] = lambda _: None,
) -> dict[str, float]:
    """The time of each op that runs: the median over the meter's passes, without stalls.

    Parameters
    ----------
    made : makes the run of an op, with its inputs. They are dropped before the next op.
    moved_bytes : of the inputs and outputs of each op.
    failed : called with an op that cannot be run, and the error. The op is not tried again.
    first : called with an op and its run before the op is timed. It must run it.
    after : called with the number of ops timed so far, over all passes.
    between : called after each pass.
    begun : times that an earlier process took before it was ended: so many are left out here.
    keep : called now and then with all times so far, and where Ctrl-C or an error ends it.
    """
    found: Times = {key: list((begun or {}).get(key, ()))[: meter.passes] for key in made}
    try:
        _take(found, made, moved_bytes, meter, failed, first, after, between, keep)
    except BaseException:
        keep(found)
        raise
    return {key: _middle_us(each) for key, each in found.items()}


def _middle_us(times: Sequence[float]) -> float:
    """The median, unless another pass took a small part of it: then most have met a stall.

    An op that takes longer than a pass may is run once in it, and a stall of the machine makes any
    op such an op. Seen: a mask of 32 x 32 priced at 24,435 us, as two of three passes had one.
    """
    middle, least = statistics.median(times), min(times)
    return least if middle > STALLED * least else middle


def _take(
    found: Times,
    made: Mapping[str, Callable[[], Run]],
    moved_bytes: Mapping[str, int],
    meter: Meter,
    failed: Failed,
    first: Callable[[str, Run], None],
    after: Callable[[int], None],
    between: Callable[[], None] | None,
    keep: Callable[[Times], None],
) -> None:
    """Add to `found` the times of each op until each has one a pass; ops that fail leave it."""
    kept_s = time.monotonic()
    for number in range(meter.passes):
        for at, key in enumerate(made):
            if key in found:
                try:
                    run = made[key]()
                    if number == 0:
                        first(key, run)
                    if len(found[key]) <= number:
                        found[key].append(meter.median_us(run, moved_bytes[key]))
                    del run  # or its inputs would be there beside those of the next
                except (RuntimeError, IndexError, ValueError, MemoryError) as error:
                    del found[key]
                    failed(key, error)
            after(number * len(made) + at + 1)
            if time.monotonic() - kept_s > KEEP_S:
                keep(found)
                kept_s = time.monotonic()
        if between is not None:
            between()
