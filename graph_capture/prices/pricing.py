"""From a trace to a graph with the prices of a device that is here.

Prices come from a profile, from the cache on disk, or are measured now, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from torch import fx

from remat.graph_capture.devices.device_table import CPU, allocated_on, is_cuda
from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.devices.meter import Meter
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.graph_capture.joint.build import SAVE_RNG, Joint
from remat.graph_capture.joint.nodes import tensors_of
from remat.graph_capture.over_ranks.prices import links_of_step, with_collectives_priced
from remat.graph_capture.prices.booking import booked
from remat.graph_capture.prices.kept_bits import kept_bits
from remat.graph_capture.prices.op_prices import SAVE_RNG_KEY, measured_prices
from remat.graph_capture.prices.pieces import PricedPieces, hoped, with_regions
from remat.graph_capture.prices.price_cache import Price, PriceCache, WholeStep
from remat.graph_capture.prices.profile import Profile, note_of, taken
from remat.graph_capture.prices.sample_inputs import price_key
from remat.graph_capture.prices.step_time import LEFT_OUT, is_beyond, step_rounds, whole_step
from remat.graph_capture.splitting.regions import Found, regions_asked
from remat.graph_capture.tracing.one_trace import Trace
from remat.graph_capture.tracing.trace import Shown


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

    Each distinct (op, shapes, strides, dtypes, scalars) is run on made data (`op_prices.py`).
    On a CPU the step is run as a whole too, for what it takes beyond its ops (`step_time.py`).
    Both are kept on disk (`price_cache.py`).

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
