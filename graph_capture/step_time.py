"""What a step takes beyond its ops, priced one by one.

What is computed again runs right before it is read, and its inputs are often at hand: the price of
an op alone is right for that. In a step the same op finds less in the caches, and there is work
between ops, so that the sum of prices is too low for a step, by a tenth or two on a CPU. The whole
step is therefore run on made data where it fits into memory, and what it takes beyond its ops is
booked on the one op that every schedule runs exactly once and that costs nothing itself: the
arrival of the tangents. So is what keeping results for backward takes, as far as computing them
again saves it (`keeping_time.py`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, fx

from remat.graph_capture.device_table import CPU
from remat.graph_capture.free_memory import free_bytes
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.graph_copy import copy_of
from remat.graph_capture.joint import TANGENTS, Joint
from remat.graph_capture.keeping_time import SAVED, keeping_us, less_for_kept
from remat.graph_capture.meter import Meter
from remat.graph_capture.price_cache import Price, PriceCache
from remat.graph_capture.profile_file import Profile, WholeStep

STEP_KEY, KEEPING_KEY = "remat.step", "remat.keeping"
LEAST_RUNS, RUNS, ENOUGH_US = 2, 5, 1e6
"""Runs are fewer the longer they are; the shortest counts, as other work may come between."""
ROOM = 0.5
"""Part of the free memory that a run may take."""
SPREAD = 0.02


def with_time_beyond_ops(
    joint: Joint,
    graph: TrainingGraph,
    meter: Meter,
    cache: PriceCache,
    profile: Profile | None = None,
) -> TrainingGraph:
    """`graph` with its arrival of tangents at the cost of all that its ops do not account for.

    Steps on a CPU alone are run, once for each graph; the time is kept on disk. A step that needs
    more than half of the memory that is free, or does not run on made data, is left as it is. A
    `profile` that has the step's time says it; one of another machine that has not, leaves it.
    """
    if graph.device != CPU:
        return graph
    if profile is not None and graph.hash in profile.steps:
        return booked(graph, profile.steps[graph.hash])
    if profile is not None and profile.title != meter.title:
        return graph
    step = known(graph, cache)
    if step is None:
        step = _measured(joint, graph, meter)
        if step is None:
            return graph
        cache.prices[f"{STEP_KEY} {graph.hash}"] = Price(step.step_us, 0)
        cache.prices[f"{KEEPING_KEY} {graph.hash}"] = Price(step.keeping_us, 0)
        cache.save()
    return booked(graph, step)


def known(graph: TrainingGraph, cache: PriceCache) -> WholeStep | None:
    """The times of the whole step, if `cache` has them."""
    keys = f"{STEP_KEY} {graph.hash}", f"{KEEPING_KEY} {graph.hash}"
    found = [cache.prices[key].cost_us for key in keys if key in cache.prices]
    return WholeStep(*found) if len(found) == len(keys) else None


def booked(graph: TrainingGraph, step: WholeStep) -> TrainingGraph:
    """`graph` taking the step's time in all, unless its ops alone take longer."""
    cheaper = less_for_kept(graph, SAVED * step.keeping_us)
    return taking(cheaper, max(step.step_us, graph.time_us))


def taking(graph: TrainingGraph, time_us: float) -> TrainingGraph:
    """`graph` with its arrival of tangents at the cost of what its ops take less than `time_us`."""
    beyond_us = time_us - graph.time_us
    ops = tuple(
        msgspec.structs.replace(op, cost_us=op.cost_us + beyond_us) if op.target == TANGENTS else op
        for op in graph.ops
    )
    return msgspec.structs.replace(graph, ops=ops)


def _measured(joint: Joint, graph: TrainingGraph, meter: Meter) -> WholeStep | None:
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    made_bytes = sum(n.meta["val"].untyped_storage().nbytes() for n in _tensors(placeholders))
    if peak_bytes(graph) + made_bytes > ROOM * free_bytes(meter.device):
        return None
    run = copy_of(joint.module)
    with meter.quiet():
        inputs = [_made(node) for node in placeholders]
        try:
            run(*inputs)
        except (RuntimeError, IndexError) as error:
            said = str(error).splitlines()[0]
            warnings.warn(
                f"the step cannot be timed as a whole on made data ({said}); what it takes beyond "
                "its ops is not counted, so that overheads may be shown too high",
                stacklevel=2,
            )
            return None

        def time_us(graph: Callable[..., Any]) -> float:
            return _least_us(meter, lambda: graph(*inputs))

        return WholeStep(time_us(run), keeping_us(joint, time_us))


def _least_us(meter: Meter, run: Callable[[], Any]) -> float:
    times: list[float] = []
    while len(times) < LEAST_RUNS or (len(times) < RUNS and sum(times) < ENOUGH_US):
        times.append(meter.step_us(run))
    return min(times)


def peak_bytes(graph: TrainingGraph) -> int:
    """The most bytes live when every op runs once, resident ones aside."""
    sizes = {value.name: value.size_bytes for value in graph.values if value.producer}
    readers = Counter(name for op in graph.ops for name in {*op.inputs} if name in sizes)
    readers.update(name for name in graph.outputs if name in sizes)
    live = most = 0
    for op in graph.ops:
        live += sum(sizes[name] for name in op.outputs)
        most = max(most, live + op.workspace_bytes)
        read = {name for name in op.inputs if name in sizes}
        readers.subtract(read)
        live -= sum(sizes[name] for name in read.union(op.outputs) if not readers[name])
    return most


def _tensors(nodes: list[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if isinstance(node.meta.get("val"), Tensor)]


def _made(node: fx.Node) -> Any:
    """Small numbers around zero, so that depth neither swells nor starves them; valid indices."""
    like: Any = node.meta.get("val")
    if not isinstance(like, Tensor):
        return like
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.normal_(0, SPREAD) if like.is_floating_point() else made.zero_()
