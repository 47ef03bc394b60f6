"""A file whose model and batch an import does not make is told where it makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from remat.graph_capture.errors import FactoryError
from remat.job.factory import load_model

MAKE = "model, batch = nn.Linear(4, 2), torch.ones(3, 4)"
SCRIPT = 'if __name__ == "__main__":'


def refusal(tmp_path: Path, text: str) -> str:
    file = tmp_path / "script.py"
    file.write_text(f"import torch\nfrom torch import nn\n{text}\n")
    with pytest.raises(FactoryError) as caught:
        load_model(str(file))
    return str(caught.value).replace(str(file), "script.py")


@pytest.mark.parametrize("head", [SCRIPT, "if '__main__' == __name__:"])
def test_what_only_a_script_makes_has_its_line(tmp_path: Path, head: str) -> None:
    said = refusal(tmp_path, f"{head}\n    if True:\n        {MAKE}")
    assert said.startswith("move what builds the model and a batch above `if __name__")
    assert "(line 3): script.py makes model and batch under it, which runs only as" in said
    assert "write def factory(): return model, (x,)" in said


def test_a_batch_that_only_a_script_makes(tmp_path: Path) -> None:
    text = f"model = nn.Linear(4, 2)\n{SCRIPT}\n    for batch in [torch.ones(3, 4)]: ..."
    assert refusal(tmp_path, text).startswith(
        "move what builds the model and a batch above `if __name__"
    )


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


TRAIN = """
def train(epochs=1):
    open("trained", "w").close()
    for _ in range(epochs):
        loss = net()(torch.ones(3, 4)).sum()
        loss.backward()
    return loss

def main():
    return train(), 3

def evaluate(model): return model(torch.ones(3, 4))
"""


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("def build(): return net(), (torch.ones(3, 4),)", "such as script.py:build"),
        ("def build(n=3): return {'model': net(), 'args': ()}", "such as script.py:build"),
        (
            "def get_model(cfg): return nn.Linear(4, cfg)",
            "get_model returns a model without a batch, so write def factory(): return "
            "get_model(...), (x,)",
        ),
        ("def make_net(): return nn.Linear(4, 2)", "return make_net(), (x,)"),
        ("", "name the model `model` and its batch `batch`"),
    ],
)
def test_what_trains_is_not_proposed_nor_run(
    tmp_path: Path, text: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal(tmp_path, f"{TRAIN}\n{text}")
    assert said.endswith(ends)
    assert "script.py:train" not in said
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def job():\n    open('ran', 'w').close()", "job of script.py returns nothing, so it was"),
        ("def job():\n    open('ran', 'w').close()\n    return None", "returns nothing"),
        ("def job(cfg):\n    return cfg, ()", "give defaults for cfg, or write def factory"),
        ("def job(*, n):\n    return n, ()", "give defaults for n, or"),
        ("class job(nn.Linear):\n    def __init__(self): super().__init__(2, 2)",
         "write def factory(): return job(), (x,): script.py:job"),
    ],
)  # fmt: skip
def test_a_function_that_is_named_and_builds_nothing(
    tmp_path: Path, text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "script.py"
    file.write_text(f"from torch import nn\n{text}\n")
    with pytest.raises(FactoryError) as caught:
        load_model(f"{file}:job")
    assert says in str(caught.value).replace(str(file), "script.py")
    assert not (tmp_path / "ran").exists()
