"""The recipes of `examples/trainers`, each run as written, with and without its one line.

With the line, every step of the script is a planned one, whose peak is within the budget; without
it, none is. Losses and weights are equal to the last bit. `planned_steps.py` says what counts as a
planned step, and what its peak is.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remat.caches.per_shape_plans import PlanCache
from tests.distributed.launch import torchrun
from tests.paths import ROOT
from tests.remat.planned_steps import Watched, require_libraries, watched
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
    "trl_dpo": ("transformers", "accelerate", "trl"),
    "lightning_fit": ("lightning",),
    "accelerate_loop": ("accelerate",),
    "diffusers_loop": ("diffusers", "accelerate"),
}
STEPS = {
    "plain_loop": 3,
    "nanogpt_loop": 12,
    "hf_trainer": 4,
    "trl_sft": 6,
    "trl_dpo": 6,
    "lightning_fit": 6,
    "accelerate_loop": 3,
    "diffusers_loop": 3,
}
"""Calls of backward in each recipe: all of them are planned steps."""
ON_RANKS = {"nanogpt_loop": 6, "fsdp2_loop": 24}
"""With the planned steps of one process; those of each of the four blocks count by themselves."""


def recipe(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text()


def run(script: str, folder: Path, patch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Watched]:
    """The names that the script leaves behind, and its planned steps; it writes to the folder."""
    if importlib.util.find_spec("accelerate"):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
    folder.mkdir()
    patch.chdir(folder)
    names: dict[str, Any] = {"__name__": "script"}
    with watched() as steps:
        exec(compile(script, str(FOLDER), "exec"), names)
    return names, steps


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
    require_libraries(*NEEDS[name])
    planned, steps = run(recipe(name), tmp_path / "planned", monkeypatch)
    plain, no_steps = run(without_the_line(recipe(name)), tmp_path / "plain", monkeypatch)
    assert len(steps.planned) == steps.backwards == STEPS[name]
    assert (len(no_steps.planned), no_steps.backwards) == (0, STEPS[name])
    require_within_budget(steps)
    assert len(planned["losses"]) > 2
    assert planned["losses"] == plain["losses"]
    model, weights = trained(planned)
    assert any(isinstance(module, PlanCache) for module in model.modules())
    assert not any(isinstance(module, PlanCache) for module in trained(plain)[0].modules())
    expected = trained(plain)[1]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    if "trainer.save_model" in recipe(name):
        kept = tmp_path / "planned" / planned["FOLDER"]
        saved = type(trained(plain)[0]).from_pretrained(kept)
        assert all(torch.equal(saved.state_dict()[key], expected[key]) for key in expected)


def require_within_budget(steps: Watched) -> None:
    """Each planned step had at most its plan's budget live, as measured while the script ran."""
    for step in steps.planned:
        assert step.budget_bytes is not None
        assert 0 < step.peak_bytes <= step.budget_bytes


@pytest.mark.parametrize(
    "reached", ["model.original_module(x)", "type(model.original_module).forward(model, x)"]
)
def test_a_plan_that_the_script_goes_past_is_not_counted(
    reached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = recipe("plain_loop")
    assert "model(x)" in script
    past, steps = run(script.replace("model(x)", reached), tmp_path / "past", monkeypatch)
    assert isinstance(past["model"], PlanCache)
    assert (len(steps.planned), steps.backwards) == (0, STEPS["plain_loop"])


@pytest.mark.slow
def test_lightning_makes_and_plans_its_layers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_libraries(*NEEDS["lightning_fit"])
    names, _ = run(recipe("lightning_fit"), tmp_path / "fit", monkeypatch)
    classifier = names["classifier"]
    model = classifier.model
    classifier.configure_model()
    assert classifier.model is model
    names["trainer"].save_checkpoint("kept.ckpt")
    loaded = names["Classifier"].load_from_checkpoint("kept.ckpt")
    assert isinstance(loaded.model, PlanCache)
    kept, expected = loaded.state_dict(), classifier.state_dict()
    assert all(torch.equal(kept[key], weight) for key, weight in expected.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("switch", ["activation_checkpointing", "gradient_checkpointing"])
def test_a_trainer_may_switch_checkpointing_on_by_either_name(
    switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_libraries(*NEEDS["hf_trainer"])
    from transformers import TrainingArguments

    if switch not in TrainingArguments.__dataclass_fields__:
        pytest.skip(f"this transformers has no {switch}")
    script = recipe("hf_trainer").replace("    bf16=True,", f"    {switch}=True,")
    planned, steps = run(script, tmp_path / "planned", monkeypatch)
    plain, _ = run(without_the_line(script), tmp_path / "plain", monkeypatch)
    assert len(steps.planned) == steps.backwards == STEPS["hf_trainer"]
    require_within_budget(steps)
    assert planned["losses"] == plain["losses"]
    assert planned["model"].transformer.h[0].gradient_checkpointing


WATCHING = """
from tests.remat.planned_steps import watched

_watching = watched()
_steps = _watching.__enter__()
"""
LEAVING = """
from remat.blocks.rematerialized import _plans

kept = getattr(model, "original_module", model)
found = {{"losses": losses, "weights": globals().get("weights", kept.state_dict())}}
found["is_planned"] = kept is not model or model in _plans
_watching.__exit__(None, None, None)
found["n_planned"] = len(_steps.planned)
budgets = [step for step in _steps.planned if step.budget_bytes is not None]
found["peaks"] = [(step.peak_bytes, step.budget_bytes) for step in budgets]
torch.save(found, f"{folder}/{{rank}}.pt")
"""


def on_two_processes(script: str, folder: Path) -> list[dict[str, Any]]:
    """What the script leaves behind on each process: its losses, and the weights of its model."""
    folder.mkdir()
    path = folder / "train.py"
    path.write_text(WATCHING + script + LEAVING.format(folder=str(folder)))
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
        assert (one["n_planned"], expected["n_planned"]) == (ON_RANKS[name], 0)
        # Blocks share one budget, which tests/distributed/test_ranks.py holds them to.
        assert len(one["peaks"]) == (0 if name == "fsdp2_loop" else ON_RANKS[name])
        assert all(0 < peak <= budget for peak, budget in one["peaks"])
        assert len(one["losses"]) > 2
        assert one["losses"] == expected["losses"]
        assert one["weights"].keys() == expected["weights"].keys()
        assert all(torch.equal(one["weights"][key], w) for key, w in expected["weights"].items())
    assert planned[0]["weights"]
    assert planned[0]["losses"] != planned[1]["losses"]
    if planned[1]["weights"]:  # on the first rank alone, where they are gathered
        weights = (one["weights"].values() for one in planned)
        assert all(map(torch.equal, *weights))
