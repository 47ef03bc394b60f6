"""`--device`: planned without owning one, and said so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from remat.formats import bytes_text
from tests.remat.cli.conftest import EXAMPLES, Remat
from tests.rows import rows

QUICK = ("--time-limit", "600")


def test_run_plans_for_a_device_that_is_not_here_and_says_so(remat: Remat) -> None:
    done = remat("run", remat.gpt, "--device", "h100", "--budget", "70%", *QUICK, columns=60)
    assert done.exit_code == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 60
    shown = " ".join(done.stdout.split())
    assert "for NVIDIA H100 SXM5, 80 GB, at the maker's peak rates" in shown
    assert "nothing was run" in shown
    assert "of allocated memory" in shown
    assert "compiled compare with compile=True: " in shown
    assert "bit-identical" not in shown
    assert re.search(r"reserved [\d.]+ MiB predicted \(expandable [\d.]+ MiB\), unmodified", shown)


def test_json_names_the_device_and_measures_nothing(remat: Remat) -> None:
    done = remat("run", remat.gpt, "--device", "l4", *QUICK, "--json")
    said = json.loads(done.stdout)
    assert (said["device"], said["prices"]) == ("l4", "modelled")
    assert said["budget_bytes"] == 21_600_000_000
    assert said["reserved_bytes"] == said["plan"]["predicted_reserved"]["default"]["reserved_bytes"]
    assert said["advice"] == [
        "train without a plan: the unmodified step needs "
        f"{bytes_text(said['baseline']['predicted_reserved']['default']['reserved_bytes'])} and "
        "fits already"
    ]
    assert said["check"] is None
    assert said["plan"]["measured_peak_bytes"] is None
    for row in ("baseline", "chen_sqrt", "plan"):
        for taken in said[row]["predicted_reserved"].values():
            assert said[row]["predicted_peak_bytes"] <= taken["allocated_bytes"]
            assert taken["allocated_bytes"] <= taken["reserved_bytes"]


def test_a_kept_graph_remembers_its_device(remat: Remat, tmp_path: Path) -> None:
    graph = str(tmp_path / "graph.json")
    words = ("--as", "graph", "--device", "a100-40gb", "-o", graph)
    assert remat("show", remat.gpt, *words).exit_code == 0
    said = json.loads(remat("run", graph, "--budget", "auto", *QUICK, "--json").stdout)
    assert said["budget_bytes"] == 36_000_000_000
    assert set(said["plan"]["predicted_reserved"]) == {"default", "expandable"}
    shown = remat("run", graph, *QUICK, columns=200).stdout
    assert "for NVIDIA A100" in shown
    assert "MiB predicted (expandable " in shown


@pytest.mark.parametrize("verb", ["run", "largest-batch", "sweep", "show"])
def test_an_unknown_device_is_refused_before_the_model_is_loaded(remat: Remat, verb: str) -> None:
    done = remat(verb, "no/such/file.py:factory", "--device", "h10")
    assert done.exit_code == 2
    assert "no device 'h10': did you mean h100" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_refused(remat: Remat) -> None:
    done = remat("run", remat.gpt, "--device", "cuda")
    assert done.exit_code == 2
    assert "this torch sees no CUDA device" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("verb", ["run", "sweep", "show", "profile"])
def test_each_verb_refuses_cuda_that_is_not_here(remat: Remat, verb: str) -> None:
    done = remat(verb, remat.gpt, "--device", "cuda:0")
    assert done.exit_code == 2
    assert "this torch sees no CUDA device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_profile_is_measured_not_modelled(remat: Remat) -> None:
    done = remat("profile", remat.gpt, "--device", "h100")
    assert done.exit_code == 2
    assert "profiles are measured, and h100 is only modelled here" in done.stderr


@pytest.mark.slow
def test_a_cpu_reserves_nothing_and_needs_no_advice(remat: Remat) -> None:
    said = json.loads(remat("run", remat.gpt, "--budget", "70%", *QUICK, "--json").stdout)
    assert said["plan"]["measured_peak_bytes"] > 0
    assert said["plan"]["reserved_bytes"] is None
    assert said["plan"]["predicted_reserved"] is None
    assert (said["check"]["advice"], said["check"]["unsteady"]) == ([], [])


def test_a_llama_without_storage_is_planned(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LAYERS": "2", "SEQ": "256", "VOCAB": "1000"}.items():
        monkeypatch.setenv(f"LLAMA_{name}", value)
    done = remat("run", f"{EXAMPLES / 'llama.py'}:factory", "--device", "h100", *QUICK, "--json")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["plan"]["overhead"] == 0.0
    assert said["baseline"]["predicted_peak_bytes"] > 1.7e9


@pytest.mark.slow
def test_a_profile_is_kept_and_used_again(remat: Remat, tmp_path: Path) -> None:
    kept = str(tmp_path / "profile.json")
    done = remat("profile", remat.gpt, "-o", kept, "--top", "3", columns=60)
    assert done.exit_code == 0, done.stderr
    assert "distinct ops on" in " ".join(done.stdout.split())
    said = json.loads(remat("profile", remat.gpt, "--json").stdout)
    assert said["ops"] == len(json.loads(Path(kept).read_text())["ops"])
    for check in ("--check", "--no-check"):
        words = ("--profile", kept, "--budget", "70%", *QUICK)
        done = remat("run", remat.gpt, check, *words, columns=200)
        assert done.exit_code == 0, done.stderr
        assert f"measured on {said['title']} with torch {torch.__version__}" in done.stdout


@pytest.mark.parametrize("verb", rows(["run", "sweep", "show"], lambda verb: verb == "run"))
def test_profiles_that_cannot_serve_are_refused(remat: Remat, tmp_path: Path, verb: str) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"device": "cpu"')
    done = remat(verb, remat.gpt, "--profile", str(broken))
    assert done.exit_code == 2
    assert "broken.json is not a profile of this release" in done.stderr
    assert "Traceback" not in done.stderr
    done = remat(verb, remat.gpt, "--profile", str(tmp_path / "none.json"))
    assert done.exit_code == 2
    assert "none.json: No such file" in done.stderr
    empty = tmp_path / "empty.json"
    empty.write_text('{"device": "cpu", "title": "elsewhere", "torch": "2.0", "ops": {}}')
    done = remat(verb, remat.gpt, "--profile", str(empty))
    assert done.exit_code == 2
    assert "the profile of elsewhere lacks" in done.stderr
    done = remat(verb, remat.gpt, "--device", "h100", "--profile", str(empty))
    assert done.exit_code == 2
    assert "the profile is of cpu, not h100" in done.stderr


def test_a_kept_graph_takes_no_profile(remat: Remat, tmp_path: Path) -> None:
    graph, profile = str(tmp_path / "graph.json"), str(tmp_path / "profile.json")
    assert remat("show", remat.gpt, "--as", "graph", "-o", graph).exit_code == 0
    assert remat("profile", remat.gpt, "-o", profile).exit_code == 0
    done = remat("run", graph, "--profile", profile)
    assert done.exit_code == 2
    assert "leave out --profile, or name a model" in done.stderr
