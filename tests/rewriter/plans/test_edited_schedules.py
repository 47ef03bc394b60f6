"""No schedule trains that the simulator has not judged, whichever way it comes in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import remat
from remat.analysis.inspect import inspect
from remat.analysis.plan_figures import place
from remat.graph_capture.errors import PlanError, RewriteError, ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.ranks.same_order import agreed_load, agreed_rewrite
from remat.rewriter.checkpoint_policy import checkpoint_policy
from remat.rewriter.plans.loading import load_plan, plan_of, save_plan
from remat.schedules.exports import to_dot, trace_file
from remat.schedules.plan import PlanFile
from remat.schedules.schedule import ChunkedRegion, Schedule
from remat.schedules.simulate import simulate
from tests import models
from tests.graph_capture.chunking.language_models import made
from tests.rewriter.plans.edited_schedules import CHUNKS, EDITS, edited, without_frees
from tests.rows import rows


@functools.cache
def case() -> tuple[Any, Any, TrainingGraph, Schedule, PlanFile]:
    """A model with dropout, its batch, its graph, a schedule that recomputes, and the plan."""
    model, args, *_ = models.dropout()
    graph = remat.capture(model, args)
    schedule = remat.solve(graph, 10**12, solver="chen_sqrt").schedule
    assert schedule is not None
    return model, args, graph, schedule, plan_of(agreed_rewrite(model, schedule))


@functools.cache
def bad() -> dict[str, Callable[[], Schedule]]:
    return edited(case()[2], case()[3])


def by_rewrite(schedule: Schedule) -> object:
    return agreed_rewrite(case()[0], schedule)


def by_rewrite_with_a_batch(schedule: Schedule) -> object:
    return agreed_rewrite(case()[0], schedule, case()[1])


def by_load(schedule: Schedule) -> object:
    return load_plan(msgspec.structs.replace(case()[4], schedule=schedule), case()[0])


def by_policy(schedule: Schedule) -> object:
    return checkpoint_policy(case()[2], schedule)


def by_inspect(schedule: Schedule) -> object:
    return inspect(case()[2], schedule)


def by_place(schedule: Schedule) -> object:
    return place(case()[2], schedule)


def by_drawing(schedule: Schedule) -> object:
    return to_dot(case()[2], schedule), trace_file(case()[2], schedule)


NAMES = [*EDITS, "another hash", *CHUNKS, "chunks of this graph", "chunks of the same graph"]
WAYS: dict[str, Callable[[Schedule], object]] = {
    "rewrite": by_rewrite,
    "rewrite with a batch": by_rewrite_with_a_batch,
    "load": by_load,
    "policy": by_policy,
    "inspect": by_inspect,
    "place": by_place,
    "exports": by_drawing,
}


@pytest.mark.parametrize("way", rows(WAYS, lambda way: way == "rewrite"))
@pytest.mark.parametrize("name", NAMES)
def test_an_edited_schedule_does_not_train(name: str, way: str) -> None:
    # Of a hash that names no capture of this process, rewriting knows no batch.
    with pytest.raises((ScheduleError, RewriteError) if name == "another hash" else ScheduleError):
        WAYS[way](bad()[name]())


def test_the_schedule_that_was_edited_trains() -> None:
    for way in WAYS.values():
        way(case()[3])


def test_all_frees_removed() -> None:
    """Where something runs again it makes nothing new; elsewhere it holds more than its budget."""
    model, args, graph, schedule, plan = case()
    with pytest.raises(ScheduleError, match="makes only values that are live already"):
        agreed_rewrite(model, without_frees(schedule), args)
    kept = remat.solve(graph, 10**12, solver="store_all")
    assert kept.schedule is not None
    full = msgspec.structs.replace(without_frees(kept.schedule), budget_bytes=kept.peak_bytes)
    assert simulate(graph, full).peak_bytes > kept.peak_bytes
    with pytest.warns(UserWarning, match="above its budget of"):
        agreed_rewrite(model, full, args)
    with pytest.raises(PlanError, match="above its budget"):
        load_plan(msgspec.structs.replace(plan, schedule=full, graph=graph), model)


def test_a_plan_whose_figures_were_edited_does_not_load(tmp_path: Path) -> None:
    model, args, *_ = models.dropout()
    module = remat.rematerialize(model, args, budget="90%", solver="cut", check=False)
    plan = plan_of(module)
    assert plan.prediction is not None
    for field, value in (
        ("peak_bytes", plan.prediction.peak_bytes - 1),
        ("time_us", plan.prediction.time_us / 2),
        ("overhead", 0.5),
        ("lower_bound_us", plan.prediction.time_us * 2),
        ("gap", 0.25),
    ):
        prediction = msgspec.structs.replace(plan.prediction, **{field: value})
        save_plan(msgspec.structs.replace(plan, prediction=prediction), tmp_path / "p.json")
        with pytest.raises(PlanError, match=rf"p\.json was edited, or is stale: it says {field}"):
            agreed_load(tmp_path / "p.json", model)
    alone = msgspec.structs.replace(plan, graph=None)
    assert plan_of(agreed_load(alone, model)).prediction is None


@pytest.mark.slow
def test_chunks_that_were_edited_do_not_train() -> None:
    model, args = made("plain")
    graph = remat.capture(model, args, split="exact", device="h100")
    schedule = remat.solve(graph, "min", solver="cut").schedule
    assert schedule is not None
    (one,) = schedule.chunks
    for chunks in (
        (ChunkedRegion(one.region, 10**9),), (ChunkedRegion(one.region, -2),), (),
        (ChunkedRegion("no_such_loss", 2),), (one, ChunkedRegion("no_such_loss", 2)),
        (ChunkedRegion(one.region, one.chunks, exact=False),),
    ):  # fmt: skip
        with pytest.raises(ScheduleError):
            agreed_rewrite(model, msgspec.structs.replace(schedule, chunks=chunks), args)
    with pytest.raises(ScheduleError, match="the same region in chunks twice"):
        msgspec.structs.replace(schedule, chunks=(one, one))
