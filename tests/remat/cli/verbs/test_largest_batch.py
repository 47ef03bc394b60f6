"""`remat largest-batch` on the example GPT, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remat.schedules.plan import PlanFile
from tests.remat.cli.conftest import Remat

WORDS = ("--max-overhead", "0%", "--time-limit", "600", "--budget")


def test_the_answer_is_kept_as_a_plan(remat: Remat, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = remat(
        "largest-batch", remat.gpt, *WORDS, "1MiB", "--no-check", "-o", str(path), "--json"
    )
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["answer"]["fits"]
    assert said["next"]["size"] == said["size"] + 1
    assert not said["next"]["fits"]
    plan = PlanFile.from_json(path.read_bytes())
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes == said["answer"]["peak_bytes"] <= 2**20
    assert plan.schedule.inputs[0].startswith(f"args[0]: int64[{said['size']}, 32]")


@pytest.mark.slow
def test_the_length_of_the_sequence_varies_in_steps(remat: Remat) -> None:
    words = ("--vary", "sequence", "--step", "16", "--most", "48", "--no-check")
    done = remat("largest-batch", remat.gpt, *WORDS, "2MiB", *words, columns=60)
    assert done.exit_code == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 60
    assert "is the largest that fits 2.00 MiB" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_nothing_fits(remat: Remat) -> None:
    lost = remat("largest-batch", remat.gpt, *WORDS, "0.1MiB", "--no-check")
    assert lost.exit_code == 3
    assert "no batch fits" in lost.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--budget", "8 gigs"], "unknown unit 'gigs'"),
        (["--budget", "1MiB", "--max-overhead", "ten"], "overhead 'ten' cannot be read"),
        (["--budget", "1MiB", "--sizes", "8"], "sizes '8' cannot be read: write two, like 8,16"),
        (["--budget", "1MiB", "--vary", "width"], "takes no argument 'width', it takes batch"),
        (["--budget", "60%"], "is different at each size"),
    ],
)
def test_bad_input_is_refused(remat: Remat, words: list[str], says: str) -> None:
    refused = remat("largest-batch", remat.gpt, *words)
    assert refused.exit_code == 2
    assert says in refused.stderr
