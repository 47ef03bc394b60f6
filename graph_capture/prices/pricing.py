"""Prices: time and workspace of every op, measured once per distinct op and layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from torch import fx

from remat.graph_capture.devices.device_table import CPU, allocated_on, is_cuda
from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.devices.meter import Meter, Run
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.graph_capture.joint.build import SAVE_RNG, Joint
from remat.graph_capture.joint.nodes import fresh_storages, target_name, tensors_of
from remat.graph_capture.prices.booking import booked
from remat.graph_capture.prices.op_times import times_us
from remat.graph_capture.prices.op_work import moved_bytes
from remat.graph_capture.prices.price_cache import Price, PriceCache, WholeStep
from remat.graph_capture.prices.profile import Profile, note_of, taken
from remat.graph_capture.prices.sample_inputs import price_key, sample_arguments
from remat.graph_capture.prices.step_time import step_rounds, whole_step
from remat.graph_capture.tracing.trace import Counted, Trace
from remat.graph_capture.tracing.true_strides import require_layout

ESTIMATED_BYTES_PER_US = 5_000
SAVE_RNG_KEY = "remat.save_rng_state()"


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
    trace: Trace, *, progress: Counted | None = None, profile: Profile | None = None
) -> TrainingGraph:
    """The trace's graph with measured costs and workspaces.

    Each distinct (op, shapes, strides, dtypes, scalars) is run on made data: once to warm
    up, then 3 to 25 times, on a CPU in three passes over all of them, of whose medians the middle
    one counts; and once under the profiler, whose
    allocation events give the workspace; on a CUDA device, events of its stream and the
    counters of its allocator do (`cuda_meter.py`). Prices are kept on disk. On a CPU the step is
    run as a whole as well, for what it takes beyond its ops (`step_time.py`).

    Parameters
    ----------
    progress : called with (distinct ops priced, distinct ops to price).
    profile : prices that are taken instead, wherever they were measured. Ops that it lacks
        are measured if it is of this machine.

    Raises
    ------
    ProfileError : `profile` is of another machine and lacks ops of the step.
    """
    meter = meter_of(trace.recipe.device)
    cache = PriceCache(meter.title, meter.settings)
    return price_with(trace, meter, cache, progress, profile)[0]


def price_with(
    trace: Trace,
    meter: Meter,
    cache: PriceCache,
    progress: Counted | None = None,
    profile: Profile | None = None,
) -> tuple[TrainingGraph, Prices]:
    """`price` by this `meter`, and its prices; what it measures is added to `cache`."""
    joint, graph = trace.joint, trace.graph
    keys = _keys(joint)
    nodes = _first_nodes(joint, keys)
    known: Mapping[str, Price] = {} if profile is None else taken(nodes, profile, meter)
    rounds = step_rounds(joint, graph, meter, cache, profile)
    between = rounds.some if rounds else None
    told = progress or _silent
    prices = known_or_measured(joint, nodes, meter, cache, known, told, between)
    keys |= {op.name: SAVE_RNG_KEY for op in graph.ops if op.target == SAVE_RNG}
    of_op = {name: prices[key] for name, key in keys.items()}
    priced = msgspec.structs.replace(
        graph,
        ops=tuple(_priced(op, of_op.get(op.name)) for op in graph.ops),
        values=_values_as_allocated(joint, of_op),
        resident=msgspec.structs.replace(graph.resident, libraries_bytes=meter.library_bytes()),
        prices="measured",
        versions={
            **graph.versions,
            **meter.versions,
            "priced_on": profile.title if profile else meter.title,
        },
        notes=() if profile is None else (note_of(profile),),
    )
    step = whole_step(priced, cache, rounds, profile)
    return priced if step is None else booked(priced, step), Prices(prices, step)


def _keys(joint: Joint) -> dict[str, str]:
    """What determines the price of each op that has a node."""
    return {name: price_key(node) for name, node in joint.node_of_op.items()}


def examples(joint: Joint) -> dict[str, fx.Node]:
    """The first node of each key."""
    return _first_nodes(joint, _keys(joint))


def _first_nodes(joint: Joint, keys: dict[str, str]) -> dict[str, fx.Node]:
    return {keys[name]: node for name, node in reversed(joint.node_of_op.items())}


def known_or_measured(
    joint: Joint,
    nodes: dict[str, fx.Node],
    meter: Meter,
    cache: PriceCache,
    known: Mapping[str, Price],
    progress: Counted,
    between: Callable[[], None] | None,
) -> dict[str, Price]:
    """Prices of `nodes` and of saving a random state: those `known`, else kept, else measured.

    `between` is called after each pass over the ops that are measured.
    """
    wanted = (*nodes, SAVE_RNG_KEY)
    missing = {key for key in wanted if key not in known and key not in cache.prices}
    if missing:
        new = {key: node for key, node in nodes.items() if key in missing}
        with meter.quiet():
            cache.prices.update(_measured(joint, new, meter, progress, between))
        cache.save()
    return {key: known[key] if key in known else cache.prices[key] for key in wanted}


def _values_as_allocated(joint: Joint, prices: dict[str, Price]) -> tuple[Value, ...]:
    """The values as the device's allocator rounds them.

    The first result of each op is enlarged by what the op was seen to keep. What a step on a CUDA
    device has on the host takes nothing there.
    """
    graph = joint.graph
    allocated = allocated_on(graph.device)
    host = _on_the_host(joint) if is_cuda(graph.device) else frozenset()
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


def _silent(done: int, total: int) -> None:
    pass


def _priced(op: Op, price: Price | None) -> Op:
    if price is None:
        return op
    return msgspec.structs.replace(
        op,
        cost_us=price.cost_us,
        price="estimated" if price.is_estimate else "measured",
        workspace_bytes=op.workspace_bytes + price.workspace_bytes,
    )


def _measured(
    joint: Joint,
    missing: dict[str, fx.Node],
    meter: Meter,
    progress: Counted,
    between: Callable[[], None] | None,
) -> dict[str, Price]:
    meter.settle()
    meter.rng_state()
    prices = {SAVE_RNG_KEY: Price(meter.median_us(meter.rng_state))}

    def failed(key: str, error: RuntimeError) -> None:
        _refuse_broken_device(missing[key], error)
        prices[key] = _estimated(missing[key], error)

    def first(key: str, run: Run) -> None:
        node = missing[key]
        require_layout(node, run(), lambda: _place(joint, node))

    def after(done: int) -> None:
        if done % meter.passes == 0:
            progress(done // meter.passes, len(missing))

    costs = times_us(
        {key: partial(_runner, joint, node) for key, node in missing.items()},
        {key: moved_bytes(node) for key, node in missing.items()},
        meter, failed, first=first, after=after, between=between,
    )  # fmt: skip
    memory = meter.regions(_runner(joint, missing[key]) for key in costs)
    for (key, cost_us), found in zip(costs.items(), memory, strict=True):
        traced_bytes = sum(fresh_storages(missing[key]))
        kept_bytes = max(0, found.final_bytes - traced_bytes)
        workspace_bytes = max(0, found.peak_bytes - traced_bytes - kept_bytes)
        workspace_bytes = allocated_on(meter.device)(workspace_bytes)
        prices[key] = Price(cost_us, workspace_bytes, kept_bytes)
    return prices


def _refuse_broken_device(node: fx.Node, error: RuntimeError) -> None:
    """A CUDA device that an op has failed on runs no other op in this process."""
    if "device-side assert" in str(error) or "illegal memory access" in str(error):
        raise CaptureError(
            f"{target_name(node)} cannot run on made data and has left the CUDA device unusable in "
            f"this process ({str(error).splitlines()[0]}). Start again, and plan for a model of "
            "the device by name, such as device='h100'"
        ) from error


def _estimated(node: fx.Node, error: RuntimeError) -> Price:
    """A stated guess for an op that does not run on made data: the time to move its bytes."""
    warnings.warn(
        f"{target_name(node)} cannot be timed on made data ({str(error).splitlines()[0]}); "
        "its price is an estimate from the bytes it moves, without workspace",
        stacklevel=2,
    )
    return Price(moved_bytes(node) / ESTIMATED_BYTES_PER_US, is_estimate=True)


def _runner(joint: Joint, node: fx.Node) -> Callable[[], Any]:
    args, kwargs = sample_arguments(node, joint.module)
    target = node.target
    assert callable(target)

    def run() -> Any:
        return target(*args, **kwargs)

    return run


def _place(joint: Joint, node: fx.Node) -> str:
    """Where the op stands in the user's code."""
    name = next(name for name, other in joint.node_of_op.items() if other is node)
    op = joint.graph.ops[joint.graph.op_index[name]]
    return " ".join(part for part in (op.module and f"of module {op.module}", op.source) if part)
