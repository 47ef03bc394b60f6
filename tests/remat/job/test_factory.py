from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from remat.graph_capture.errors import FactoryError
from remat.job.factory import load_model
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
    loaded = load_model(f"{file}:pair")
    assert isinstance(loaded.model, torch.nn.Linear)
    assert loaded.args[0].shape == (1, 3)
    assert load_model(f"{file}:mapping").loss_fn is torch.sum
    assert sys.path == before


def refusal(name: str) -> str:
    with pytest.raises(FactoryError) as caught:
        load_model(name)
    return str(caught.value)


def test_a_function_factory_need_not_be_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(
        GOOD + "\ndef factory(batch=2):\n    return pair()[0], torch.ones(batch, WIDTH)\n"
    )
    assert load_model(str(file)).args[0].shape == (2, 3)
    assert load_model(str(file), batch=5).args[0].shape == (5, 3)
    monkeypatch.chdir(file.parent)
    assert load_model("models.py").args[0].shape == (2, 3)
    sys.modules.pop("models", None)
    assert load_model("models").args[0].shape == (2, 3)
    assert load_model("models:pair").args[0].shape == (1, 3)


def test_a_factory_that_is_imported_counts(file: Path) -> None:
    other = file.parent / "other.py"
    other.write_text("from models import pair as factory\n")
    assert load_model(str(other)).args[0].shape == (1, 3)


def test_a_folder_may_have_a_colon_in_its_name(file: Path) -> None:
    folder = file.parent / "a:b"
    folder.mkdir()
    (folder / "model.py").write_text("import torch\ndef factory(): return torch.nn.ReLU(), ()\n")
    assert (
        load_model(f"{folder}/model.py").args == load_model(f"{folder}/model.py:factory").args == ()
    )


def test_without_a_factory_the_functions_are_listed(file: Path) -> None:
    said = refusal(str(file))
    assert f"{file} has no function factory. It has pair, mapping, broken, wrong" in said
    assert said.endswith(f"name the one that returns the model and its batch, such as {file}:pair")


def test_a_function_that_needs_nothing_is_the_example(file: Path) -> None:
    file.write_text(
        "def main(): ...\ndef build(width): return width\ndef small(width=3): return 3\n"
    )
    said = refusal(str(file))
    assert "It has main, build, small" in said
    assert said.endswith(f"such as {file}:small")


def test_a_file_without_functions(file: Path) -> None:
    file.write_text("import torch\nfrom os.path import join\n\ndef _hidden(): ...\n")
    assert "no function factory, and no other: write def factory(): return" in refusal(str(file))


def test_a_factory_by_default_that_is_no_function(file: Path) -> None:
    file.write_text("factory = 3\n")
    assert f"factory of {file} is a int, not a function" in refusal(str(file))


def test_what_names_no_python_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "write path/to/file.py:factory" in refusal(":factory")
    assert "names none" in refusal("")
    (file.parent / "plan.json").write_text("{}")
    monkeypatch.chdir(file.parent)
    assert "plan.json is not a Python file: its name must end with .py" in refusal("plan.json")
    said = refusal(str(file.parent))
    assert "name a file: " in said
    assert "beside.py, models.py" in said


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
    assert "a str as model, not an nn.Module" in refusal(f"{file}:no_module")


@pytest.mark.parametrize("name", ["gpt", "resnet", "unet"])
def test_the_examples_load_and_leave_the_generator_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("GPT_BATCH", "RESNET_BATCH", "UNET_BATCH"):
        monkeypatch.setenv(variable, "2")
    state = torch.get_rng_state()
    folder = ROOT / "examples"
    assert load_model(f"{folder / name}.py:factory").args[0].shape[0] == 2
    assert torch.equal(state, torch.get_rng_state())


PARSED = """import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, {rest})
def make():
    width = parser.parse_args().width
    return torch.nn.Linear(width, 2), torch.ones(1, width)
"""


def test_a_parser_of_the_file_does_not_read_our_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "parsed.py"
    file.write_text(PARSED.format(rest="default=5"))
    line = ["remat", "run", str(file), "--budget", "60%"]
    monkeypatch.setattr(sys, "argv", line)
    assert load_model(f"{file}:make").args[0].shape == (1, 5)
    assert sys.argv is line


def test_a_parser_that_ends_python_is_named_at_its_line(tmp_path: Path) -> None:
    file = tmp_path / "parsed.py"
    file.write_text(PARSED.format(rest="required=True"))
    said = refusal(f"{file}:make")
    assert f"factory make of {file} ended Python with SystemExit: 2 ({file}:6)" in said
    assert "give required arguments of a parser defaults" in said
