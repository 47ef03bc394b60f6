"""A graph, and plans of it, whose every name is made to do harm where it is shown."""

from __future__ import annotations

import json
from typing import Any

import msgspec

import remat
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.plan import PlanFile
from tests.files.kinds import GRAPH, SOLVER, plan

NAMES = {"name", "target", "module", "source", "dtype", "device", "prices", "pinned"}
SCRIPT = "\"></script><script>alert(1)</script><img src=x onerror=alert(2)><!--'{{7*7}}\u2028"
TERMINAL = "\x1b[2J\x1b]0;title\x07[red]x[/red][/]:smile:\r\n\u202e"


def with_names(graph: TrainingGraph, bad: str) -> TrainingGraph:
    """The graph with `bad` at the end of all that is named freely, notes and versions too."""
    root: dict[str, Any] = json.loads(graph.to_json())
    renamed = {one["name"] for one in (*root["ops"], *root["values"])}
    facts = {"notes": (bad,), "versions": {f"torch{bad}": bad}, "inputs": [bad]}
    return msgspec.convert(_renamed(root, renamed, bad) | facts, TrainingGraph)


def _renamed(one: Any, known: set[str], bad: str) -> Any:
    if isinstance(one, dict):
        free = {key: value + bad for key, value in one.items() if key in NAMES and value}
        return {key: _renamed(value, known, bad) for key, value in one.items()} | free
    if isinstance(one, list):
        return [_renamed(part, known, bad) for part in one]
    return one + bad if isinstance(one, str) and one in known else one


def plan_with_names(bad: str) -> PlanFile:
    """A plan of that graph, with all of its own names like that."""
    graph = with_names(msgspec.structs.replace(GRAPH, ops=_placed()), bad)
    result = remat.solve(graph, "90%", solver=SOLVER)
    assert result.schedule is not None
    schedule = msgspec.structs.replace(
        result.schedule, solver=f"chen{bad}", options={f"option{bad}": bad}
    )
    made = plan()
    facts = {"model": bad, "loss_fn": bad, "title": bad, "in_eval": (bad,), "unchecked": bad}
    return msgspec.structs.replace(made, schedule=schedule, graph=graph, **facts)


def _placed() -> tuple[Any, ...]:
    """Ops with a module and a line, which the graph has not."""
    return tuple(
        msgspec.structs.replace(op, module=f"blocks.{i % 3}", source=f"model.py:{i}")
        for i, op in enumerate(GRAPH.ops)
    )
