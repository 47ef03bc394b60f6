"""What is no plan for a cluster is refused before any rank is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import remat
from remat.graph_capture.errors import FileError, PlanError

WAY_OUT = r"remat cluster"


@pytest.mark.parametrize("plan", [{"a": 1}, None, 3, b"plan.json"])
def test_another_type_is_named(plan: Any) -> None:
    kind = type(plan).__name__
    with pytest.raises(PlanError, match=f"{WAY_OUT}.*{kind} is not a plan for a cluster"):
        remat.cluster.cluster_mesh(plan)


def test_a_file_that_is_no_plan_or_not_there(tmp_path: Path) -> None:
    stale = tmp_path / "stale.json"
    stale.write_text('{"schema_version": 99}')
    with pytest.raises(PlanError, match=f"{WAY_OUT}.*stale.json has schema version 99"):
        remat.cluster.cluster_mesh(stale)
    with pytest.raises(FileError, match=r"gone\.json"):
        remat.cluster.cluster_mesh(str(tmp_path / "gone.json"))
