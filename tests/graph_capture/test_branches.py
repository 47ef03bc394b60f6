"""Each op that looks at values is refused with a way out of its own, which can be captured."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss, one_hot
from typer.testing import CliRunner

import remat
from remat.cli.main import app
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import TrainingGraph

ROWS = 4
LENGTHS = torch.tensor([ROWS])
Step = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(8, 8), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.linear(x))


def captured(step: Step) -> TrainingGraph:
    return remat.capture(Model(step), (torch.ones(ROWS, 8),))


def ones(y: Tensor) -> Tensor:
    """One index for each row, 0 or 1."""
    return (y.sum(1) > 0).long()


def ctc(y: Tensor) -> Tensor:
    return ctc_loss(y[:, None].log_softmax(-1), torch.ones(1, 2).long(), LENGTHS, LENGTHS // 2)


def packed(y: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(y[None], LENGTHS, batch_first=True).data


def with_new_data(y: Tensor) -> Tensor:
    z = y * 2
    z.data = torch.zeros(ROWS, 8)
    return z


REFUSED: dict[str, tuple[Step, str]] = {
    "rows of a mask": (
        lambda y: y[y.sum(1) > 0],
        "keep all rows with torch.where(mask, x, 0) or x * mask",
    ),
    "where": (lambda y: y[torch.where(y.sum(1) > 0)], "keep all rows with torch.where(mask, x, 0)"),
    "masked_select": (
        lambda y: y.masked_select(y > 0),
        "keep all rows with torch.where(mask, x, 0)",
    ),
    "argwhere": (
        lambda y: y[torch.argwhere(y.sum(1) > 0)],
        "keep all rows with torch.where(mask, x, 0)",
    ),
    "unique": (
        lambda y: y * len(torch.unique(y)),
        "the values decide how many it returns",
    ),
    "unique rows": (lambda y: torch.unique(y, dim=0), "call unique outside forward"),
    "runs": (lambda y: y * len(torch.unique_consecutive(y)), "call unique outside forward"),
    "repeats": (lambda y: y.repeat_interleave(ones(y), 0), "pass output_size, a Python number"),
    "bins": (lambda y: y.sum() * torch.bincount(ones(y)), "use torch.zeros(n).scatter_add_"),
    "classes": (lambda y: y[:, :1] * one_hot(ones(y)), "one_hot without num_classes"),
    "item": (lambda y: y * y.detach().sum().item(), "pass forward a Python number"),
    "a branch": (lambda y: y if y.sum() > 0 else -y, "use torch.where in place of a branch"),
    "a size": (lambda y: y[: int(ones(y).sum())], "use torch.where in place of a branch"),
    "equal": (lambda y: y if torch.equal(y, -y) else -y, "replace the `if`, `.item()` or index by"),
    "CTC": (ctc, "leave out loss_fn, and call ctc_loss in your loop"),
    "packed": (packed, "give the layer the padded batch, and mask what it returns"),
}

WAYS_OUT: dict[str, Step] = {
    "where": lambda y: torch.where(y > 0, y, 0),
    "times a mask": lambda y: y * (y > 0),
    "topk": lambda y: y[y.sum(1).topk(2).indices],
    "output_size": lambda y: y.repeat_interleave(ones(y), 0, output_size=ROWS),
    "scatter": lambda y: y[:, :2] * torch.zeros(2).scatter_add_(0, ones(y), y[:, 0]),
    "one_hot": lambda y: y[:, :2] * one_hot(ones(y), 2).sum(0),
    "probabilities": lambda y: y[:, None].log_softmax(-1),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_op_that_looks_has_its_way_out(kind: str) -> None:
    step, way = REFUSED[kind]
    with pytest.raises(CaptureError) as caught:
        captured(step)
    said = str(caught.value)
    assert "one static graph cannot hold both branches" in said
    assert way in said
    assert 'torch.compile(model, backend="remat")' in said
    assert "test_branches.py:" in said


@pytest.mark.parametrize("kind", WAYS_OUT)
def test_the_way_out_is_captured(kind: str) -> None:
    assert captured(WAYS_OUT[kind]).n_forward


UNTRACEABLE: dict[str, tuple[Step, str]] = {
    "branch": (lambda y: y * 2 if y.sum() > 0 else y, "DataDependentOutputException"),
    "rows of a mask": (lambda y: y[y > 0], "DynamicOutputShapeException"),
    "a size": (lambda y: y[: int(y.sum())], "DataDependentOutputException"),
    "a function of the user's fails": (lambda y: y @ torch.ones(3, 3), "RuntimeError"),
    "refused by us amid the trace": (with_new_data, "CaptureError"),
}


@pytest.mark.parametrize("dynamic", [None, {"input": {0: "batch"}}], ids=["one size", "range"])
@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_a_traceback_has_no_frames_of_torch_and_the_cause_has_them(
    kind: str, dynamic: dict[str, dict[int, str]] | None
) -> None:
    step, raised = UNTRACEABLE[kind]
    with pytest.raises(CaptureError, match=r"test_branches\.py:") as caught:
        remat.capture(nn.Sequential(Model(step)), (torch.ones(ROWS, 8),), dynamic=dynamic)
    error = caught.value
    shown = "".join(traceback.format_exception(error))
    assert shown.count("\n") < 30
    assert "site-packages/torch" not in shown
    assert "See this error's `cause` for the frames of torch and of the model." in shown
    assert error.cause is not None
    assert type(error.cause).__name__ == raised
    assert __file__ in {frame.filename for frame in traceback.extract_tb(error.cause.__traceback__)}


def test_a_block_that_fails_keeps_the_cause() -> None:
    model = nn.Sequential(Model(UNTRACEABLE["branch"][0]))
    with pytest.raises(CaptureError) as caught:
        remat.rematerialize(model, (torch.ones(ROWS, 8),), blocks="0", budget="60%")
    assert "DataDependent" in type(caught.value.cause).__name__
    assert len(traceback.format_exception(caught.value)) < 30


def test_debug_shows_the_frames_of_torch(tmp_path: Path) -> None:
    file = tmp_path / "branching.py"
    file.write_text(
        "import torch\nclass M(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return x if super().forward(x).sum() > 0 else -x\n"
        "def factory(): return M(4, 4), (torch.ones(2, 4),)\n"
    )
    done = CliRunner().invoke(app, ["run", str(file), "--verbose"])
    assert isinstance(done.exception, CaptureError)
    assert type(done.exception.__cause__).__name__ == "DataDependentOutputException"
