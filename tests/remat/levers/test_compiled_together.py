"""Levers with Inductor's code: steps near eager's, peaks as replayed, and each lever takes part."""

from __future__ import annotations

import copy
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
from remat.graph_capture.errors import BudgetError
from remat.rewriter.inductor import code_by_size
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


def batch(number: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (4, length + 1), generator=made)
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
    _near_eagers(
        model,
        step,
        optimizer,
        reads_floats="float_inputs" in names,
        is_updated="optimizer_in_backward" in names,
    )
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


def _near_eagers(
    model: Tagger, step: nn.Module, optimizer: torch.optim.Optimizer, *, reads_floats: bool,
    lengths: tuple[int, ...] = (LENGTH,), is_updated: bool = False,
) -> None:  # fmt: skip
    eager = made()
    own = torch.optim.AdamW(eager.parameters())
    for number in range(5):
        tokens, target = batch(number % 3, lengths[number % len(lengths)])
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
        # Updates in backward have used them, and `optimizer.step()` finds none.
        assert all((one.grad is None) == is_updated for one in model.parameters())
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
        for one in (own, optimizer):
            one.step()
            one.zero_grad()
    first, ours, theirs = (
        torch.cat([p.detach().flatten() for p in one.parameters()])
        for one in (made(), model, eager)
    )
    assert (ours - theirs).norm() <= NEAR * (theirs - first).norm()


RANGE = {1: ("length", 16, LENGTH)}
LENGTHS = (LENGTH, 48, 23)


@pytest.mark.slow
def test_a_family_has_code_for_each_size_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted: list[int] = []
    peak_of = code_by_size.code_peak_bytes

    def watched(*given: Any) -> int:
        predicted.append(peak_of(*given))
        return predicted[-1]

    monkeypatch.setattr(code_by_size, "code_peak_bytes", watched)
    model, (tokens, target) = made(), batch(0)
    step: Any = remat.rematerialize(
        model, (tokens,), loss_fn=loss_of, target=target, budget="80%", compile=True,
        verbose=False, time_limit_s=AMPLE_S, dynamic={"tokens": RANGE, "target": RANGE},
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    _near_eagers(model, step, optimizer, reads_floats=False, lengths=LENGTHS)
    budget_bytes = type(step).family.budget_bytes
    assert len(predicted) == len(LENGTHS), "each size was compiled once"
    assert step._remat_members.last._remat_compiled_step.by_inductor
    parameters_bytes = sum(one.nbytes for one in model.parameters())
    for length, code_bytes in zip(LENGTHS, predicted, strict=True):
        given, target = batch(1, length)
        model.zero_grad()
        peak_bytes = measure_peak(lambda g=given, t=target: step(g, target=t).backward())
        peak_bytes += parameters_bytes + given.nbytes + target.nbytes
        assert abs(peak_bytes - code_bytes) <= code_bytes / 100
        assert code_bytes <= budget_bytes
    assert len(predicted) == len(LENGTHS)
    copied = copy.deepcopy(step)
    copied(tokens, target=batch(0)[1]).backward()
    assert copied._remat_members.last._remat_compiled_step.by_inductor


def test_code_of_few_sizes_is_kept_and_one_too_large_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(8, 8)
    given: Any = {"budget": "100%", "dynamic": {"input": {0: ("rows", 2, 8)}}, "verbose": False}
    module: Any = remat.rematerialize(model, (x,), **given)
    members = module._remat_members
    known = members.family, members.traced, members.graph, None, "none"
    code = code_by_size.CodeBySize(model, *known)
    monkeypatch.setattr(code_by_size, "MOST_SIZES", 2)
    monkeypatch.setattr(code, "_made", lambda sizes: members.first)
    for rows_ in (4, 5, 4):
        assert code.at({"rows": rows_}) is members.first
    with pytest.warns(UserWarning, match="called with more than 2 sizes"):
        code.at({"rows": 6})
    assert list(code._modules) == [(4,), (6,)]
    monkeypatch.setattr(code_by_size, "code_peak_bytes", lambda *_: 2**30)
    with pytest.raises(BudgetError, match=r"^give budget='1GiB'.* at rows 7 the lowest peak"):
        code_by_size.CodeBySize(model, *known).at({"rows": 7})
