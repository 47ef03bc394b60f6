"""The device of a compiled graph, and what is held there beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from remat.compile import shared_budget
from remat.compile.shared_budget import SharedBudget
from remat.compile.specialize import device_of_inputs, libraries_bytes
from remat.graph_capture.errors import DeviceError
from remat.rewriter.inductor.replay import ReplayedMemory, StepBytes


def on(*devices: str) -> list[Tensor]:
    with FakeTensorMode():
        return [torch.empty(2, device=device) for device in devices]


def test_one_cuda_device_may_be_beside_the_cpu() -> None:
    assert device_of_inputs(on("cpu", "cpu")) == "cpu"
    assert device_of_inputs([3, *on("cpu", "cuda:1")]) == "cuda:1"
    assert device_of_inputs([]) == "cpu"


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("meta",), ("cpu", "meta")])
def test_others_are_refused_by_name(devices: tuple[str, ...]) -> None:
    with pytest.raises(DeviceError, match=f"has inputs on .*{devices[-1]}"):
        device_of_inputs(on(*devices))


def test_a_cpu_has_no_libraries_that_keep_memory() -> None:
    assert libraries_bytes("cpu") == 0


def test_what_libraries_keep_is_held_beside_every_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_budget, "libraries_bytes", {"cuda:0": 512}.__getitem__)
    step, replay = (
        StepBytes(static_bytes=100, dynamic_bytes=10, gradient_bytes=0),
        ReplayedMemory(7, 9, 5),
    )
    budgets = SharedBudget(), SharedBudget()
    budgets[1].runs_on("cuda:0")
    held = [one.held_bytes((0, 0), step.static_bytes, step.dynamic_bytes) for one in budgets]
    bases = [
        one.base_bytes((0, 0), step, replay, bytes_)
        for one, bytes_ in zip(budgets, held, strict=True)
    ]
    assert held == [110, 110 + 512]
    assert bases == [119, 119 + 512]
