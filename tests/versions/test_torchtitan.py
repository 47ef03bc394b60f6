"""`examples/torchtitan`: its debug model trains within the budget, to torchtitan's own losses.

It runs in an environment of its own, which `make test-versions` makes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.paths import ROOT
from tests.remat.planned_steps import MUST_RUN
from tests.versions.environment import CACHE, DONE, TORCHTITAN, python_with_torchtitan

SCRIPT = "examples/torchtitan/train.py"
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def train() -> Run:
    """Trains by the words of the script's command line; what each rank found."""
    if not ((CACHE / TORCHTITAN.replace("==", "-") / DONE).exists() or os.environ.get(MUST_RUN)):
        pytest.skip("without torchtitan: make test-versions installs it")
    python = str(python_with_torchtitan())
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    @cache
    def run(n_ranks: int, *words: str) -> list[dict[str, Any]]:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
        command = [python, *(launch if n_ranks > 1 else []), SCRIPT, *words]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **ours}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize(("trainer", "above"), [("core", 0.06), ("graph", 0.001)])
def test_ten_steps_within_the_budget_and_torchtitans_losses(
    train: Run, trainer: str, above: float, n_ranks: int
) -> None:
    plain, planned = train(n_ranks, trainer), train(n_ranks, trainer, "remat", "60%")
    assert len(plain) == len(planned) == n_ranks
    for without, found in zip(plain, planned, strict=True):
        assert found["losses"] == without["losses"]
        assert len(set(found["losses"])) == 10
        assert found["measured_bytes"] <= found["budget_bytes"] < without["measured_bytes"]
        predicted_bytes = found["predicted_bytes"]
        assert found["measured_bytes"] <= predicted_bytes <= found["budget_bytes"]
        # `fully_shard` of the embedding by itself takes less than the plan counts for the root.
        assert predicted_bytes <= found["measured_bytes"] * (1 + above)


@pytest.mark.slow
def test_both_trainers_have_the_same_losses(train: Run) -> None:
    assert train(1, "core")[0]["losses"] == train(1, "graph")[0]["losses"]


@pytest.mark.slow
def test_at_the_peak_of_a_policy_of_torchtitan_a_plan_is_no_slower(train: Run) -> None:
    (theirs,) = train(1, "graph", "default")
    (ours,) = train(1, "graph", "remat", f"{theirs['predicted_bytes']}B")
    assert ours["measured_bytes"] <= theirs["measured_bytes"]
    assert ours["time_us"] <= theirs["time_us"]
    assert ours["losses"] == theirs["losses"]
