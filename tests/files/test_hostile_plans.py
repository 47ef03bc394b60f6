"""A plan file with code in it: none is run, whichever place it is put in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from tests.files.kinds import plan

CODE = "__import__('pathlib').Path({mark!r}).touch()"
"""Whoever evaluates this leaves a file."""
PLACES: dict[str, list[str | int]] = {
    "a number of the batch": ["batch", "leaves", 1, "text"],
    "a dtype of the batch": ["batch", "leaves", 0, "dtype"],
    "the device of the batch": ["batch", "leaves", 0, "device"],
    "a parameter's name": ["state", 0, "name"],
    "the dtype of autocast": ["autocast", 0, "dtype"],
    "a step": ["schedule", "steps", 0, 1],
    "the target of an op": ["over", "graph", "base", "ops", 0, "target"],
    "the size of a value": ["over", "graph", "extents", "addmm", "size_bytes"],
    "a dimension": ["over", "graph", "extents", "addmm", "shape", 0],
    "the bytes of the batch": ["over", "graph", "batch_bytes", 0],
    "a condition on sizes": ["over", "graph", "guards"],
    "the name of a size": ["over", "family", "symbols", 0, "name"],
    "a corner": ["over", "family", "members", 0, "corners"],
    "the container of the batch": ["batch", "tree"],
    "what was equal": ["check", "outputs_equal"],
    "how it was rounded": ["check", "rounding"],
}
TREE = '[1, {{"type": {type}, "context": {context}, "children_spec": []}}]'
CONTAINERS = [("posix.system", CODE), ("builtins.eval", CODE), ("collections.namedtuple", CODE)]


class Scaled(nn.Sequential):
    def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
        return super().forward(x) * by


def model() -> nn.Module:
    torch.manual_seed(0)
    return Scaled(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A plan over a range, whose file has all kinds of text."""
    args = (torch.randn(6, 4), 0.5)
    given = model()
    step = remat.capture(given, args, dynamic={"x": {0: ("n", 2, 8)}})
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    module = remat.solve(step, "100%").apply(given, args)
    remat.plans(module)[-1].save(path)
    check = json.loads(plan().to_json())["check"]
    return json.loads(path.read_text()) | {"check": check}


def trained_with(data: dict[str, Any], path: Path) -> None:
    """Read the file, and go as far with it as it lets."""
    path.write_text(json.dumps(data))
    given = model()
    module = remat.load(path).apply(given, (torch.randn(6, 4), 0.5))
    module(torch.randn(6, 4), 0.5).sum().backward()


def test_the_sound_file_trains(kept: dict[str, Any], tmp_path: Path) -> None:
    trained_with(kept, tmp_path / "plan.json")


@pytest.mark.parametrize("place", PLACES)
def test_code_in_a_plan_is_not_run(place: str, kept: dict[str, Any], tmp_path: Path) -> None:
    mark = tmp_path / "was run"
    data = json.loads(json.dumps(kept))
    at: Any = data
    *path, last = PLACES[place]
    for key in path:
        at = at[key]
    code = CODE.format(mark=str(mark))
    at[last] = [code] if isinstance(at[last], list) else code
    with pytest.raises(remat.RematError):
        trained_with(data, tmp_path / "plan.json")
    assert not mark.exists()


@pytest.mark.parametrize(("kind", "context"), CONTAINERS)
def test_a_container_of_another_kind_is_not_made(
    kind: str, context: str, kept: dict[str, Any], tmp_path: Path
) -> None:
    mark = tmp_path / "was run"
    data = json.loads(json.dumps(kept))
    written = json.dumps(json.dumps(context.format(mark=str(mark))))
    data["batch"]["tree"] = TREE.format(type=json.dumps(kind), context=written)
    with pytest.raises(remat.RematError):
        trained_with(data, tmp_path / "plan.json")
    assert not mark.exists()
