"""What ops of a compiled step cost, from costs of calls and the rate of memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from remat.graph_capture.costs.cache import OpCost
from remat.graph_capture.devices.cuda import CudaMeter
from remat.graph_capture.graph import TANGENTS, Resident, TrainingGraph
from remat.rewriter.inductor import kernel_costs
from remat.rewriter.inductor.fused_graph import build_fused
from remat.rewriter.inductor.kernel_costs import (
    LEAST_SLOW_ELEMENTS,
    NEAR,
    CallCosts,
    with_kernel_costs,
)
from tests.fake_cuda import FakeCuda, cuda

__all__ = ["cuda"]

CALL_US, BYTES_PER_US, EXP_US = 1000.0, 64.0, 0.25


class Fixed:
    """Costs that depend on nothing."""

    def __init__(self, of_launch_us: float = 0.0) -> None:
        self.of_launch_us = of_launch_us

    def launch_us(self) -> float:
        return self.of_launch_us

    def of(self, nodes: Sequence[Any]) -> list[OpCost]:
        return [OpCost(CALL_US, 0) for _ in nodes]

    def bytes_per_us(self) -> float:
        return BYTES_PER_US

    def us_per_element(self, parts: Collection[str]) -> dict[str, float]:
        assert set(parts) <= {"exp"}
        return dict.fromkeys(parts, EXP_US)


def step(x: Tensor) -> list[Tensor]:
    """Forward's result, then a gradient that reads the first product again."""
    first = x @ x
    return [(first @ x).sum(), (first.exp() @ x)]


def costed(width: int, launch_us: float = 0.0) -> TrainingGraph:
    """The step on a square of that width."""
    traced = make_fx(step, tracing_mode="fake")(torch.ones(width, width))
    fused = build_fused(traced, 1, "step", Resident(), "cpu")
    costs: Any = Fixed(launch_us)
    return with_kernel_costs(fused, costs)


def test_what_backward_reads_is_cheaper_and_the_step_is_not() -> None:
    found, size = costed(16), 16 * 16 * 4
    saved_us = NEAR * size / BYTES_PER_US
    calls = [op.cost_us for op in found.ops if op.target == "aten.mm.default"]
    assert sorted(calls) == [pytest.approx(CALL_US - saved_us), CALL_US, CALL_US]
    (tangents,) = (op for op in found.ops if op.target == TANGENTS)
    assert tangents.cost_us == pytest.approx(saved_us)
    kernels_us = ((size + 4) + 2 * size) / BYTES_PER_US
    assert found.time_us == pytest.approx(3 * CALL_US + kernels_us)


def test_an_exponential_of_many_elements_costs_more_than_its_bytes() -> None:
    width = math.isqrt(LEAST_SLOW_ELEMENTS)
    (exponential,) = (op for op in costed(width).ops if op.target == "aten.exp.default")
    moved_us = 2 * width * width * 4 / BYTES_PER_US
    assert exponential.cost_us == pytest.approx(moved_us + EXP_US * width * width)


def test_each_generated_kernel_is_launched() -> None:
    """The sum and the exponential; products were timed with their launches."""
    assert costed(16, 7.0).time_us == pytest.approx(costed(16).time_us + 2 * 7.0)


@pytest.mark.usefixtures("clocked")
@pytest.mark.parametrize(("free_gib", "copied_bytes"), [(80, 1 << 30), (1, 1 << 27)])
def test_the_rate_of_a_cuda_device_is_of_a_large_copy_without_its_launch(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_gib: int,
    copied_bytes: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    sizes: list[int] = []

    def ones(size_bytes: int, **_: Any) -> Tensor:
        sizes.append(size_bytes)
        return torch.empty(1)

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(kernel_costs, "free_bytes", lambda _: free_gib << 30)
    monkeypatch.setattr(CudaMeter, "often_us", lambda *_: [3.0 + 2 * sizes[-1] / 2e6])
    costs = CallCosts(None, "cuda:0")
    assert costs.bytes_per_us() == pytest.approx(2e6, rel=1e-4)
    assert costs.launch_us() == pytest.approx(3.0)
    assert sorted(sizes) == [1, copied_bytes]
    kept = CallCosts(None, "cuda:0")
    assert (kept.bytes_per_us(), kept.launch_us()) == (costs.bytes_per_us(), costs.launch_us())
    assert len(sizes) == 2
