"""Two ranks and four, over gloo: the bits of the same wrapper around eager, the predicted peak."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests/distributed/worker.py"
TIMEOUT_S = 1800

Found = list[dict[str, dict[str, Any]]]
"""What each rank found, by case."""


def torchrun(n_ranks: int, *words: str) -> str:
    """Standard output of a script that ran on `n_ranks` ranks, one thread each."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", str(n_ranks), *words],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=TIMEOUT_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def ranks(folder: Path, n_ranks: int, *cases: str, worker: Path = WORKER) -> Found:
    torchrun(n_ranks, str(worker), str(folder), *cases)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n_ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases on two ranks, in one launch, since starting takes longest."""
    return ranks(tmp_path_factory.mktemp("two"), 2)


TRAINED = ("ddp", "ddp_blocks", "fsdp2", "fsdp2_blocks", "fsdp2_blocks_min")


@pytest.mark.parametrize("case", [*TRAINED, "ddp_no_sync"])
def test_gradients_are_those_of_the_wrapped_eager_model(two: Found, case: str) -> None:
    for found in two:
        assert found[case]["same"]
        assert found[case]["n"] == 27


@pytest.mark.parametrize("case", TRAINED)
def test_each_rank_has_the_predicted_peak(two: Found, case: str) -> None:
    for found in two:
        assert found[case]["overhead"] > 0
        predicted_bytes = found[case]["predicted_bytes"]
        assert found[case]["measured_bytes"] == pytest.approx(predicted_bytes, rel=0.02)


@pytest.mark.parametrize("case", TRAINED)
def test_ranks_follow_one_plan(two: Found, case: str) -> None:
    assert two[0][case]["plan"] == two[1][case]["plan"]


REFUSED = {
    "another_step": ("AgreementError", r"the step captured on rank 1 is not that of rank 0"),
    "too_little": ("BudgetError", r"the least that a schedule is known to reach"),
    "sharded_first": ("CaptureError", r"parameter scale is a DTensor: .* make the plan first"),
    "parallelised": ("CaptureError", r"parameter layers\.1\.up\.weight is a DTensor"),
    "sharded_inside": ("RewriteError", r"hook on submodule up \(FSDPLinear\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_on_every_rank(two: Found, case: str) -> None:
    kind, text = REFUSED[case]
    for found in two:
        assert found[case]["error"] == kind
        assert re.search(text, found[case]["text"])


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    for found in ranks(tmp_path, 4, "fsdp2_blocks"):
        assert found["fsdp2_blocks"]["same"]
        predicted_bytes = found["fsdp2_blocks"]["predicted_bytes"]
        assert found["fsdp2_blocks"]["measured_bytes"] == pytest.approx(predicted_bytes, rel=0.02)


@pytest.mark.slow
def test_the_example_trains() -> None:
    said = torchrun(2, "examples/train_fsdp.py")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", said)]
    assert losses[-1] < 0.9 * losses[0]
    peaks = re.findall(r"rank \d: predicted peak ([\d.]+) MiB, measured ([\d.]+) MiB", said)
    assert len(peaks) == 2
    for predicted, measured in peaks:
        assert float(measured) == pytest.approx(float(predicted), rel=0.02)
