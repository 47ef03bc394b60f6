"""How a model is named, in every verb that takes one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.remat.cli.conftest import Remat

ALL = ("--budget", "100%")
WORDS = {
    "run": ("run", *ALL), "solved": ("run", *ALL, "--no-check"), "sweep": ("sweep", *ALL),
    "largest-batch": ("largest-batch", "--budget", "1MiB", "--most", "4"),
    "show": ("show",), "explained": ("show", "--explain", *ALL),
    "captured": ("show", "--as", "graph"), "exported": ("show", *ALL, "-o", "plan.dot"),
    "rewritten": ("show", "--plan", "plan.json", "--as", "code"),
    "report": ("report", *ALL, "-o", "page.html"), "check": ("check", "plan.json"),
    "profile": ("profile",),
}  # fmt: skip
MODELS = """
import torch

def build(batch=2):
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.ones(batch, 2)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


def said_of(verb: str, model: str) -> tuple[str, ...]:
    """The words of a verb with its model."""
    name, *words = WORDS[verb]
    return name, model, *words


def keep_a_plan(verb: str, model: str, remat: Remat) -> None:
    """The plan that the words of a verb name, if they do."""
    if "plan.json" in WORDS[verb]:
        assert remat("run", model, "--no-check", *ALL, "-o", "plan.json").exit_code == 0


@pytest.mark.parametrize("verb", WORDS)
def test_a_file_alone_that_has_no_factory_is_told_what_it_has(
    verb: str, remat: Remat, folder: Path
) -> None:
    keep_a_plan(verb, "models.py:build", remat)
    refused = remat(*said_of(verb, "models.py"))
    assert refused.exit_code == 2
    assert "models.py has no function factory. It has build: name the one" in refused.stderr
    assert "such as models.py:build" in refused.stderr


@pytest.mark.parametrize("verb", WORDS)
def test_a_file_alone_is_its_factory(verb: str, remat: Remat, folder: Path) -> None:
    (folder / "models.py").write_text(MODELS.replace("build", "factory"))
    keep_a_plan(verb, "models.py", remat)
    done = remat(*said_of(verb, "models.py"))
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize("verb", ["rewritten", "check"])
def test_a_result_without_a_schedule_is_no_plan(verb: str, remat: Remat, folder: Path) -> None:
    lost = remat("run", "models.py:build", "--budget", "100B", "--json", "-o", "plan.json")
    assert lost.exit_code == 3
    assert not (folder / "plan.json").exists()
    (folder / "plan.json").write_text(lost.stdout)
    refused = remat(*said_of(verb, "models.py:build"))
    assert refused.exit_code == 2
    assert "plan.json is not a plan of this release" in refused.stderr
    assert "remat run MODEL --budget BUDGET -o FILE" in refused.stderr
