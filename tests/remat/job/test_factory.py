from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from remat.graph_capture.errors import FactoryError
from remat.job.factory import load
from tests.paths import ROOT

GOOD = """
import torch
from beside import WIDTH

def pair():
    return torch.nn.Linear(WIDTH, 2), torch.ones(1, WIDTH)

def mapping():
    import beside
    model = torch.nn.Linear(beside.WIDTH, 2)
    return {"model": model, "args": (torch.ones(1, WIDTH),), "loss_fn": torch.sum}

def broken():
    raise RuntimeError("no such data")

def wrong():
    return 3

def unknown_key():
    return {"model": torch.nn.Linear(1, 1), "arguments": ()}

def no_module():
    return "model", ()

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(GOOD)
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    sys.modules.pop("beside", None)
    return path


def test_a_file_anywhere_may_import_its_neighbours(file: Path) -> None:
    before = list(sys.path)
    loaded = load(f"{file}:pair")
    assert isinstance(loaded.model, torch.nn.Linear)
    assert loaded.args[0].shape == (1, 3)
    assert load(f"{file}:mapping").loss_fn is torch.sum
    assert sys.path == before


def refusal(name: str) -> str:
    with pytest.raises(FactoryError) as caught:
        load(name)
    return str(caught.value)


def test_no_colon() -> None:
    assert "names no factory: write path/to/file.py:factory" in refusal("examples/gpt.py")


def test_a_missing_file_names_its_neighbours(file: Path) -> None:
    said = refusal(f"{file.parent}/model.py:pair")
    assert "there is no file" in said
    assert "models.py" in said


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "there is no folder" in refusal(f"{tmp_path}/gone/model.py:pair")


def test_a_missing_module() -> None:
    assert "did you mean a file, no_such_package.py?" in refusal("no_such_package:factory")


def test_a_missing_factory_names_what_is_there(file: Path) -> None:
    said = refusal(f"{file}:pairs")
    assert "has no factory pairs. It has pair, mapping, broken" in said
    assert f"Did you mean {file}:pair?" in said


def test_a_factory_that_is_no_function(file: Path) -> None:
    assert "number of" in refusal(f"{file}:number")


def test_a_factory_that_raises_names_the_line(file: Path) -> None:
    said = refusal(f"{file}:broken")
    line = GOOD.splitlines().index('    raise RuntimeError("no such data")') + 1
    assert f"factory broken of {file} raised RuntimeError: no such data ({file}:{line})" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import torch\nimport not_installed_here\n", "ModuleNotFoundError"),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit(1)\n", "SystemExit"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    said = refusal(f"{path}:f")
    assert f"importing {path} raised {says}" in said
    assert f"bad.py:{text.count(chr(10))})" in said


def test_wrong_returns(file: Path) -> None:
    assert "returned a int: a factory returns (model, args)" in refusal(f"{file}:wrong")
    assert "unknown keys arguments" in refusal(f"{file}:unknown_key")
    assert "a model that is a str, no nn.Module" in refusal(f"{file}:no_module")


@pytest.mark.parametrize("name", ["gpt", "resnet", "unet"])
def test_the_examples_load_and_leave_the_generator_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("GPT_BATCH", "RESNET_BATCH", "UNET_BATCH"):
        monkeypatch.setenv(variable, "2")
    state = torch.get_rng_state()
    folder = ROOT / "examples"
    assert load(f"{folder / name}.py:factory").args[0].shape[0] == 2
    assert torch.equal(state, torch.get_rng_state())
