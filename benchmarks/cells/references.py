"""Compares solves with the known optima of a folder of instances.

`python -m benchmarks.cells.references FOLDER` solves every instance whose file holds a published
result, or one proved by exhaustive search. It prints one line for each, and ends with status 1
if any is missed. `tests/solver/segments/test_chains.py` compares the chains of the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cells.instance_format import Instance, checked, read_instance
from benchmarks.instance import closing_gap, solved

PUBLISHED = {
    "moccasin_rl1": [(41687, "fixed", 0.008, True), (37055, "fixed", 0.023, False),
                     (41687, "free", 0.0, False), (37055, "free", 0.003, False)],
}  # fmt: skip
"""Budget, order, overhead to reach (to three places), whether a proof is due."""
EXACT = ("checkmate_test", "checkmate_linear4")
PROVED = ("moccasin_fcn8", "moccasin_vgg16")


@dataclass(frozen=True)
class Case:
    """One solve that must reach `cost`; None if nothing may fit."""

    name: str
    instance: Instance
    budget_bytes: int
    order: str
    cost: float | None
    is_proof_due: bool = True


def instance_of(data: dict[str, Any]) -> Instance:
    """An instance of a file of several."""
    return checked(msgspec.convert({"constant_bytes": 0, **data}, Instance))


def apart(path: Path) -> Instance:
    """The instance of a file, without its constants."""
    return msgspec.structs.replace(read_instance(path), constant_bytes=0)


def cases(folder: Path) -> Iterator[Case]:
    """All solves for which the folder has a result."""
    for data in _read(folder / "tiny_exact.json").get("graphs", []):
        yield from _exact(data["name"], instance_of(data), data["reference"]["rows"])
    for name in EXACT:
        data = _read(folder / f"{name}.json")
        if data:
            rows = data["reference"]["exact"]["rows"]
            yield from _exact(name, apart(folder / f"{name}.json"), rows)
    for name in PROVED:
        data = _read(folder / f"{name}.json")
        for row in data["reference"]["peer_runs"]["rows"] if data else []:
            made = apart(folder / f"{name}.json")
            yield Case(name, made, row["budget"], "fixed", row["cost"])
    for name, rows in PUBLISHED.items():
        if (folder / f"{name}.json").exists():
            made = apart(folder / f"{name}.json")
            base = sum(node.cost for node in made.nodes)
            for budget, order, overhead, is_proof_due in rows:
                most = base * (1 + overhead + 0.0005)
                yield Case(name, made, budget, order, most, is_proof_due)
    yield from _largest_batch(folder / "checkmate_vgg19.json")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _exact(name: str, instance: Instance, rows: list[dict[str, Any]]) -> Iterator[Case]:
    for row in rows:
        for order in ("fixed", "free"):
            yield Case(name, instance, row["budget"], order, row[f"optimal_cost_{order}_order"])


def _largest_batch(path: Path) -> Iterator[Case]:
    """The largest batch that fits 16 GB at one extra forward; one more must not fit."""
    data = _read(path)
    if not data:
        return
    rule = data["reference"]["published_max_batch"]
    most = sum(node["cost"] for node in data["nodes"])
    most += sum(node["cost"] for node in data["nodes"] if not node["is_backward"])
    room = 16e9 - rule["constant_bytes"]
    batch = rule["checkmate_optimal"]
    yield Case(f"vgg19 x {batch}", apart(path), int(room / batch), "fixed", most, False)
    yield Case(f"vgg19 x {batch + 1}", apart(path), int(room / (batch + 1)), "fixed", None)


def check(case: Case, limit_s: float) -> bool:
    """Solve, print a line, return whether the result was reached."""
    found, _ = solved(
        case.instance, case.budget_bytes, "auto", order=case.order,
        gap=closing_gap(case.instance), time_limit_s=limit_s,
    )  # fmt: skip
    is_reached = found["cost"] is None
    if case.cost is not None:
        is_reached = found["cost"] is not None and found["cost"] <= case.cost
        is_reached &= found["status"] == "optimal" or not case.is_proof_due
    elif case.is_proof_due:
        is_reached &= found["status"] == "infeasible"
    overhead = "" if found["cost"] is None else f"{100 * found['overhead']:.4f} %"
    print(
        f"{'ok' if is_reached else 'MISSED':8}{case.name:20}{case.budget_bytes:>14} {case.order:6}"
        f"{found['status']:12}{overhead:>12}{found['seconds']:9.1f} s",
        flush=True,
    )
    return is_reached


def main() -> int:
    """Solve all that the folder has."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.cells.references",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds a solve")
    asked = parser.parse_args()
    reached = [check(case, asked.time_limit) for case in cases(asked.folder)]
    if not reached:
        parser.error(f"no reference instance in {asked.folder}")
    print(f"{sum(reached)} of {len(reached)} reached")
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
