"""Whole steps of published systems: the kept rows, and a small case planned anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.papers import tiers
from benchmarks.papers.tiers import CASES, PUBLISHED, Case
from remat.graph_capture.devices.known_devices import modelled_device
from remat.whole_step.step_config import NAMED_SYSTEMS

SMALL = Case("rtx4090", 3, 128, 2, 2, "1GiB", vocab=128, seq=64)


def test_each_published_figure_has_its_case_planned() -> None:
    kept = tiers.kept_cases()
    assert list(kept) == list(CASES)
    assert {one.case for one in PUBLISHED if one.case} == set(CASES)
    assert {one.system for one in PUBLISHED if one.system} == set(NAMED_SYSTEMS)
    lines = list(tiers.lines(kept))
    assert len(lines) == len(PUBLISHED) + 2
    assert all(one.figure in line for one, line in zip(PUBLISHED, lines[2:], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_no_kept_step_is_above_its_bound_or_its_card(name: str) -> None:
    case, device = tiers.kept_cases()[name], modelled_device(CASES[name].device)
    ours = case["steps"]["ours"]
    for one in case["steps"].values():
        if "needs" not in one:
            assert one["tflops"] <= min(case["bound_tflops"], ours["tflops"]) * (1 + 1e-9)
            assert one["ran_tflops"] <= device.tflops["float16"]
            assert one["peak_bytes"] <= device.memory_bytes


@pytest.mark.parametrize("drives", [0, 4])
def test_a_case_is_planned_and_kept(
    drives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(**{**vars(SMALL), "drives": drives})
    monkeypatch.setattr(tiers, "CASES", {"small": case})
    monkeypatch.setattr(tiers, "RESULTS", tmp_path / "tiers.json")
    tiers.main([])
    kept = json.loads((tmp_path / "tiers.json").read_text())["small"]
    assert kept["tokens"] == 2 * 2 * 64
    assert kept["steps"]["ours"]["tflops"] <= kept["bound_tflops"]
    assert "| 1.33 times DeepSpeed, 48 A100 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tiers.main(["large"])
    assert "no case large: choose of small" in capsys.readouterr().err
