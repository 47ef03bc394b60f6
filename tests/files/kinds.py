"""All kinds of files that remat reads: one of each, and what reading it means.

A reader does all that the verbs do with such a file before anything is solved or run, and gives
back the value. What it raises must be an error of ours.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import remat
from benchmarks.cells.instance_format import graph_of, read_instance
from remat.analysis.inspect import inspect
from remat.analysis.plan_figures import arena_text, place
from remat.analysis.plan_report import fronts_in
from remat.graph_capture.costs.cache import OpWork, Profile, ProfiledOp, WholeStepTimes, as_profile
from remat.graph_capture.errors import LayoutError, RematError
from remat.graph_capture.files import read_contents
from remat.graph_capture.graph import Resident
from remat.job.plan_source import captured, open_plan, read_kept, schedule_in
from remat.job.request import NO_BUDGET, Request
from remat.progress import Stopwatch
from remat.rewriter.plans.facts import signature_from
from remat.schedules.layout import Layout, buffers_of, check_layout
from remat.schedules.outcome import Check
from remat.schedules.plan import (
    Autocast,
    BatchSignature,
    PlanFile,
    Prediction,
    PythonLeaf,
    StateFact,
    TensorLeaf,
    Versions,
)
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from tests.solver.graphs.random_graphs import gpt_like

ERRORS = RematError


class FileKind(NamedTuple):
    """A kind of file: its suffix, one that is right, and its reader."""

    suffix: str
    valid: bytes
    read: Callable[[Path], object]


GRAPH = gpt_like(1)
SOLVER = "chen_sqrt"
"""It takes no time, and computes something again."""
TREE = (
    '[1, {"type": "builtins.tuple", "context": "null", "children_spec": '
    '[{"type": null, "context": null, "children_spec": []}, '
    '{"type": null, "context": null, "children_spec": []}]}]'
)


def planned() -> Schedule:
    """A schedule of the graph."""
    schedule = remat.solve(GRAPH, "90%", solver=SOLVER).schedule
    assert schedule is not None
    return schedule


def plan() -> PlanFile:
    """A plan with one of everything."""
    schedule = planned()
    found = simulate(GRAPH, schedule)
    bound_us, peak = GRAPH.time_us, found.peak_bytes
    gap = found.time_us / bound_us - 1
    leaves = (TensorLeaf((2, 3), (3, 1), "float32", "cpu", False), PythonLeaf("str", "'a'"))
    return PlanFile(
        model="GPT",
        state=(StateFact("w", "parameter", "float32", (2, 3), (3, 1), True),),
        in_eval=("drop",),
        batch=BatchSignature(TREE, leaves),
        loss_fn="",
        autocast=(Autocast("cpu", False, "bfloat16"),),
        told_compiling=False,
        told_exporting=False,
        resident=Resident(parameters_bytes=24),
        device="cpu",
        title="a machine",
        versions=Versions("2.13.0", "0.1.0"),
        schedule=schedule,
        prediction=Prediction(
            peak, found.time_us, found.overhead, bound_us, gap, "given", "feasible", "fixed"
        ),
        graph=GRAPH,
        check=Check(True, True, True, True, 2, 2, 2 * peak, peak, 100.0, 110.0),
    )


def front() -> bytes:
    """A front of two budgets, one of which is infeasible."""
    return remat.sweep(GRAPH, ["90%", "1B"], SOLVER).front.to_json()


def profile() -> bytes:
    """A profile of two ops and a step."""
    ops = {
        "aten.mm.default(2x2)": ProfiledOp(3.5, 64, work=OpWork("matmul", "float32", 16, 48)),
        "aten.exp.default(4)": ProfiledOp(1.25),
    }
    return Profile(
        "cpu", "a machine", "2.13.0", ops, steps={"ab": WholeStepTimes(9.0, 1.0)}
    ).to_json()


def archive(data: bytes) -> bytes:
    """A plan in an archive, as torch packs it."""
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as members:
        for name, held in (
            ("archive/archive_format", b"pt2"),
            ("archive/.data/version", b"3\n"),
            ("archive/extra/remat_plan.json", data),
        ):
            members.writestr(zipfile.ZipInfo(name), held)
    return out.getvalue()


INSTANCE: dict[str, Any] = {
    "nodes": [{"id": i, "cost": 1.5, "bytes": 8, "name": "mm"} for i in range(4)],
    "edges": [[0, 1], [1, 2], [0, 3]],
    "order": [0, 1, 3, 2],
    "constant_bytes": 16,
}


def _read_graph(path: Path) -> object:
    graph = captured(str(path), Request(budget=NO_BUDGET), Stopwatch()).graph
    simulate(graph, remat.solve(graph, 10**15, solver="store_all").schedule)  # type: ignore[arg-type]
    return graph.hash, graph, repr(graph), graph._repr_html_()


def _read_plan(path: Path) -> object:
    """As the verbs show it, and as `load` traces it."""
    kept = read_kept(path)
    if isinstance(kept, PlanFile):
        signature_from(kept.batch)
    opened = open_plan(str(path), Request(budget=NO_BUDGET), Stopwatch())
    page = str(inspect(opened.graph, opened.result))
    return kept, page, repr(kept), schedule_in(kept)._repr_html_()


def _read_schedule(path: Path) -> object:
    """With its graph beside it, in another folder."""
    with TemporaryDirectory() as folder:
        graph = Path(folder) / "graph.json"
        graph.write_bytes(GRAPH.to_json())
        opened = open_plan(str(graph), Request(budget=NO_BUDGET), Stopwatch(), path)
    return opened, repr(opened.schedule), opened.solved._repr_html_()


def _read_front(path: Path) -> object:
    fronts = fronts_in(read_contents(path), str(path))
    return fronts, {name: (repr(one), one._repr_html_()) for name, one in fronts.items()}


def _read_layout(path: Path) -> object:
    """As one who follows it must: judged against the buffers of the plan."""
    layout = Layout.from_json(read_contents(path), str(path))
    try:
        check_layout(buffers_of(GRAPH, planned()), layout)
    except LayoutError as error:
        raise LayoutError(f"{path}: {error}") from error
    return layout, repr(layout), arena_text(layout)


def _read_instance(path: Path) -> object:
    instance = read_instance(path)
    return instance, graph_of(instance)


def kinds() -> dict[str, FileKind]:
    """By name."""
    both = {"a": json.loads(front()), "b": json.loads(front())}
    return {
        "graph": FileKind(".json", GRAPH.to_json(), _read_graph),
        "plan": FileKind(".json", plan().to_json(), _read_plan),
        "archive": FileKind(".pt2", archive(plan().to_json()), _read_plan),
        "schedule": FileKind(".json", planned().to_json(), _read_schedule),
        "front": FileKind(".json", front(), _read_front),
        "fronts": FileKind(".json", json.dumps(both).encode(), _read_front),
        "layout": FileKind(".json", place(GRAPH, planned()).to_json(), _read_layout),
        "profile": FileKind(".json", profile(), as_profile),
        "instance": FileKind(".json", json.dumps(INSTANCE).encode(), _read_instance),
    }
