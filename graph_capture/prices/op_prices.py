"""The price of each distinct op, measured by running it alone on made data.

The time is that of `op_times.py`, the workspace that of one run under the meter. An op that does
not run on made data has an estimate in place of both.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from torch import fx

from remat.graph_capture.devices.device_table import allocated_on
from remat.graph_capture.devices.free_memory import is_out_of_memory
from remat.graph_capture.devices.meter import Meter, Run
from remat.graph_capture.errors import CaptureError, option
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import fresh_storages, target_name
from remat.graph_capture.memory_events import RegionMemory
from remat.graph_capture.over_ranks.alone import alone
from remat.graph_capture.over_ranks.collectives import on_this_rank
from remat.graph_capture.prices.op_times import Failure, times_us
from remat.graph_capture.prices.op_work import moved_bytes
from remat.graph_capture.prices.price_cache import Price, PriceCache
from remat.graph_capture.prices.sample_inputs import sample_arguments
from remat.graph_capture.tracing.trace import Shown
from remat.graph_capture.tracing.true_strides import require_layout

ESTIMATED_BYTES_PER_US = 5_000
"""A guess, for ops that do not run on made data."""
SAVE_RNG_KEY = "remat.save_rng_state()"
"""Stands for a `price_key`, as saving a random state is no op of torch."""


def measured_prices(
    joint: Joint,
    missing: dict[str, fx.Node],
    meter: Meter,
    progress: Shown,
    between: Callable[[], None] | None,
    cache: PriceCache,
) -> tuple[dict[str, Price], frozenset[str]]:
    """Prices of the `missing` ops and of saving a random state, and which ops had no room to run.

    Parameters
    ----------
    missing : a node of each distinct op, by its key.
    progress : called with (ops priced, ops to price, and what they are called).
    between : called after each pass over the ops.
    cache : keeps times meanwhile, and has those that a process took that was ended.

    Raises
    ------
    CaptureError : memory ran out that ops had when they were timed.
    """
    meter.settle()
    meter.rng_state()
    prices = {SAVE_RNG_KEY: Price(meter.median_us(meter.rng_state))}

    no_room: set[str] = set()

    def failed(key: str, error: Failure) -> None:
        _refuse_broken_device(missing[key], error)
        if is_out_of_memory(error):
            no_room.add(key)
        prices[key] = _estimated(missing[key], error)

    # The first run also shows whether the trace has the strides that the kernel gives.
    def first(key: str, run: Run) -> None:
        node = missing[key]
        require_layout(node, alone(run), lambda: _place(joint, node))

    def after(done: int) -> None:
        if done % meter.passes == 0:
            progress(done // meter.passes, len(missing))

    progress(0, len(missing), text=f"timing {len(missing)} kinds of op")

    costs = times_us(
        {key: partial(runner_of, joint, node) for key, node in missing.items()},
        {key: moved_bytes(node) for key, node in missing.items()},
        meter, failed, first=first, after=after, between=between,
        begun=cache.begun, keep=cache.keep_begun,
    )  # fmt: skip
    # Memory comes last: what libraries allocate at their first use is then no op's.
    with _said_if_short():
        memory = meter.regions(runner_of(joint, missing[key]) for key in costs)
    for (key, (cost_us, away)), found in zip(costs.items(), memory, strict=True):
        kept_bytes = max(0, found.final_bytes - sum(fresh_storages(missing[key])))
        workspace_bytes = allocated_on(meter.device)(workspace_of(missing[key], found))
        prices[key] = Price(cost_us, workspace_bytes, kept_bytes, away=away)
    return prices, frozenset(no_room)


@contextlib.contextmanager
def _said_if_short() -> Generator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CaptureError(
            "memory ran out while the ops were measured: free some, take a smaller batch, or plan "
            f"with prices that are known ({option('profile')}, or a device of the table, "
            f"{option('device', 'h100')})"
        ) from error


def _refuse_broken_device(node: fx.Node, error: Exception) -> None:
    """Raise `CaptureError` where `error` says that the device runs no other op in this process."""
    if "device-side assert" in str(error) or "illegal memory access" in str(error):
        raise CaptureError(
            f"{target_name(node)} cannot run on made data and has left the CUDA device unusable in "
            f"this process ({str(error).splitlines()[0]}). Start again, and plan for a model of "
            f"the device by name, such as {option('device', 'h100')}"
        ) from error


def _estimated(node: fx.Node, error: Failure) -> Price:
    """The time to move the bytes of an op that does not run on made data; warns."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    why = "cannot be timed on made data"
    if is_out_of_memory(error):
        why = "was not run: memory ran out"
    warnings.warn(
        f"{target_name(node)} {why} ({said}); "
        "its price is an estimate from the bytes it moves, without workspace",
        stacklevel=2,
    )
    return Price(moved_bytes(node) / ESTIMATED_BYTES_PER_US, is_estimate=True)


def workspace_of(node: fx.Node, region: RegionMemory) -> int:
    """Bytes of a region that ran `node`, beyond what it has made by then."""
    kept_bytes = max(sum(fresh_storages(node)), region.final_bytes)
    return max(0, region.peak_bytes - kept_bytes)


def runner_of(joint: Joint, node: fx.Node) -> Callable[[], Any]:
    """A run of an op on made data, alone on its rank."""
    args, kwargs = sample_arguments(node, joint.module)
    target = on_this_rank(node)

    def run() -> Any:
        return target(*args, **kwargs)

    return run


def _place(joint: Joint, node: fx.Node) -> str:
    """Where the op stands in the user's code."""
    name = next(name for name, other in joint.node_of_op.items() if other is node)
    op = joint.graph.ops[joint.graph.op_index[name]]
    return " ".join(part for part in (op.module and f"of module {op.module}", op.source) if part)
