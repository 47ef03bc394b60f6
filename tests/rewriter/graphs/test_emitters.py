"""A lever that changes which ops run, carried out: here one whose backward reads a copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, fx, nn

import remat
from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.joint.nodes import MADE_IN_FORWARD, is_view
from remat.ranks.same_order import agreed_load, agreed_rewrite
from remat.rewriter.plans.loading import plan_of, save_plan
from remat.schedules.levers import REDUCTIONS, Lever
from remat.schedules.outcome import Result
from remat.schedules.schedule import ChunkedRegion, Schedule
from remat.schedules.simulate import simulate

NAME = "a copy for backward"
VALUE = "tanh"


def copy_for_backward(graph: TrainingGraph, value: str) -> tuple[TrainingGraph, tuple[str, ...]]:
    """Forward copies a value; backward reads the copy, so that forward can drop the value."""
    copied = f"{value}_copied"
    ops: list[Op] = []
    for op in graph.ops:
        if op.phase == "backward":
            reads = tuple(copied if name == value else name for name in op.inputs)
            ops.append(msgspec.structs.replace(op, inputs=reads))
            continue
        ops.append(op)
        if op.name == value:
            ops.append(Op(copied, "aten.clone.default", "forward", (value,), (copied,), 1.0))
    own = msgspec.structs.replace(
        graph.value_by_name[value], name=copied, producer=copied, held_until=""
    )
    changed = msgspec.structs.replace(graph, ops=tuple(ops), values=(*graph.values, own))
    return changed, (value,)


def emit(graph: fx.Graph, told: Sequence[str]) -> None:
    for value in [node for node in graph.nodes if node.name in told]:
        same = [value, *(node for node in value.users if is_view(node))]  # autograd reads a detach
        with graph.inserting_after(value):
            copy = graph.create_node(
                "call_function", torch.ops.aten.clone.default, (value,), {}, f"{value.name}_copied"
            )
        copy.meta = {**value.meta, "val": value.meta["val"].clone()}
        for alias in same:
            for reader in list(alias.users):
                if MADE_IN_FORWARD not in reader.meta and reader not in same:
                    reader.replace_input_with(alias, copy)


def emit_nothing(graph: fx.Graph, told: Sequence[str]) -> None:
    """Leaves the graph as it is."""


def use(monkeypatch: pytest.MonkeyPatch, emitter: str, tolerance: float = 0.0) -> None:
    """Give the lever its row, which stands last."""
    row = Lever(
        change=f"{__name__}:copy_for_backward", emitter=f"{__name__}:{emitter}", option="copied",
        tolerance=tolerance,
    )  # fmt: skip
    monkeypatch.setitem(REDUCTIONS, NAME, row)


def planned() -> tuple[nn.Module, tuple[Tensor], TrainingGraph, Result]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    args = (torch.randn(8, 16),)
    graph = remat.capture(model, args)
    return model, args, graph, remat.solve(graph, "100%", "store_all", copied=VALUE)


def test_a_lever_is_solved_judged_and_carried_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, "emit")
    model, args, graph, result = planned()
    schedule = result.schedule
    assert schedule is not None
    assert [(one.lever, one.told) for one in schedule.levers] == [(NAME, (VALUE,))]
    assert schedule.captured_hash == graph.hash
    assert schedule.computations()[f"{VALUE}_copied"] == 1
    assert simulate(graph, schedule).peak_bytes == result.peak_bytes
    module = agreed_rewrite(model, schedule, costed=graph)
    found = remat.check(model, module, args)
    assert found.differences == ()
    assert (found.rounding, found.tolerance) == ("", 0.0)
    assert found.plan_peak_bytes == result.peak_bytes
    save_plan(plan_of(module), tmp_path / "plan.json")
    loaded = agreed_load(tmp_path / "plan.json", model)
    assert remat.check(model, loaded, args).differences == ()


def test_a_lever_says_how_far_it_is_from_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "emit", tolerance=0.02)
    model, args, graph, result = planned()
    assert result.schedule is not None
    assert not result.schedule.is_exact
    found = remat.check(model, agreed_rewrite(model, result.schedule, costed=graph), args)
    assert (found.rounding, found.tolerance) == ("levers", 0.02)


def test_ops_that_are_not_those_of_the_schedule_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, "emit_nothing")
    model, _, _, result = planned()
    assert result.schedule is not None
    with pytest.raises(ScheduleError, match="this plan was made for another graph"):
        agreed_rewrite(model, result.schedule)


def test_a_plan_with_a_lever_of_another_release_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "emit")
    model, _, _, result = planned()
    assert result.schedule is not None
    monkeypatch.delitem(REDUCTIONS, NAME)
    with pytest.raises(ScheduleError, match=f"uses {NAME}, which this release cannot run"):
        agreed_rewrite(model, Schedule.from_json(result.schedule.to_json()))


def test_a_lever_that_is_not_asked_for_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "emit")
    _, _, graph, _ = planned()
    plain = remat.solve(graph, "100%", "store_all").schedule
    assert plain is not None
    assert (plain.levers, plain.captured_hash) == ((), "")


def test_a_schedule_names_its_captured_graph_where_it_has_levers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, "emit")
    schedule = planned()[3].schedule
    assert schedule is not None
    with pytest.raises(ScheduleError, match="or levers names two graphs"):
        msgspec.structs.replace(schedule, captured_hash="")
    with pytest.raises(ScheduleError, match=f"in chunks or {NAME}, not both"):
        msgspec.structs.replace(schedule, chunks=(ChunkedRegion("head", 2),))
