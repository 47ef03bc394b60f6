"""Whole steps that run: five of them are eager's to the bit, with the peak that was judged."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat.graph_capture.devices.memory_events import measure_regions
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.spill_files import HOST_FOLDER
from remat.schedules.simulate import simulate
from remat.whole_step.running import WholeStep
from tests.remat.whole_step.loops import (
    Training,
    adamw,
    chain,
    gpt,
    momentum,
    same,
)
from tests.sized_models import Residual


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the host tier."""
    monkeypatch.setenv(HOST_FOLDER, str(tmp_path))
    return tmp_path


def trained_alike(training: Training, step: WholeStep, steps: int = 5) -> None:
    """Train beside eager, and compare all that a step changes."""
    other = training.twin()
    torch.manual_seed(3)
    losses = other.eager(0, steps)
    stream = torch.get_rng_state()
    torch.manual_seed(3)
    assert all(map(torch.equal, training.whole(step, 0, steps), losses))
    assert torch.equal(torch.get_rng_state(), stream)
    assert same(training, other)


def homes(graph: TrainingGraph) -> set[str | None]:
    return {value.home for value in graph.values if value.home is not None}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_gpt_with_dropout_trains_as_in_eager(count: int, tier: str, folder: Path) -> None:
    training = gpt(count)
    below: dict[str, Any] = {"host": "64MiB"}
    if tier == "nvme":  # no room on the host for all states
        below = {"host": 800_000, "nvme": f"{folder}:64MiB"}
    step = training.planned(budget=450_000, **below)
    assert "host" in homes(step.graph)
    assert (tier == "nvme") == ("nvme" in homes(step.graph))
    trained_alike(training, step)


@pytest.mark.parametrize("count", [1, 3])
def test_a_head_in_chunks_fits_where_whole_it_does_not(count: int) -> None:
    training = gpt(count, words=2_000)
    asked: dict[str, Any] = {"budget": 1_850_000, "host": "64MiB"}
    with pytest.raises(BudgetError, match=r"give budget=.*: no plan of this step fits"):
        training.planned(**asked, split="none")
    step = training.planned(**asked, split="exact")
    assert any("in_pieces" in op.name for op in step.graph.ops)
    trained_alike(training, step)
    # To compare has brought all back: that memory goes in the next step, and for what was allocated
    # unseen the profiler takes the size of whatever it once saw at that address.
    training.whole(step, 3, 1)
    measured = measure_regions([lambda: training.whole(step, 4, 1)])[0]
    assert measured.peak_bytes == step.simulation.peak_bytes - step.resting_bytes


@pytest.mark.parametrize("optimizer", [momentum, torch.optim.SGD, torch.optim.Adam])
def test_other_optimizers(optimizer: Callable[..., Any]) -> None:
    training = chain(2, optimizer=optimizer)
    trained_alike(training, training.planned(budget=160_000, host="64MiB"))


@pytest.mark.parametrize(
    ("training", "budget"),
    [(gpt(2), 450_000), (chain(1), 160_000), (chain(4), 160_000), (chain(2), 1 << 24)],
)
def test_the_measured_peak_is_the_judged_one(training: Training, budget: int) -> None:
    step = training.planned(budget=budget, host="64MiB")
    training.whole(step, 0, 2)
    measured = measure_regions([lambda: training.whole(step, 2, 1)])[0].peak_bytes
    assert simulate(step.graph, step.schedule) == step.simulation
    assert measured == step.simulation.peak_bytes - step.resting_bytes
    assert step.simulation.peak_bytes <= budget


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 203))]
)
def test_any_setting_trains_as_in_eager(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    make, count = draw.choice((chain, gpt)), draw.randint(1, 4)
    sizes: dict[str, Any] = {"optimizer": draw.choice((adamw, momentum, torch.optim.SGD))}
    if make is gpt:
        sizes |= {"layers": draw.randint(2, 5), "width": draw.choice((16, 32))}
    training = make(count, 3, **sizes)
    asked: dict[str, Any] = {"budget": int(10 ** draw.uniform(4.5, 6.3))}
    asked["host"] = int(10 ** draw.uniform(4.5, 7))
    if draw.random() < 0.5:
        asked["nvme"] = f"{folder}:64MiB"
    step = planned_with_room(training, asked)
    trained_alike(training, step, 3)
    step.close()


def planned_with_room(training: Training, asked: dict[str, Any]) -> WholeStep:
    """The step in the rooms asked for, or else in those that the refusal names."""
    for _ in range(3):
        try:
            return training.planned(**asked)
        except BudgetError as error:
            named = dict(re.findall(r"(budget|host)=\W?([\d.]+[KMG]?i?B)", str(error)))
            more = re.findall(r"a peak of (\d+) bytes", str(error))
            asked |= named or {"budget": int(more[0])}
    return training.planned(**asked)


class Tied(nn.Module):
    """Blocks between an embedding and a head that share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5))
        )
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens)))


def test_tied_weights() -> None:
    torch.manual_seed(0)
    model = Tied()
    calls = [((torch.randint(40, (8,)),), torch.randint(40, (8,))) for _ in range(10)]
    optimizer = torch.optim.AdamW(model.parameters())
    training = Training(model, optimizer, nn.functional.cross_entropy, calls, 2)
    trained_alike(training, training.planned(budget="80KiB", host="64MiB"))


def test_batch_norm_counts_each_microbatch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *(Residual(8) for _ in range(4)), nn.Flatten(),
        nn.Linear(8 * 64, 5),
    )  # fmt: skip
    calls = [((torch.randn(4, 3, 8, 8),), torch.randn(4, 5)) for _ in range(10)]
    optimizer = torch.optim.AdamW(model.parameters())
    training = Training(model, optimizer, nn.functional.mse_loss, calls, 2)
    trained_alike(training, training.planned(budget="400KiB", host="64MiB"))


class SharedGradient(nn.Module):
    """Two parameters that are added to the same tensor, so that their gradients are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList(torch.zeros(8, 32) for _ in range(2))
        self.rest = chain(1, 1).model

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x + self.shifts[0] + self.shifts[1])


@pytest.mark.parametrize("count", [1, 3])
def test_parameters_with_the_same_gradient(count: int) -> None:
    training = chain(count)
    training.model = SharedGradient()
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    trained_alike(training, training.planned(budget=180_000, host="64MiB"))


def test_frozen_layers_and_a_loss_that_is_a_mean() -> None:
    training = chain(2)
    training.model[1].requires_grad_(False)
    training.loss_fn = lambda out, y: nn.functional.mse_loss(out, y) / 2
    trained_alike(training, training.planned(budget=160_000, host="64MiB"))


def test_a_schedule_of_the_learning_rate_is_followed() -> None:
    training = chain(2)
    other = training.twin()
    step = training.planned(budget=160_000, host="64MiB")
    rates = [torch.optim.lr_scheduler.StepLR(one.optimizer, 1, 0.5) for one in (training, other)]
    for at in range(3):
        training.whole(step, at, 1)
        training.optimizer.step()
        other.eager(at, 1)
        for rate in rates:
            rate.step()
    assert same(training, other)
