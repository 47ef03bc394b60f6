"""``--dynamic``: plans for ranges of sizes, on the screen, as JSON and in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.remat.cli.conftest import Remat, verdict_on

SEQ = ("--dynamic", "tokens:1=seq:8:32", "--dynamic", "targets:1=seq:8:32")
QUICK = ("--time-limit", "600", "--solver", "cut")


TINY = """
import torch
def factory():
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(16, 16), torch.nn.GELU())]
    return {
        "model": torch.nn.Sequential(*layers), "args": (torch.randn(512, 16),),
        "loss_fn": lambda out: out.square().mean(),
    }
"""


def test_run_prints_range_curve_and_certificate_and_checks(remat: Remat, tmp_path: Path) -> None:
    file = tmp_path / "tiny.py"
    file.write_text(TINY)
    kept, model = str(tmp_path / "plan.json"), str(file)
    ranges = ("--dynamic", "input:0=seq:8:512")
    done = remat("run", model, "--budget", "90%", *ranges, *QUICK, "-o", kept)
    assert done.exit_code == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "Sequential over seq from 8 to 512, budget" in words
    assert words.count("seq 8 ") == 1
    assert "certificate no size needs more than" in words
    assert "by the largest sizes" in words
    assert "gradients bit-identical, outputs equal, buffers equal, rng equal at seq 512" in words
    page = tmp_path / "report.html"
    assert remat("report", kept, "-o", str(page)).exit_code == 0
    assert words.endswith(verdict_on(page))
    assert "8 of 8 gradients equal. Times are of the largest sizes." in words

    said = json.loads(remat("show", kept, "--json").stdout)["range"]
    assert said["symbols"] == [{"name": "seq", "low": 8, "high": 512, "multiple": 1}]
    assert len(said["curve"]) == 10
    assert max(one["peak_bytes"] for one in said["curve"]) <= said["peak_bytes"]
    assert said["peak_bytes"] <= said["budget_bytes"]
    assert "certificate" in remat("show", kept).stdout

    checked = remat("check", model, kept, "--json")
    assert checked.exit_code == 0, checked.stderr
    assert json.loads(checked.stdout)["check"]["gradients_equal"]


@pytest.mark.slow
def test_a_gpt_is_run_over_lengths(remat: Remat) -> None:
    done = remat("run", remat.gpt, "--budget", "70%", *SEQ, *QUICK)
    assert done.exit_code == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "GPT over seq from 8 to 32, budget" in words
    assert "28 of 28 gradients bit-identical" in words


@pytest.mark.slow
def test_a_range_that_is_not_run_is_one_object(remat: Remat) -> None:
    done = remat("run", remat.gpt, "--no-check", "--budget", "70%", *SEQ, *QUICK, "--json")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["range"]["certificate"] == "largest sizes"
    assert said["sizes"] == {"seq": 32}
    assert said["check"] is None


@pytest.mark.slow
def test_what_fits_at_no_schedule_of_the_largest_sizes_ends_as_infeasible(remat: Remat) -> None:
    done = remat("run", remat.gpt, "--no-check", "--budget", "200KiB", *SEQ, *QUICK, "--json")
    assert done.exit_code == 3
    said = json.loads(done.stdout)["error"]
    assert said["type"] == "TooLargeError"
    assert "seq" in said["message"]


@pytest.mark.slow
def test_a_batch_out_of_the_range_is_not_run(remat: Remat) -> None:
    ranges = ("--dynamic", "tokens:1=seq:8:16", "--dynamic", "targets:1=seq:8:16")
    done = remat("run", remat.gpt, "--budget", "70%", *ranges, *QUICK)
    assert done.exit_code == 0, done.stderr
    assert "the factory's batch is out of the range" in " ".join(done.stdout.split())


REFUSED = {
    "a range with 1": (("tokens:1=seq:1:32",), "begin the range at 2"),
    "no number": (("tokens:1=seq:a:32",), "must be whole numbers"),
    "no range": (("tokens:1=seq:32:8",), "not a range of sizes"),
    "an unknown argument": (("words:1=seq:8:32",), "dynamic names 'words'"),
    "an unknown dimension": (("tokens:5=seq:8:32",), "dimension 5 of 'tokens'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_vary_is_refused_in_one_line(remat: Remat, case: str) -> None:
    texts, why = REFUSED[case]
    options = [word for text in texts for word in ("--dynamic", text)]
    done = remat("run", remat.gpt, "--budget", "70%", *options)
    assert done.exit_code == 2
    lines = [line for line in done.stderr.splitlines() if not line.endswith("...")]
    assert len(lines) == 1
    assert why in lines[0]


@pytest.mark.slow
def test_a_dimension_that_the_model_fixes_is_named(remat: Remat, tmp_path: Path) -> None:
    file = tmp_path / "fixed.py"
    file.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return self.linear(x.view(16, 8)).square().mean()\n"
        "def factory():\n"
        "    return Net(), (torch.randn(16, 8),)\n"
    )
    done = remat("run", str(file), "--budget", "70%", "--dynamic", "x:0=rows:4:16")
    assert done.exit_code == 2
    assert "fixed.py:7" in done.stderr


def test_what_is_of_one_size_is_refused_beside_it(remat: Remat, tmp_path: Path) -> None:
    options = ("--price-of-gib", f"--layout={tmp_path / 'layout.json'}", "--optimizer-in-backward")
    for option in (*options, "--compare"):
        done = remat("run", remat.gpt, *SEQ, option, "--optimizer", "sgd")
        assert done.exit_code == 2
        assert f"{option.partition('=')[0]} needs a plan of one size" in done.stderr
    done = remat("run", "graph.json", *SEQ)
    assert done.exit_code == 2
    assert "leave out --dynamic, or name a model" in done.stderr
