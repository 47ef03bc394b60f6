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
from tests.paths import ROOT

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


def test_every_section_has_one_script() -> None:
    assert SCRIPTS.keys() == NEEDS.keys()
    assert all(len(scripts) == 1 for scripts in SCRIPTS.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", NEEDS)
def test_losses_and_weights_are_those_without_the_line(title: str, tmp_path: Path) -> None:
    missing = [name for name in NEEDS[title] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"without {' and '.join(missing)}: pip install 'remat[trainers]'")
    if NEEDS[title]:
        from tests.zoo.case import _name_ops_of_torchvision

        _name_ops_of_torchvision()
    (script,) = SCRIPTS[title]
    lines = script.splitlines(keepends=True)
    added = [line for line in lines if ONE_LINE in line]
    assert len(added) == 1
    planned = run(script, tmp_path / "planned")
    plain = run("".join(line for line in lines if line not in added), tmp_path / "plain")
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
