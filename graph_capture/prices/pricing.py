"""From a trace to a graph with the prices of a device that is here.

Prices come from a profile, from the cache on disk, or are measured now, in this order.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from torch import fx

from remat.graph_capture.chunking.regions import (
    AND,
    Found,
    PricedPieces,
    find_regions,
    hoped,
    regions_asked,
    with_regions,
)
from remat.graph_capture.chunking.same_bits import kept_bits
from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.devices.memory import is_out_of_memory
from remat.graph_capture.devices.memory_events import RegionMemory
from remat.graph_capture.devices.meter import Meter, Run
from remat.graph_capture.devices.table import CPU, allocated_on, is_cuda
from remat.graph_capture.distributed.collectives import on_this_rank
from remat.graph_capture.distributed.fake_group import alone
from remat.graph_capture.distributed.prices import links_of_step, with_collectives_priced
from remat.graph_capture.errors import CaptureError, option
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.graph_capture.joint.build import SAVE_RNG, Joint
from remat.graph_capture.joint.nodes import fresh_storages, target_name, tensors_of
from remat.graph_capture.prices.cache import Price, PriceCache, WholeStep
from remat.graph_capture.prices.op_times import Failure, price_key, sample_arguments, times_us
from remat.graph_capture.prices.profile import Profile, moved_bytes, note_of, taken
from remat.graph_capture.prices.step_time import (
    LEFT_OUT,
    booked,
    is_beyond,
    step_rounds,
    whole_step,
)
from remat.graph_capture.tracing.fake_tensors import require_layout
from remat.graph_capture.tracing.trace import Shown, Trace

# The price of each distinct op, measured by running it alone on made data.
#
# The time is that of `op_times.py`, the workspace that of one run under the meter. An op that does
# not run on made data has an estimate in place of both.


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


@dataclass(frozen=True)
class Prices:
    """What a graph was priced with.

    Attributes
    ----------
    of_key : price of each distinct op, by `price_key`. step : None where nobody ran it.
    """

    of_key: Mapping[str, Price]
    step: WholeStep | None


def price(
    trace: Trace,
    *,
    progress: Shown | None = None,
    profile: Profile | None = None,
    measure_again: bool = False,
    most_bytes: int | None = None,
    pieces: bool = True,
) -> TrainingGraph:
    """The trace's graph with measured costs and workspaces.

    Each distinct (op, shapes, strides, dtypes, scalars) is run on made data.
    On a CPU the step is run as a whole too, for what it takes beyond its ops (`step_time.py`).
    Both are kept on disk (`cache.py`).

    Parameters
    ----------
    progress : called with (distinct ops priced, distinct ops to price), and with what is done.
    profile : its prices are taken, whatever machine measured them. Ops that it lacks are
        measured if it is of this machine.
    measure_again : prices and times that are kept on disk are measured anew, and kept instead.
    most_bytes : a budget: the step is not run as a whole where that takes more. An op runs in any
        case, with what it needs itself.
    pieces : left out, the graph has no regions in pieces; `with_priced_pieces` adds them.

    Raises
    ------
    ProfileError : `profile` is of another machine and lacks ops of the step.
    """
    meter = meter_of(trace.recipe.device)
    cache = PriceCache.of(meter)
    if measure_again:
        cache.forget()
    graph = price_with(trace, meter, cache, progress, profile, most_bytes)[0]
    if not pieces:
        return graph
    return with_priced_pieces(trace, graph, progress, measure_again=measure_again)


def with_priced_pieces(
    trace: Trace,
    graph: TrainingGraph,
    progress: Shown | None = None,
    *,
    measure_again: bool = False,
) -> TrainingGraph:
    """`graph`, priced, with the regions that may run in pieces, measured and compared for bits.

    Parameters
    ----------
    progress, measure_again : as of `price`.
    """
    found = regions_asked(trace)
    if not found:
        return graph
    meter = meter_of(trace.recipe.device)
    cache = PriceCache.of(meter)
    if measure_again:
        cache.forget()
    with trace.python_state.streams_kept():
        in_pieces = _measured_pieces(meter, cache, progress or _silent)
        return with_regions(graph, found, in_pieces, kept_bits(meter, cache))


def with_hoped_pieces(trace: Trace, graph: TrainingGraph) -> TrainingGraph:
    """`graph`, priced, with the regions that may run in pieces, as if they cost no more time.

    Nothing is run. No measured region is faster, as pieces do the work of the captured ops.
    """
    in_pieces = hoped(graph, allocated_on(graph.device))
    return with_regions(graph, regions_asked(trace), in_pieces, lambda _: True)


def price_with(
    trace: Trace,
    meter: Meter,
    cache: PriceCache,
    progress: Shown | None = None,
    profile: Profile | None = None,
    most_bytes: int | None = None,
) -> tuple[TrainingGraph, Prices]:
    """`price` by this `meter`, and its prices; what it measures is added to `cache`."""
    with trace.python_state.streams_kept():  # an op that draws from one draws when it is measured
        return _measured(trace, meter, cache, progress or _silent, profile, most_bytes)


def _measured(
    trace: Trace,
    meter: Meter,
    cache: PriceCache,
    told: Shown,
    profile: Profile | None,
    most_bytes: int | None,
) -> tuple[TrainingGraph, Prices]:
    joint, graph = trace.joint, trace.graph
    keys = _keys(joint)
    nodes = _first_nodes(joint, keys)
    known: Mapping[str, Price] = {} if profile is None else taken(nodes, profile, meter)
    rounds = step_rounds(joint, graph, meter, cache, profile, most_bytes)
    between = rounds.some if rounds else None
    prices = known_or_measured(joint, nodes, meter, cache, known, told, between)
    keys |= {op.name: SAVE_RNG_KEY for op in graph.ops if op.target == SAVE_RNG}
    of_op = {name: prices[key] for name, key in keys.items()}
    priced = msgspec.structs.replace(
        graph,
        ops=tuple(_priced(op, of_op.get(op.name)) for op in graph.ops),
        values=values_as_allocated(joint, of_op),
        resident=msgspec.structs.replace(graph.resident, libraries_bytes=meter.library_bytes()),
        prices="measured",
        versions={
            **graph.versions,
            **meter.versions,
            "priced_on": profile.title if profile else meter.title,
        },
        notes=() if profile is None else (note_of(profile),),
    )
    if rounds:
        told(text="timing whole steps")
    step = whole_step(joint, priced, cache, rounds, profile)
    if step is not None:
        priced = booked(priced, step)
    elif is_beyond(joint, graph, most_bytes):
        priced = msgspec.structs.replace(priced, notes=(*priced.notes, LEFT_OUT))
    # After that, as the step is run with the stand-ins of collectives, at what these take.
    links = links_of_step(trace.recipe.device, meter.title, profile)
    priced = with_collectives_priced(priced, joint.node_of_op, links)
    return priced, Prices(prices, step)


def doubt_prices(trace: Trace) -> None:
    """Have the ops of a trace, and its whole step, measured again at the next quiet moment."""
    meter = meter_of(trace.recipe.device)
    PriceCache.of(meter).doubt(examples(trace.joint), trace.joint.timed_hash)


def _measured_pieces(meter: Meter, cache: PriceCache, told: Shown) -> PricedPieces:
    """Measured prices of the ops that run in pieces."""

    def priced(found: Found) -> tuple[Mapping[str, Op], tuple[Value, ...]]:
        own_nodes = [node for _, node in found.by_node()]
        keys = {node.name: price_key(node) for node in own_nodes}
        nodes = {keys[node.name]: node for node in own_nodes}
        prices = known_or_measured(found.joint, nodes, meter, cache, {}, told, None)
        of_op = {name: prices[key] for name, key in keys.items()}
        ops = {op.name: op for op in found.joint.graph.ops}
        own = {name: _priced(ops[name], one) for name, one in of_op.items()}
        return own, values_as_allocated(found.joint, of_op)

    return priced


def _keys(joint: Joint) -> dict[str, str]:
    """The `price_key` of each op that has a node."""
    return {name: price_key(node) for name, node in joint.node_of_op.items()}


def examples(joint: Joint) -> dict[str, fx.Node]:
    """The first node of each key."""
    return _first_nodes(joint, _keys(joint))


def _first_nodes(joint: Joint, keys: dict[str, str]) -> dict[str, fx.Node]:
    # Reversed, so that of equal keys the first node is the one that stays.
    return {keys[name]: node for name, node in reversed(joint.node_of_op.items())}


def known_or_measured(
    joint: Joint,
    nodes: dict[str, fx.Node],
    meter: Meter,
    cache: PriceCache,
    known: Mapping[str, Price],
    progress: Shown,
    between: Callable[[], None] | None,
) -> dict[str, Price]:
    """Prices of `nodes` and of saving a random state: those `known`, else kept, else measured.

    `between` is called after each pass over the ops that are measured.
    """
    wanted = (*nodes, SAVE_RNG_KEY)
    missing = {key for key in wanted if key not in known} - cache.settled(wanted, meter)
    found: dict[str, Price] = {}
    if missing:
        new = {key: node for key, node in nodes.items() if key in missing}
        with meter.quiet():
            found, no_room = measured_prices(joint, new, meter, progress, between, cache)
        # What had no room is not kept, as another time there may be room to run it.
        cache.keep_prices({key: one for key, one in found.items() if key not in no_room})
    # What another process has saved meanwhile stays, and takes the place of what was found.
    every = {**found, **cache.prices, **known}
    return {key: every[key] for key in wanted}


def values_as_allocated(joint: Joint, prices: dict[str, Price]) -> tuple[Value, ...]:
    """The values with the bytes that the device's allocator gives them.

    What a step on a CUDA device has on the host takes nothing on the device.
    """
    graph = joint.graph
    allocated = allocated_on(graph.device)
    host = _on_the_host(joint) if is_cuda(graph.device) else frozenset()
    # Some results are larger than a trace says: mse_loss returns a scalar in the storage of all
    # its terms. So the first result of an op grows by what the op was seen to keep. A graph's hash
    # covers shapes and not sizes for this reason.
    kept = {
        op.outputs[0]: prices[op.name].kept_bytes
        for op in graph.ops
        if op.name in prices and op.outputs
    }

    def size_bytes(value: Value) -> int:
        return allocated(value.size_bytes + kept.get(value.name, 0))

    return tuple(
        msgspec.structs.replace(value, size_bytes=0 if value.name in host else size_bytes(value))
        for value in graph.values
    )


def _on_the_host(joint: Joint) -> frozenset[str]:
    """Values whose tensors are on the CPU."""
    bases = ((name, tensors_of(node)[0]) for name, node in joint.base_of_value.items())
    return frozenset(name for name, t in bases if t is not None and t.device.type == CPU)


def _silent(done: int = 0, total: int | None = None, *, text: str = "") -> None:
    pass


def _priced(op: Op, price: Price | None) -> Op:
    if price is None:  # the arrival of tangents and new statistics are no ops of torch
        return op
    return msgspec.structs.replace(
        op,
        cost_us=price.cost_us,
        price="estimated" if price.is_estimate else "measured",
        workspace_bytes=op.workspace_bytes + price.workspace_bytes,
    )


# What ops take in bytes, without their times: one run each.


def measured_workspaces(trace: Trace, names: Collection[str]) -> dict[str, int]:
    """Bytes that each named op takes beyond its results while it runs, on the trace's device.

    Ops that do not run on made data are left out.
    """
    meter = meter_of(trace.recipe.device)
    nodes = {name: node for name in names if (node := trace.joint.node_of_op.get(name))}
    own = {op.name: op.workspace_bytes for op in trace.graph.ops}
    keys = {name: price_key(node) for name, node in nodes.items()}
    distinct = {key: nodes[name] for name, key in keys.items()}
    allocated = allocated_on(meter.device)
    with trace.python_state.streams_kept():
        regions = _regions(trace.joint, distinct, meter)
    found = {key: allocated(workspace_of(distinct[key], one)) for key, one in regions.items()}
    return {name: own[name] + found[key] for name, key in keys.items() if key in found}


class Sized:
    """The graph of a trace with the bytes that its ops take, and without times.

    Those of ops that are priced already are taken; the others run once. So a schedule is judged at
    the sizes of a batch for which nothing was priced.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace, self._meter = trace, meter_of(trace.recipe.device)
        self._cache = PriceCache.of(self._meter)
        with trace.python_state.streams_kept():
            self.graph = self._of_ops(trace.joint)
            resident = self.graph.resident
        library_bytes = self._meter.library_bytes()
        resident = msgspec.structs.replace(resident, libraries_bytes=library_bytes)
        self.graph = msgspec.structs.replace(self.graph, resident=resident)

    def with_region(self, region: str, pieces: int, *, is_exact: bool) -> TrainingGraph:
        """The graph with a region that may run in so many pieces.

        It has none where the step has other parts, or where these pieces give other bits than
        eager and `is_exact` asks for those.
        """
        has_them = kept_bits(self._meter, self._cache)

        def of_pieces(found: Found) -> tuple[dict[str, Op], tuple[Value, ...]]:
            graph = self._of_ops(found.joint)
            own = {node.name for _, node in found.by_node()}
            return {op.name: op for op in graph.ops if op.name in own}, graph.values

        with self._trace.python_state.streams_kept():
            return with_regions(
                self.graph, find_regions(self._trace, is_exact, region.split(AND)), of_pieces,
                lambda found: found.pieces == pieces and has_them(found),
            )  # fmt: skip

    def _of_ops(self, joint: Joint) -> TrainingGraph:
        keys = {name: price_key(node) for name, node in joint.node_of_op.items()}
        nodes = {keys[name]: node for name, node in joint.node_of_op.items()}
        known = self._cache.prices
        new = {key: node for key, node in nodes.items() if key not in known}
        found = {key: self._taken(new[key], one) for key, one in self._regions(joint, new).items()}
        every = {**found, **{key: known[key] for key in nodes if key in known}}
        of_op = {name: every[key] for name, key in keys.items() if key in every}
        ops = (
            msgspec.structs.replace(op, workspace_bytes=op.workspace_bytes + one.workspace_bytes)
            if (one := of_op.get(op.name))
            else op
            for op in joint.graph.ops
        )
        values = values_as_allocated(joint, of_op)
        return msgspec.structs.replace(joint.graph, ops=tuple(ops), values=values)

    def _regions(self, joint: Joint, nodes: Mapping[str, fx.Node]) -> dict[str, RegionMemory]:
        return _regions(joint, nodes, self._meter) if nodes else {}

    def _taken(self, node: fx.Node, region: RegionMemory) -> Price:
        kept_bytes = max(0, region.final_bytes - sum(fresh_storages(node)))
        return Price(0.0, allocated_on(self._meter.device)(workspace_of(node, region)), kept_bytes)


def _regions(joint: Joint, nodes: Mapping[str, fx.Node], meter: Meter) -> dict[str, RegionMemory]:
    """What each op allocates in a run, by its key, without those that do not run on made data."""
    ran: list[str] = []
    with meter.quiet():
        regions = meter.regions(_warm(joint, nodes, ran))
    return dict(zip(ran, regions, strict=True))


def _warm(
    joint: Joint, nodes: Mapping[str, fx.Node], ran: list[str]
) -> Iterator[Callable[[], Any]]:
    """Runs of ops that have run once: what libraries allocate at first use is then no op's.

    The keys of those that run are added to `ran`.
    """
    for key, node in nodes.items():
        try:
            run = runner_of(joint, node)
            alone(run)
        except (RuntimeError, IndexError, ValueError, MemoryError):
            continue
        ran.append(key)
        yield run
