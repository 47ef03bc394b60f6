"""The scripts of `docs/trainers.md`, each run with and without its one line."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remat.several_shapes import PlanCache
from tests.distributed.launch import torchrun
from tests.paths import ROOT
from tests.rows import rows

PAGE = ROOT / "docs" / "trainers.md"
ONE_LINE = "  # the one line"
SCRIPTS = {
    title.strip(): re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
}
NEEDS = {
    "A plain loop": (),
    "nanoGPT's loop": (),
    "Hugging Face Trainer": ("transformers", "accelerate"),
    "TRL": ("transformers", "accelerate", "trl"),
    "Lightning": ("lightning",),
    "Accelerate": ("accelerate",),
    "Diffusers": ("diffusers", "accelerate"),
}


def run(script: str, folder: Path) -> dict[str, Any]:
    """The names that the script leaves behind."""
    if "accelerate" in script:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
    names: dict[str, Any] = {"folder": str(folder), "__name__": "script"}
    exec(compile(script, str(PAGE), "exec"), names)
    return names


def trained(names: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    model = names.get("classifier", names.get("model"))
    return model, model.state_dict()


def without_the_line(script: str) -> str:
    lines = script.splitlines(keepends=True)
    others = [line for line in lines if ONE_LINE not in line]
    assert len(others) == len(lines) - 1
    return "".join(others)


def test_every_section_has_one_script() -> None:
    assert SCRIPTS.keys() == NEEDS.keys()
    assert all(len(scripts) == 1 for scripts in SCRIPTS.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", rows(NEEDS, lambda title: title == "A plain loop"))
def test_losses_and_weights_are_those_without_the_line(title: str, tmp_path: Path) -> None:
    missing = [name for name in NEEDS[title] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"without {' and '.join(missing)}: pip install 'remat[trainers]'")
    if NEEDS[title]:
        from tests.zoo.case import _name_ops_of_torchvision

        _name_ops_of_torchvision()
    (script,) = SCRIPTS[title]
    planned = run(script, tmp_path / "planned")
    plain = run(without_the_line(script), tmp_path / "plain")
    assert len(planned["losses"]) > 2
    assert planned["losses"] == plain["losses"]
    model, weights = trained(planned)
    assert any(isinstance(module, PlanCache) for module in model.modules())
    expected = trained(plain)[1]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    if title == "Hugging Face Trainer":
        saved = type(model.original_module).from_pretrained(planned["folder"])
        assert all(torch.equal(saved.state_dict()[name], expected[name]) for name in expected)


LEAVING = """
kept = getattr(model, "original_module", model)
is_planned = kept is not model
found = {{"losses": losses, "weights": kept.state_dict(), "is_planned": is_planned}}
torch.save(found, f"{folder}/{{rank}}.pt")
"""


def on_two_processes(script: str, folder: Path) -> list[dict[str, Any]]:
    """What the script leaves behind on each process: its losses, and the weights of its model."""
    folder.mkdir()
    path = folder / "train.py"
    path.write_text(script + LEAVING.format(folder=str(folder)))
    torchrun(2, "tests/distributed/script.py", str(path))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_nanogpts_loop_on_two_processes(tmp_path: Path) -> None:
    (script,) = SCRIPTS["nanoGPT's loop"]
    planned = on_two_processes(script, tmp_path / "planned")
    plain = on_two_processes(without_the_line(script), tmp_path / "plain")
    for one, expected in zip(planned, plain, strict=True):
        assert (one["is_planned"], expected["is_planned"]) == (True, False)
        assert one["losses"] == expected["losses"]
        assert one["weights"].keys() == expected["weights"].keys()
        assert all(torch.equal(one["weights"][n], w) for n, w in expected["weights"].items())
    assert planned[0]["losses"] != planned[1]["losses"]
    weights = (one["weights"].values() for one in planned)
    assert all(map(torch.equal, *weights))
