"""Schedules that were solved beforehand, elsewhere: taken where they are of this very graph.

A folder has a file for each plan, and `plans.json`, which says of each the SHA-256 of its bytes and
of its graph. A graph is known by its ops and shapes, so costs may be others where it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import remat
from benchmarks import GAP_OF_FIGURES
from benchmarks.gpu.rows import Row
from remat.budgets import UNBOUNDED_BYTES, parse_budget
from remat.graph_capture.errors import RematError
from remat.graph_capture.graph import TrainingGraph
from remat.plan import Plan
from remat.schedules.schedule import Schedule

LIST = "plans.json"
AMPLE_S, GAP_OF_REHEARSALS = 600.0, 0.5
MARGIN = 0.99
"""Of a budget: what is solved for beforehand, as workspaces differ between model and device."""


def write_plan(folder: Path, name: str, schedule: Schedule) -> None:
    """Add a plan to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = schedule.to_json()
    (folder / f"{name}.json").write_bytes(data)
    listed = _listed(folder)
    listed[name] = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "graph": schedule.captured_hash or schedule.graph_hash,
    }  # fmt: skip
    (folder / LIST).write_text(json.dumps(listed, indent=1) + "\n")


def _listed(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / LIST
    return json.loads(path.read_text()) if path.exists() else {}


def effort_of(limit_s: float, *, rehearse: bool) -> dict[str, float]:
    """When a solve ends: for a rehearsal at a plan that is good enough, on a busy machine too."""
    if rehearse:
        return {"time_limit_s": AMPLE_S, "gap": GAP_OF_REHEARSALS}
    return {"time_limit_s": limit_s, "gap": GAP_OF_FIGURES}


def plan_for(
    graph: TrainingGraph, budget: str, name: str, folder: Path | None, effort: Mapping[str, Any]
) -> tuple[Plan, Row]:
    """The carried plan of that name, or one solved here; and which of these it is, and why."""
    found = _carried(graph, budget, name, folder) if folder else "nothing was carried"
    if isinstance(found, Plan):
        return found, {"schedule": "carried"}
    plan = remat.solve(graph, budget, **effort)
    return plan, {"schedule": f"solved here: {found}"}


def _carried(graph: TrainingGraph, budget: str, name: str, folder: Path) -> Plan | str:
    listed, path = _listed(folder).get(name), folder / f"{name}.json"
    if listed is None or not path.exists():
        return "there is no such plan"
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != listed["sha256"]:
        return "the file has changed"
    if listed["graph"] != graph.hash:
        return "it is of another graph"
    asked = parse_budget(budget)
    try:
        schedule = Schedule.from_json(data, path.name)
        most_bytes = 0 if asked.kind == "min" else asked.bytes_for(graph)
        peak_bytes = Plan.of(graph, schedule, UNBOUNDED_BYTES).peak_bytes
    except RematError as error:
        return f"{error}"
    if most_bytes and peak_bytes > most_bytes:
        return f"it takes {peak_bytes - most_bytes} bytes more than the budget"
    return Plan.of(graph, schedule, most_bytes or peak_bytes)
