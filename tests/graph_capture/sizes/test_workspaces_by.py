"""Where the workspaces of a range come from."""

from __future__ import annotations

import msgspec

import remat
from remat.graph_capture.capture_api import add_costs, workspaces_by
from remat.graph_capture.costs.op_costs import measured_workspaces
from tests.graph_capture.traced_models import traced
from tests.models import make


def test_with_costs_of_another_machine_nothing_is_measured_here() -> None:
    trace = traced("plain")
    model, args, *_ = make("plain")
    own = remat.profile(model, args)
    other = msgspec.structs.replace(own, title="another machine")
    assert workspaces_by(trace) is measured_workspaces
    assert workspaces_by(trace, own) is measured_workspaces
    assert workspaces_by(trace, other) is None


def test_they_are_those_of_a_costed_graph() -> None:
    trace = traced("batch_norm_in_place_relu")
    costed = add_costs(trace)
    known = {op.name: op.workspace_bytes for op in costed.ops if op.name in trace.joint.node_of_op}
    assert any(known.values())
    assert measured_workspaces(trace, known) == known
