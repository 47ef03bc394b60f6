"""Levers with Inductor's code: steps near eager's, peaks as replayed, and each lever takes part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.compile import code_plans
from remat.graph_capture.devices.memory_events import measure_peak
from remat.schedules.schedule import Fetch, Schedule
from tests.limits import AMPLE_S
from tests.rows import rows
from tests.sized_models import Block

WORDS, WIDTH, LENGTH = 512, 32, 64
NEAR = 0.01  # of how far training has moved: AdamW divides rounding errors by small moments


class Tagger(nn.Module):
    """A transformer with dropout, whose features are scaled by a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, 4) for _ in range(2)])
        self.drop, self.scale = nn.Dropout(0.1), 1.5
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) * self.scale
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(x)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (4, LENGTH + 1), generator=made)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def made() -> Tagger:
    torch.manual_seed(0)
    return Tagger()


def copies(schedule: Schedule) -> int:
    return sum(isinstance(step, Fetch) for step in schedule.steps)


LEVERS: dict[str, Callable[[Tagger, Path], dict[str, Any]]] = {
    "host": lambda *_: {"host": "1GiB", "keep": "blocks.*"},
    "nvme": lambda _, folder: {
        "host": "300KiB",
        "nvme": f"{folder}:1GiB",
        "keep": "blocks.*",
    },
    "split": lambda *_: {"split": "exact"},
    "optimizer_in_backward": lambda model, _: {
        "optimizer_in_backward": torch.optim.AdamW(model.parameters())
    },
    "float_inputs": lambda *_: {"float_inputs": ["scale", "drop.p"]},
}
TAKES_PART: dict[str, Callable[[Schedule], object]] = {
    "host": copies,
    "nvme": lambda schedule: any(getattr(s, "to", "") == "nvme" for s in schedule.steps),
    "split": lambda schedule: schedule.chunks,
    "optimizer_in_backward": lambda schedule: schedule.updates,
    "float_inputs": lambda schedule: True,  # the numbers of each step differ
}
TOGETHER = {  # and the budget
    "float_inputs": "70%",
    "optimizer_in_backward": "85%",
    "host": "65%",
    "nvme": "65%",
    "split": "50%",
    "optimizer_in_backward, host, float_inputs": "75%",
    "host, split": "45%",
}
QUICK = ("optimizer_in_backward, host, float_inputs",)


@pytest.mark.parametrize("levers", rows(TOGETHER, QUICK.__contains__))
def test_steps_are_near_eagers_and_peaks_as_replayed(
    levers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    predicted: list[int] = []
    peak_of = code_plans.code_peak_bytes

    def watched(*given: Any) -> int:
        predicted.append(peak_of(*given))
        return predicted[-1]

    monkeypatch.setattr(code_plans, "code_peak_bytes", watched)
    model, (tokens, target) = made(), batch(0)
    names = levers.split(", ")
    given = {key: v for name in names for key, v in LEVERS[name](model, tmp_path).items()}
    step = remat.rematerialize(
        model, (tokens,), loss_fn=loss_of, target=target, budget=TOGETHER[levers],
        compile=True, verbose=False, time_limit_s=AMPLE_S, **given,
    )  # fmt: skip
    schedule = type(step).schedule
    assert all(TAKES_PART[name](schedule) for name in names)
    assert predicted[-1] <= schedule.budget_bytes
    optimizer = given.get("optimizer_in_backward") or torch.optim.AdamW(model.parameters())
    near_eagers(model, step, optimizer, reads_floats="float_inputs" in names)
    model.zero_grad()
    held = [*model.parameters(), tokens, target]
    held += (
        []
        if len(given) == 0 or optimizer is not given.get("optimizer_in_backward")
        else [one for state in optimizer.state.values() for one in state.values()]
    )
    peak_bytes = measure_peak(lambda: step(tokens, target=target).backward())
    peak_bytes += sum(one.untyped_storage().nbytes() for one in held)
    assert abs(peak_bytes - predicted[-1]) <= predicted[-1] / 100


def near_eagers(
    model: Tagger, step: nn.Module, optimizer: torch.optim.Optimizer, *, reads_floats: bool
) -> None:
    eager = made()
    own = torch.optim.AdamW(eager.parameters())
    for number in range(5):
        tokens, target = batch(number % 3)
        if reads_floats:
            eager.scale = model.scale = 1.5 + number / 8
            eager.drop.p = model.drop.p = 0.1 + number / 50
        torch.manual_seed(number)
        expected = loss_of(eager(tokens), target)
        stream = torch.get_rng_state()
        expected.backward()
        torch.manual_seed(number)
        loss = step(tokens, target=target)
        assert torch.equal(torch.get_rng_state(), stream)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
        for one in (own, optimizer):
            one.step()
            one.zero_grad()
    first, ours, theirs = (
        torch.cat([p.detach().flatten() for p in one.parameters()])
        for one in (made(), model, eager)
    )
    assert (ours - theirs).norm() <= NEAR * (theirs - first).norm()
