"""The verb `report` and the files of `show`: from a plan alone, and with what they refuse."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from remat.formats import bytes_text
from remat.schedules.plan import PlanFile
from remat.schedules.simulate import simulate
from tests.remat.cli.conftest import SIZES, Remat


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the example GPT, with its graph."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIZES.items():
            patch.setenv(f"GPT_{name}", value)
        words = (
            "run",
            Remat.gpt,
            "--no-check",
            "--budget",
            "70%",
            "--time-limit",
            "600",
            "-o",
            str(path),
        )
        done = Remat()(*words)
    assert done.exit_code == 0, done.stderr
    return path


def test_a_plan_alone_is_reported_without_torch(kept: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code = (
        "import sys; from remat.cli.main import app\n"
        f"app(['report', {str(kept)!r}, '-o', {str(page)!r}, '--json'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    plan = PlanFile.from_json(kept.read_bytes())
    assert plan.graph is not None
    assert plan.prediction is not None
    found = simulate(plan.graph, plan.schedule)
    summary = json.loads(done.stdout)["summary"]
    assert summary["peak_bytes"] == found.peak_bytes
    # What the file says was proved is not taken for proved.
    assert plan.prediction.lower_bound_us > plan.graph.time_us
    assert summary["lower_bound_us"] == pytest.approx(plan.graph.time_us)
    assert "a file proves nothing" in json.loads(done.stdout)["note"]
    assert "a file proves nothing" in page.read_text()
    assert "a file proves nothing" not in done.stderr
    assert bytes_text(found.peak_bytes) in page.read_text()


def test_a_front_goes_into_the_report(remat: Remat, kept: Path, tmp_path: Path) -> None:
    front, page = tmp_path / "front.json", tmp_path / "report.html"
    graph = tmp_path / "graph.json"
    plan = PlanFile.from_json(kept.read_bytes())
    assert plan.graph is not None
    graph.write_bytes(plan.graph.to_json())
    words = ("--budgets", "70%,80%", "--time-limit", "600", "-o", str(front))
    for solvers in (("cut",), ("dtr", "chen_sqrt")):
        chosen = [word for solver in solvers for word in ("--solver", solver)]
        assert remat("sweep", str(graph), *words, *chosen).exit_code == 0
        done = remat("report", str(kept), "--front", str(front), "-o", str(page))
        assert done.exit_code == 0, done.stderr
        assert f"report written to {page}" in done.stderr.replace("\n", "")
        text = page.read_text()
        assert "the best found at several budgets" in text
        assert all(f'"{solver}":[' in text for solver in solvers)
        # Anyone can edit the file.
        assert "bound stated by front.json, not proved" in text
    broken = remat("report", str(kept), "--front", str(kept), "-o", str(page))
    assert broken.exit_code == 2
    assert "is not a front of a sweep" in broken.stderr


def test_exports_follow_the_suffix(remat: Remat, kept: Path, tmp_path: Path) -> None:
    for name in ("step.pickle", "step.trace.json", "step.dot"):
        done = remat("show", str(kept), "-o", str(tmp_path / name))
        assert done.exit_code == 0, done.stderr
    assert pickle.loads((tmp_path / "step.pickle").read_bytes())["device_traces"]
    assert json.loads((tmp_path / "step.trace.json").read_bytes())["traceEvents"]
    assert (tmp_path / "step.dot").read_text().startswith("digraph")
    done = remat("show", str(kept), "-o", str(tmp_path / "step"), "--as", "trace", "--json")
    assert json.loads(done.stdout) == {"export": str(tmp_path / "step"), "as": "trace"}


def test_a_model_can_be_drawn_and_needs_a_plan_for_the_rest(remat: Remat, tmp_path: Path) -> None:
    drawing = tmp_path / "step.dot"
    assert remat("show", remat.gpt, "-o", str(drawing)).exit_code == 0
    assert "blocks.1" in drawing.read_text()
    for verb, name in (("show", "step.pickle"), ("report", "step.html")):
        done = remat(verb, remat.gpt, "-o", str(tmp_path / name))
        assert done.exit_code == 2
        assert "name a plan" in done.stderr
        assert not (tmp_path / name).exists()


def test_what_cannot_be_written_is_refused_at_once(
    remat: Remat, kept: Path, tmp_path: Path
) -> None:
    done = remat("report", str(kept), "-o", str(tmp_path / "nowhere" / "report.html"))
    assert done.exit_code == 2
    assert "cannot write report.html: there is no folder" in done.stderr
    done = remat("report", str(kept), "-o", str(tmp_path))
    assert f"name a file in it: {tmp_path} is a folder" in done.stderr
    done = remat("show", str(kept), "-o", str(tmp_path / "step.svg"))
    assert done.exit_code == 2
    assert "a name that ends in .pickle (memory snapshot), .trace.json" in done.stderr
    assert "--as graph|code|snapshot|trace|dot" in done.stderr


def test_an_edited_or_stale_plan_is_refused(remat: Remat, kept: Path, tmp_path: Path) -> None:
    said = json.loads(kept.read_bytes())
    said["prediction"]["peak_bytes"] -= 1
    edited, page = tmp_path / "edited.json", tmp_path / "report.html"
    edited.write_text(json.dumps(said))
    done = remat("report", str(edited), "-o", str(page))
    assert done.exit_code == 2
    assert "was edited, or is stale: it says peak_bytes" in done.stderr
    said = json.loads(kept.read_bytes())
    del said["schedule"]["steps"][3]
    edited.write_text(json.dumps(said))
    done = remat("show", str(edited), "-o", str(tmp_path / "step.pickle"))
    assert done.exit_code == 2
    assert "was edited, or is stale: invalid schedule at step" in done.stderr
    assert not page.exists()


def test_nothing_fits_is_no_report(remat: Remat, kept: Path, tmp_path: Path) -> None:
    plan = PlanFile.from_json(kept.read_bytes())
    assert plan.graph is not None
    graph = tmp_path / "graph.json"
    graph.write_bytes(plan.graph.to_json())
    words = ("--budget", "1KiB", "--time-limit", "600", "-o", str(tmp_path / "report.html"))
    done = remat("report", str(graph), *words)
    assert done.exit_code == 3
    assert "budget 1.0 KiB is below" in done.stderr


def test_measuring_needs_the_model_here(remat: Remat, kept: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = remat("report", str(kept), "--measure", "-o", str(page))
    assert done.exit_code == 2
    assert f"--measure runs a step, and {kept} has no model" in done.stderr.replace("\n", "")
    done = remat("report", remat.gpt, "--budget", "80%", "--device", "h100", "--measure", "-o",
                 str(page))  # fmt: skip
    assert "leave out --device and --sharding: --measure runs a step" in done.stderr
    assert not page.exists()


def test_a_measured_step_is_in_the_report(remat: Remat, kept: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = remat("report", remat.gpt, "--plan", str(kept), "--measure", "--json", "-o", str(page))
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout)["summary"]
    assert summary["measured_peak_bytes"] <= summary["peak_bytes"]
    assert summary["measured_peak_bytes"] > 0.95 * summary["peak_bytes"]
    assert summary["measured_time_us"] > 0
    assert "this plan, measured" in page.read_text()
