"""A file whose model and batch an import does not make is told where it makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from remat.graph_capture.errors import FactoryError
from remat.job.factory import load

MAKE = "model, batch = nn.Linear(4, 2), torch.ones(3, 4)"
SCRIPT = 'if __name__ == "__main__":'


def refusal(tmp_path: Path, text: str) -> str:
    file = tmp_path / "script.py"
    file.write_text(f"import torch\nfrom torch import nn\n{text}\n")
    with pytest.raises(FactoryError) as caught:
        load(str(file))
    return str(caught.value).replace(str(file), "script.py")


@pytest.mark.parametrize("head", [SCRIPT, "if '__main__' == __name__:"])
def test_what_only_a_script_makes_has_its_line(tmp_path: Path, head: str) -> None:
    said = refusal(tmp_path, f"{head}\n    if True:\n        {MAKE}")
    assert said.startswith(
        'script.py makes model and batch under `if __name__ == "__main__"` (line'
    )
    assert "(line 3), which runs only as a script: move what builds the model" in said
    assert "write def factory(): return model, (x,)" in said


def test_a_batch_that_only_a_script_makes(tmp_path: Path) -> None:
    text = f"model = nn.Linear(4, 2)\n{SCRIPT}\n    for batch in [torch.ones(3, 4)]: ..."
    assert refusal(tmp_path, text).startswith("script.py makes batch under `if __name__")


def test_a_model_without_a_batch(tmp_path: Path) -> None:
    said = refusal(tmp_path, "model, x = nn.Linear(4, 2), torch.ones(3, 4)")
    assert said.startswith("script.py has a `model` and no `batch`: write def factory()")


@pytest.mark.parametrize("call", ["", f"{SCRIPT}\n    main()"])
def test_a_function_that_returns_nothing_is_no_example(tmp_path: Path, call: str) -> None:
    said = refusal(tmp_path, f"def main():\n    {MAKE}\n    return\n{call}")
    assert said.startswith(
        "script.py has no function factory, and nothing is returned by main: write"
    )


def test_a_return_of_an_inner_function_is_not_its_own(tmp_path: Path) -> None:
    text = "def train():\n    def closure(): return 3\n    closure()\ndef build(): return 3"
    assert refusal(tmp_path, text).endswith("such as script.py:build")
