"""The tutorial shows what its commands printed, in one run that is kept."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks import tutorial


@pytest.fixture(scope="module")
def text() -> str:
    return tutorial.PAGE.read_text()


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return json.loads(tutorial.RESULTS.read_text())


def test_the_page_shows_the_outputs_that_are_kept(text: str, kept: dict[str, Any]) -> None:
    assert tutorial.written_into(text, kept) == text
    assert f"torch {kept['torch']}, {kept['date']}.\n" in text


def test_the_outputs_are_of_one_plan_that_keeps_to_the_budget(kept: dict[str, Any]) -> None:
    ran, explained, trained = (kept["outputs"][name] for name in tutorial.STEPS)
    (budget,) = re.findall(r"budget ([\d.]+) MiB", ran)
    (peak,) = re.findall(r"^this plan +([\d.]+) \|", ran, re.MULTILINE)
    assert float(peak) <= float(budget)
    assert f"peak {peak} MiB of {budget} MiB" in explained
    equal, total = re.findall(r"^equal +(\d+) of (\d+) gradients", ran, re.MULTILINE)[0]
    assert equal == total
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", trained)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def test_files_and_commands_are_those_of_the_page(text: str) -> None:
    assert list(tutorial.files(text)) == ["mine.py", "train.py"]
    assert tutorial.command(text, "remat run").startswith("remat run mine.py:factory --budget 60%")
    assert tutorial.command(text, tutorial.EXPLAIN) == tutorial.EXPLAIN
    for name, source in tutorial.files(text).items():
        compile(source, name, "exec")


def test_a_page_with_other_outputs_is_refused(text: str, kept: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="other outputs than those of remat run"):
        tutorial.written_into(text + "\n```text\nmore\n```\n", kept)
