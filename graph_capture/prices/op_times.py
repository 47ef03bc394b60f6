"""The times of many ops, taken in several passes over all of them.

A core that others share changes its speed by a fifth for seconds on end. Prices taken in one slow
spell cannot be compared with the rest, so each op is timed in several passes, and the least of its
times counts that another pass confirms. An op whose two least times differ is timed in a few more
passes. Seen on such a core: the products of an LSTM were priced at 865 us in one go, took 980 a
minute later, and 1,060 in the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.devices.meter import Meter, Run, have_agreed, least_agreed
from remat.graph_capture.devices.watch import Watch

Failure = RuntimeError | IndexError | ValueError | MemoryError
"""How kernels refuse made data."""
Failed = Callable[[str, Failure], None]
Times = dict[str, list[float]]
"""Microseconds that each op took, one a pass."""
MORE_PASSES = 2
"""Beyond the meter's own, where it has several, for ops whose times do not agree by then."""


class OpTime(NamedTuple):
    """The time of an op, and how much of it went to other programs where that was least."""

    cost_us: float
    away: float


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
) -> dict[str, OpTime]:
    """The time of each op that runs: the least over the passes that another one confirms.

    Parameters
    ----------
    made : makes the run of an op, with its inputs. They are dropped before the next op.
    moved_bytes : of the inputs and outputs of each op.
    failed : called with an op that cannot be run, and the error. The op is not tried again.
    first : called with an op and its run before the op is timed. It must run it.
    after : called with the number of ops timed so far, over all passes.
    between : called after each pass.
    begun : times that an earlier process took before it was ended: so many are left out here. How
        busy the machine was then is not known.
    keep : called now and then with all times so far, and where Ctrl-C or an error ends it.
    """
    found: Times = {key: list((begun or {}).get(key, ()))[: meter.passes] for key in made}
    away = dict[str, float]()
    try:
        _take(found, away, made, moved_bytes, meter, failed, first, after, between, keep)
    except BaseException:
        keep(found)
        raise
    return {key: OpTime(least_agreed(each), away.get(key, 0.0)) for key, each in found.items()}


def _take(
    found: Times,
    away: dict[str, float],
    made: Mapping[str, Callable[[], Run]],
    moved_bytes: Mapping[str, int],
    meter: Meter,
    failed: Failed,
    first: Callable[[str, Run], None],
    after: Callable[[int], None],
    between: Callable[[], None] | None,
    keep: Callable[[Times], None],
) -> None:
    """Add to `found` the times of each op until they agree; ops that fail leave it."""
    kept_s = time.monotonic()
    # While another device runs, this thread waits.
    is_here = meter.device == CPU
    more = MORE_PASSES if meter.passes > 1 else 0
    for number in range(meter.passes + more):
        for at, key in enumerate(made):
            if key in found and not (number >= meter.passes and have_agreed(found[key])):
                try:
                    run = made[key]()
                    if number == 0:
                        first(key, run)
                    if len(found[key]) <= number:
                        watch = Watch()
                        found[key].append(meter.median_us(run, moved_bytes[key]))
                        away[key] = min(away.get(key, 1.0), watch.away) if is_here else 0.0
                    del run  # or its inputs would be there beside those of the next
                except (RuntimeError, IndexError, ValueError, MemoryError) as error:
                    del found[key]
                    failed(key, error)
            if number < meter.passes:
                after(number * len(made) + at + 1)
            if time.monotonic() - kept_s > KEEP_S:
                keep(found)
                kept_s = time.monotonic()
        if between is not None and number < meter.passes:
            between()
