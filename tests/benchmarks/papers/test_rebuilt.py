"""Lines of published jobs: a network captured for a device, and a graph read from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import remat
from benchmarks.papers import __main__ as command
from benchmarks.papers import networks, systems
from benchmarks.papers.published import Figure, Job
from benchmarks.papers.rebuilt import Line, lines_of
from remat.budgets import unmodified
from tests.limits import AMPLE_S

SMALL = Job(
    "small", "dtr", "v100", "[a source](https://example.org)",
    (Figure("small, 80 %", "DTR", 0.5, 0.8), Figure("small, nothing", "DTR", 0.5, 0.01)),
    lambda: networks.cifar_resnet(2, 8),
)  # fmt: skip
CHAIN = {
    "nodes": [{"id": i, "cost": 1, "bytes": 10} for i in range(6)],
    "edges": [[i, i + 1] for i in range(5)] + [[0, 5]],
}


def test_a_network_is_planned_at_a_share_of_its_peak() -> None:
    fits, none = lines_of(SMALL, None, AMPLE_S)
    graph = remat.capture(**networks.cifar_resnet(2, 8), device="v100", split="none")
    assert fits.budget_bytes == int(0.8 * unmodified(graph).peak_bytes)
    assert fits.ops == len(graph.ops)
    assert fits.overhead is not None
    assert fits.policy_overhead is not None
    assert fits.bound_overhead <= fits.overhead <= fits.policy_overhead
    assert (none.overhead, none.policy_overhead, none.gap) == (None, None, None)
    assert none.status == "infeasible"


def test_a_published_graph_is_read_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "chain.json").write_text(json.dumps(CHAIN))
    figures = (Figure("chain", "a method", 0.2, budget_bytes=30),)
    job = Job("chain", "instance", "", "", figures, file="chain.json")
    assert list(lines_of(job, None, AMPLE_S)) == []
    (line,) = lines_of(job, tmp_path, AMPLE_S)
    assert (line.status, line.overhead, line.policy_overhead) == ("optimal", 0.0, None)


def test_lines_are_kept_as_they_are_solved_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (systems, command):
        monkeypatch.setattr(place, "JOBS", (SMALL,))
        monkeypatch.setattr(place, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(systems, "RESULTS", tmp_path / "papers.json")
    monkeypatch.setattr(systems, "parts", list)  # their rows are of the kept lines
    command.main(["small", "--time-limit", str(AMPLE_S)])
    once = systems.kept_lines()
    command.main([])
    again = systems.kept_lines()
    assert [shown(line) for line in again] == [shown(line) for line in once]
    text = (tmp_path / "page.md").read_text()
    assert text == systems.text_of(again)
    assert "|small, nothing|1 %|DTR|50.0 %|-|nothing found|" in text


def shown(line: Line) -> tuple[str, float | None, float | None]:
    return line.name, line.overhead, line.policy_overhead


def test_an_unknown_job_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["nothing"])
    assert "no job nothing: choose of ResNet-32, " in capsys.readouterr().err
