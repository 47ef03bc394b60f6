"""`predict_reserved`: of a plan, of a schedule and of the unmodified step; refused elsewhere."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import remat
from remat.analysis.plan_figures import (
    compiled_text,
    predict_reserved,
    reserved_beside,
    reserved_text,
    shortage_text,
)
from remat.budgets import unmodified, unmodified_step
from remat.formats import percent_text
from remat.graph_capture.devices.known_devices import GB, Device, device_table
from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.job.pipeline import planned_report
from remat.job.request import Request
from remat.progress import Stopwatch
from remat.schedules.reserved import AllocatorPeak, Reserved, reserved_of
from tests.limits import AMPLE_S
from tests.solver.graphs.random_graphs import gpt_like

GIB = 1 << 30


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    return msgspec.structs.replace(gpt_like(3), device="h100")


def test_a_result_and_its_schedule_reserve_the_same(graph: TrainingGraph) -> None:
    result = remat.solve(graph, "70%", "chen_sqrt", AMPLE_S)
    assert result.schedule is not None
    said = predict_reserved(graph, result)
    assert said == predict_reserved(graph, result.schedule) == reserved_beside(graph, result)
    assert result.peak_bytes <= said.expandable.reserved_bytes


def test_no_plan_is_the_unmodified_step(graph: TrainingGraph) -> None:
    schedule = unmodified(graph).schedule
    assert schedule is not None
    assert predict_reserved(graph) == reserved_of(graph, schedule)


@pytest.mark.slow
def test_what_eager_writes_in_place_takes_no_room_of_its_own() -> None:
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU(inplace=True)) for _ in range(6)]
    model, x = nn.Sequential(*layers), torch.randn(4096, 512)
    graph = remat.capture(model, (x,), device="h100")
    step = unmodified_step(graph)
    schedule = step.result.schedule
    assert schedule is not None
    assert predict_reserved(graph) == reserved_of(step.graph, schedule)
    with pytest.raises(ScheduleError):
        reserved_of(graph, schedule)
    of_captured = msgspec.structs.replace(schedule, graph_hash=graph.hash, inputs=graph.inputs)
    more = reserved_of(graph, of_captured).default.reserved_bytes
    said = predict_reserved(graph).default.reserved_bytes
    assert step.result.peak_bytes <= said < 0.9 * more
    report, _ = planned_report(graph, Request(budget="80%", device="h100"), Stopwatch())
    assert report.rows[0].reserved == predict_reserved(graph)


def test_a_graph_of_a_cpu_is_refused_with_a_way_out() -> None:
    graph = msgspec.structs.replace(gpt_like(3), device="cpu")
    with pytest.raises(
        remat.RematError, match=r"capture for a CUDA device, such as .* the graph is for cpu"
    ):
        predict_reserved(graph)
    assert reserved_beside(graph, unmodified(graph)) is None


def test_where_nothing_fits_there_is_nothing_to_predict(graph: TrainingGraph) -> None:
    lost = remat.solve(graph, 1, "cut", AMPLE_S)
    assert reserved_beside(graph, lost) is None
    with pytest.raises(remat.RematError, match="is below"):
        predict_reserved(graph, lost)


def test_a_plan_that_reserves_more_than_the_device_has_is_told_so(graph: TrainingGraph) -> None:
    schedule = unmodified(graph).schedule
    assert schedule is not None
    said = reserved_of(graph, schedule)
    assert said.default.reserved_bytes > said.expandable.reserved_bytes
    assert shortage_text(graph, schedule) == ""

    def told(device_bytes: int) -> str:
        device = Device("a GPU", device_bytes / GB, 1.0, 1.0, {"float32": 1.0}, "")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(device_table().devices, "h100", device)
            return shortage_text(graph, schedule)

    assert told(said.default.reserved_bytes) == ""
    tight = told(said.expandable.reserved_bytes)
    assert re.search(
        r"^start with PYTORCH_\w+=\S+: on .*MiB of h100, the allocator frees .* in 3 steps$", tight
    )
    short = told(unmodified(graph).peak_bytes - 1)
    assert short.startswith("take a smaller budget: on the ")
    assert short.endswith("a step runs out of memory")
    on_cuda = msgspec.structs.replace(graph, device="cuda")
    assert shortage_text(on_cuda, schedule) == ""


def test_the_text_has_both_settings_and_the_unmodified_step() -> None:
    plan = Reserved(AllocatorPeak(GIB, 2 * GIB), AllocatorPeak(GIB, 3 * GIB // 2))
    text = "2.00 GiB predicted (expandable 1.50 GiB)"
    assert reserved_text(plan) == text
    without = Reserved(AllocatorPeak(GIB, 4 * GIB), AllocatorPeak(GIB, 3 * GIB))
    assert reserved_text(plan, without) == f"{text}, unmodified 4.00 GiB (expandable 3.00 GiB)"


@pytest.mark.parametrize("plan", [3, "80%", object()])
def test_what_is_no_graph_or_no_plan_is_named(graph: TrainingGraph, plan: Any) -> None:
    with pytest.raises(
        ScheduleError, match=f"pass result.schedule .*: this is {type(plan).__name__}"
    ):
        predict_reserved(graph, plan)
    with pytest.raises(ScheduleError, match=f"of a graph, and this is {type(plan).__name__}"):
        predict_reserved(plan, None)


def test_compiled_code_is_named_where_much_may_be_fused(graph: TrainingGraph) -> None:
    ops = graph.ops
    graph = msgspec.structs.replace(graph, device="h100")
    told = compiled_text(graph, "20GiB")
    fused_us = sum(op.cost_us for op in ops if "mm" not in op.target and "atten" not in op.target)
    assert told.startswith(f"compare with compile=True: {percent_text(fused_us / graph.time_us)} ")
    assert 'torch.compile(model, backend="remat", options={"budget": "20GiB"})' in told
    assert compiled_text(msgspec.structs.replace(graph, device="cpu"), "20GiB") == ""
    products = tuple(msgspec.structs.replace(op, target="aten.mm.default") for op in ops)
    assert compiled_text(msgspec.structs.replace(graph, ops=products), "20GiB") == ""
