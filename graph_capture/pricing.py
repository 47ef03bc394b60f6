"""Prices: time and workspace of every op, measured once per distinct op and layout."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import fx

from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.graph_capture.joint import SAVE_RNG, Joint
from remat.graph_capture.memory_events import measure_regions
from remat.graph_capture.node_facts import storage_bytes, storage_key, target_name, tensors_of
from remat.graph_capture.price_cache import Price, PriceCache
from remat.graph_capture.sample_inputs import price_key, sample_arguments
from remat.graph_capture.tracing import Progress, Trace

MIN_RUNS, MAX_RUNS = 3, 25
ENOUGH_S = 0.05
ESTIMATED_BYTES_PER_US = 5_000
SAVE_RNG_KEY = "remat.save_rng_state()"


def price(trace: Trace, *, progress: Progress | None = None) -> TrainingGraph:
    """The trace's graph with measured costs and workspaces.

    Each distinct (op, shapes, strides, dtypes, scalars) is run on made data: once to warm
    up, then 3 to 25 times, of which the median counts; and once under the profiler, whose
    allocation events give the workspace. Prices are kept on disk.

    Parameters
    ----------
    progress : called with (distinct ops priced, distinct ops to price).
    """
    joint = trace.joint
    keys = {name: price_key(node) for name, node in joint.node_of_op.items()}
    example = {keys[name]: node for name, node in reversed(joint.node_of_op.items())}
    cache = PriceCache()
    missing = {key: node for key, node in example.items() if key not in cache.prices}
    if missing or SAVE_RNG_KEY not in cache.prices:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng([]):
            cache.prices.update(_measured(joint, missing, progress or _silent))
        cache.save()
    keys.update({op.name: SAVE_RNG_KEY for op in joint.graph.ops if op.target == SAVE_RNG})
    prices = {name: cache.prices[key] for name, key in keys.items()}
    return msgspec.structs.replace(
        joint.graph,
        ops=tuple(_priced(op, prices.get(op.name)) for op in joint.graph.ops),
        values=_sized(joint.graph, prices),
        prices="measured",
        versions={**joint.graph.versions, "priced_on": cache.device},
    )


def _sized(graph: TrainingGraph, prices: dict[str, Price]) -> tuple[Value, ...]:
    """The values, the first result of each op enlarged by what the op was seen to keep."""
    kept = {
        op.outputs[0]: prices[op.name].kept_bytes
        for op in graph.ops
        if op.name in prices and op.outputs and prices[op.name].kept_bytes
    }
    return tuple(
        msgspec.structs.replace(value, size_bytes=value.size_bytes + kept[value.name])
        if value.name in kept
        else value
        for value in graph.values
    )


def _silent(done: int, total: int) -> None:
    pass


def _priced(op: Op, price: Price | None) -> Op:
    if price is None:
        return op
    return msgspec.structs.replace(
        op,
        cost_us=price.cost_us,
        workspace_bytes=op.workspace_bytes + price.workspace_bytes,
    )


def _measured(joint: Joint, missing: dict[str, fx.Node], progress: Progress) -> dict[str, Price]:
    prices = {SAVE_RNG_KEY: Price(_median_us(torch.get_rng_state), 0)}
    costs: dict[str, float] = {}
    for i, (key, node) in enumerate(missing.items()):
        try:
            costs[key] = _median_us(_runner(joint, node))
        except RuntimeError as error:
            prices[key] = _estimated(node, error)
        progress(i + 1, len(missing))
    memory = measure_regions(_runner(joint, missing[key]) for key in costs)
    for (key, cost_us), found in zip(costs.items(), memory, strict=True):
        traced_bytes = sum(_fresh_storages(missing[key]))
        kept_bytes = max(0, found.final_bytes - traced_bytes)
        workspace_bytes = max(0, found.peak_bytes - traced_bytes - kept_bytes)
        prices[key] = Price(cost_us, workspace_bytes, kept_bytes)
    return prices


def _estimated(node: fx.Node, error: RuntimeError) -> Price:
    """A stated guess for an op that does not run on made data: the time to move its bytes."""
    warnings.warn(
        f"{target_name(node)} cannot be timed on made data ({str(error).splitlines()[0]}); "
        "its price is an estimate from the bytes it moves, without workspace",
        stacklevel=2,
    )
    tensors = [t for n in (*node.all_input_nodes, node) for t in tensors_of(n) if t is not None]
    moved_bytes = sum(t.numel() * t.element_size() for t in tensors)
    return Price(moved_bytes / ESTIMATED_BYTES_PER_US, 0)


def _runner(joint: Joint, node: fx.Node) -> Callable[[], Any]:
    args, kwargs = sample_arguments(node, joint.module)
    target = node.target
    assert callable(target)

    def run() -> Any:
        return target(*args, **kwargs)

    return run


def _median_us(run: Callable[[], Any]) -> float:
    run()
    times: list[float] = []
    while len(times) < MIN_RUNS or (len(times) < MAX_RUNS and sum(times) < ENOUGH_S):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
        del result
    return 1e6 * statistics.median(times)


def _fresh_storages(node: fx.Node) -> Iterator[int]:
    """Sizes of the storages that the node's results have and its inputs have not."""
    seen = {storage_key(t) for a in node.all_input_nodes for t in tensors_of(a) if t is not None}
    for tensor in tensors_of(node):
        if tensor is not None and storage_key(tensor) not in seen:
            seen.add(storage_key(tensor))
            yield storage_bytes(node, tensor)
