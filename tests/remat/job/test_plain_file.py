"""A file with variables `model` and `batch` is a job, as a file with a factory is."""

from __future__ import annotations

from pathlib import Path

import pytest

import remat
from remat.graph_capture.errors import FactoryError
from remat.job.factory import load_model

HEAD = "import torch\nfrom torch import nn\nmodel = nn.Linear(4, 2)\n"
BATCHES = {
    "batch = torch.ones(3, 4)": (1, ()),
    "batch = (torch.ones(3, 4),)": (1, ()),
    "batch = {'input': torch.ones(3, 4)}": (0, ("input",)),
}


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "plain.py"
    file.write_text(HEAD + text + "\n")
    return str(file)


@pytest.mark.parametrize("text", BATCHES)
@pytest.mark.parametrize("suffix", ["", ":model"])
def test_variables_are_read(tmp_path: Path, text: str, suffix: str) -> None:
    job = load_model(written(tmp_path, text) + suffix)
    n_args, keywords = BATCHES[text]
    assert len(job.args) == n_args
    assert tuple(job.kwargs or ()) == keywords
    assert remat.capture(job.model, job.args, job.kwargs, loss_fn=None).n_forward


def test_a_loss_beside_the_model_is_taken(tmp_path: Path) -> None:
    text = "batch, target = torch.ones(3, 4), torch.ones(3, 2)\nloss_fn = nn.MSELoss()"
    job = load_model(written(tmp_path, text))
    assert job.loss_fn is not None
    assert job.target.shape == (3, 2)


def test_a_factory_is_taken_before_variables(tmp_path: Path) -> None:
    text = "batch = torch.ones(3, 4)\ndef factory():\n    return nn.Linear(7, 1), torch.ones(1, 7)"
    assert load_model(written(tmp_path, text)).args[0].shape == (1, 7)


@pytest.mark.parametrize("text", ["", "model = 3\nbatch = torch.ones(3, 4)"])
def test_a_file_that_lacks_one_of_them_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FactoryError, match="name the model `model` and its batch `batch`"):
        load_model(written(tmp_path, text))
