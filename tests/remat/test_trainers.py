"""The recipes of `examples/trainers`, each run as written, with and without its one line."""

from __future__ import annotations

import ast
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

PAGE = (ROOT / "docs" / "how-to" / "trainers.md").read_text()
FOLDER = ROOT / "examples" / "trainers"
ONE_LINE = "  # the one line"
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
LINK = re.compile(r"\]\(\.\./\.\./(examples/trainers/\w+\.py)\)")
NEEDS: dict[str, tuple[str, ...]] = {
    "plain_loop": (),
    "nanogpt_loop": (),
    "hf_trainer": ("transformers", "accelerate"),
    "trl_sft": ("transformers", "accelerate", "trl"),
    "lightning_fit": ("lightning",),
    "accelerate_loop": ("accelerate",),
    "diffusers_loop": ("diffusers", "accelerate"),
}
ON_RANKS = ("nanogpt_loop", "fsdp2_loop")


def recipe(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text()


def run(script: str, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the script leaves behind; it writes below the folder."""
    if "accelerate" in script:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
    folder.mkdir()
    patch.chdir(folder)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, str(FOLDER), "exec"), names)
    return names


def trained(names: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    model = names.get("classifier", names.get("model"))
    return model, model.state_dict()


def without_the_line(script: str) -> str:
    lines = script.splitlines(keepends=True)
    others = [line for line in lines if ONE_LINE not in line]
    assert len(others) == len(lines) - 1
    ast.parse("".join(others))
    return "".join(others)


def test_every_section_shows_its_recipe_and_every_recipe_is_run() -> None:
    linked = [LINK.findall(text) for text in SECTIONS.values()]
    assert all(len(paths) == 1 for paths in linked)
    recipes = {str(path.relative_to(ROOT)) for path in FOLDER.glob("*.py")}
    assert sorted(path for (path,) in linked) == sorted(recipes)
    assert {Path(path).stem for path in recipes} == {*NEEDS, *ON_RANKS}


@pytest.mark.parametrize("title", SECTIONS)
def test_what_a_section_shows_is_in_its_recipe(title: str) -> None:
    (path,) = LINK.findall(SECTIONS[title])
    (shown,) = re.findall(r"```python\n(.*?)```", SECTIONS[title], re.DOTALL)
    assert ONE_LINE in shown
    assert shown in (ROOT / path).read_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", rows(NEEDS, lambda name: name == "plain_loop"))
def test_losses_and_weights_are_those_without_the_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = [needed for needed in NEEDS[name] if importlib.util.find_spec(needed) is None]
    if missing:
        pytest.skip(f"without {' and '.join(missing)}: pip install 'remat[trainers]'")
    if NEEDS[name]:
        from tests.zoo.case import _name_ops_of_torchvision

        _name_ops_of_torchvision()
    planned = run(recipe(name), tmp_path / "planned", monkeypatch)
    plain = run(without_the_line(recipe(name)), tmp_path / "plain", monkeypatch)
    assert len(planned["losses"]) > 2
    assert planned["losses"] == plain["losses"]
    model, weights = trained(planned)
    assert any(isinstance(module, PlanCache) for module in model.modules())
    assert not any(isinstance(module, PlanCache) for module in trained(plain)[0].modules())
    expected = trained(plain)[1]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    if name == "hf_trainer":
        kept = tmp_path / "planned" / planned["FOLDER"]
        saved = type(model.original_module).from_pretrained(kept)
        assert all(torch.equal(saved.state_dict()[key], expected[key]) for key in expected)


LEAVING = """
from remat.blocks.rematerialized import _plans

kept = getattr(model, "original_module", model)
found = {{"losses": losses, "weights": globals().get("weights", kept.state_dict())}}
found["is_planned"] = kept is not model or model in _plans
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
@pytest.mark.parametrize("name", ON_RANKS)
def test_on_two_processes_losses_and_weights_are_those_without_the_line(
    name: str, tmp_path: Path
) -> None:
    planned = on_two_processes(recipe(name), tmp_path / "planned")
    plain = on_two_processes(without_the_line(recipe(name)), tmp_path / "plain")
    for one, expected in zip(planned, plain, strict=True):
        assert (one["is_planned"], expected["is_planned"]) == (True, False)
        assert len(one["losses"]) > 2
        assert one["losses"] == expected["losses"]
        assert one["weights"].keys() == expected["weights"].keys()
        assert all(torch.equal(one["weights"][key], w) for key, w in expected["weights"].items())
    assert planned[0]["weights"]
    assert planned[0]["losses"] != planned[1]["losses"]
    if planned[1]["weights"]:  # on the first rank alone, where they are gathered
        weights = (one["weights"].values() for one in planned)
        assert all(map(torch.equal, *weights))
