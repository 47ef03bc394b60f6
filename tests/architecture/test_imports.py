"""Who may import whom: no circles, and each package only what CONTRIBUTING.md allows it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.import_graph import PACKAGES, Arrow, arrows, circles, sources
from tests.paths import ROOT
from tests.rows import each_nth

ROW = re.compile(r"^\| `(\w+)/` \| `(remat[.\w]*)` \| .* \| ([^|]+) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def found() -> list[Arrow]:
    return arrows()


RUNNING = (
    "remat.rewriter.compiled",
    "remat.rewriter.plans.loading",
    "remat.rewriter.user_module.module",
)
WINGS = ("remat.baselines", "remat.cluster", "remat.parts", "remat.whole_step")
DOORS = {
    ("remat.cli.report", "remat.cluster"),
    ("remat.cli.run", "remat.whole_step"),
    ("remat.one_call", "remat.whole_step"),
    ("remat.step_planner", "remat.parts"),
}
"""What knows a wing beside the tables that name it in a text, and may not become more."""
SOLVERS = "ortools", "pulp", "highspy", "remat.solver"


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_no_circle_of_imports_not_even_late(found: list[Arrow]) -> None:
    assert circles(found) == set()


def test_no_circle_by_annotations(found: list[Arrow]) -> None:
    assert circles(found, with_annotations=True) == set()


def test_a_wing_has_few_doors(found: list[Arrow]) -> None:
    entered = {
        (arrow.importer, wing)
        for arrow in found
        for wing in WINGS
        if is_in(arrow.imported, wing) and not is_in(arrow.importer, wing)
        if not arrow.is_annotation
    }
    assert entered == DOORS


@pytest.mark.parametrize("indent", each_nth(2, ["def late() -> None:\n    ", ""]))
def test_a_circle_put_in_by_hand_is_found(indent: str, tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    with (tmp_path / "solver" / "problem.py").open("a") as file:
        file.write(f"{indent}import remat.solver.search\n")
    assert frozenset({"remat.solver.problem", "remat.solver.search"}) <= set().union(
        *circles(arrows(tmp_path))
    )


@pytest.mark.parametrize(
    "package", ["remat.solver", "remat.schedules", "remat.graph_capture.graph"]
)
def test_no_torch(package: str, found: list[Arrow]) -> None:
    wrong = [a for a in found if is_in(a.importer, package) and is_in(a.imported, "torch")]
    assert wrong == []


def test_no_package_imports_what_the_table_of_contributing_forbids(found: list[Arrow]) -> None:
    table = ROW.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert [folder for folder, _, _ in table] == [
        "graph_capture", "solver", "schedules", "rewriter", "remat",
    ]  # fmt: skip
    wrong = [
        arrow
        for _, package, never in table
        for name in re.findall(r"\w+", never)
        for arrow in found
        if is_in(arrow.importer, package) and package != "remat"
        if is_in(arrow.imported, "torch" if name == "torch" else f"remat.{name}")
    ]
    assert wrong == []


def test_only_the_public_face_imports_the_public_face(found: list[Arrow]) -> None:
    """Packages below use its `formats` and `html_figures`, which import nothing of ours."""
    below = [f"remat.{package}" for package in PACKAGES if package != "remat"]
    face = [name for name in sources() if not any(is_in(name, package) for package in below)]
    used = {
        arrow.imported
        for arrow in found
        if arrow.imported in face and any(is_in(arrow.importer, package) for package in below)
    }
    assert used <= {"remat.formats"}
    assert not [
        a
        for a in found
        if a.importer in used and is_in(a.imported, "remat")
        if a.imported not in used
    ]


def test_to_load_and_run_a_plan_imports_no_solver() -> None:
    """It takes seconds, and a machine that trains needs none."""
    code = f"import sys, {', '.join(RUNNING)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert "torch" in loaded
    assert [name for name in loaded if any(is_in(name, one) for one in SOLVERS)] == []
