"""Workspaces of ops without their times: one run each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import fx

from remat.graph_capture.devices.device_table import allocated_on
from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.over_ranks.alone import alone
from remat.graph_capture.prices.op_prices import runner_of, workspace_of
from remat.graph_capture.prices.sample_inputs import price_key
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
    ran: list[str] = []
    with trace.python_state.streams_kept(), meter.quiet():
        regions = meter.regions(_warm(trace.joint, distinct, ran))
    found = {
        key: allocated(workspace_of(distinct[key], region))
        for key, region in zip(ran, regions, strict=True)
    }
    return {name: own[name] + found[key] for name, key in keys.items() if key in found}


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
