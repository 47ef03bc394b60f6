"""What ops take in bytes, without their times: one run each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec
from torch import fx

from remat.graph_capture.devices.device_table import allocated_on
from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.devices.meter import Meter
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import fresh_storages
from remat.graph_capture.memory_events import RegionMemory
from remat.graph_capture.over_ranks.alone import alone
from remat.graph_capture.prices.kept_bits import kept_bits
from remat.graph_capture.prices.op_prices import runner_of, workspace_of
from remat.graph_capture.prices.pieces import with_regions
from remat.graph_capture.prices.price_cache import Price, PriceCache
from remat.graph_capture.prices.pricing import values_as_allocated
from remat.graph_capture.prices.sample_inputs import price_key
from remat.graph_capture.splitting.regions import AND, Found, find_regions
from remat.graph_capture.tracing.one_trace import Trace


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
