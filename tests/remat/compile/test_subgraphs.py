"""A compiled model that DDP cuts, in one process: the budget, the peak, the refusal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel

from remat.budgets import parse_budget
from remat.compile.graph_context import compiled_plans
from remat.graph_capture.devices.memory_events import measure_peak

WIDTH = 512


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch._dynamo.reset()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


class Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def wrapped(
    budget: str, *, view: bool = True, bucket_mb: int = 1
) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model of four subgraphs, the same under DDP, and a batch."""
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, Loss())
    options = {"budget": budget, "solver": "cut", "replays": 3}
    compiled = torch.compile(model, backend="remat", options=options)
    step = DistributedDataParallel(compiled, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=view)
    return model, step, torch.randn(256, WIDTH)


def trained(model: nn.Module, step: nn.Module, x: Tensor) -> tuple[int, float]:
    """The measured peak of a step, and the largest relative error of its gradients."""
    model(x).backward()
    right = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for _ in range(2):
        step.zero_grad()
        step(x).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))
    step.zero_grad()
    resident = [*model.parameters(), x]
    resident_bytes = sum(t.numel() * t.element_size() for t in resident)
    return resident_bytes + measure_peak(lambda: step(x).backward()), error


@pytest.mark.parametrize(
    ("budget", "view"),
    [
        ("min", False),
        pytest.param("100%", True, marks=pytest.mark.slow),
        pytest.param("100%", False, marks=pytest.mark.slow),
        pytest.param("min", True, marks=pytest.mark.slow),
    ],
)
def test_the_planned_peak_is_the_measured_one(budget: str, view: bool) -> None:
    before = len(compiled_plans())
    peak_bytes, error = trained(*wrapped(budget, view=view))
    plans = compiled_plans()[before:]
    assert len(plans) > 1, "DDP cuts nothing any more"
    assert error < 1e-5
    assert peak_bytes <= plans[-1].budget_bytes
    assert plans[-1].peak_bytes == pytest.approx(peak_bytes, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("bucket_mb", [2, 4, 25])
def test_the_budget_holds_with_larger_buckets(bucket_mb: int) -> None:
    before = len(compiled_plans())
    peak_bytes, error = trained(*wrapped("min", bucket_mb=bucket_mb))
    plans = compiled_plans()[before:]
    assert len(plans) > 1, "DDP cuts nothing any more"
    assert error < 1e-5
    assert peak_bytes <= plans[-1].budget_bytes
    assert plans[-1].peak_bytes == pytest.approx(peak_bytes, rel=0.005)


@pytest.mark.slow
def test_less_than_the_parameters_is_refused_with_what_fits() -> None:
    _, step, x = wrapped("2MiB", view=False)
    with pytest.raises(
        BackendCompilerFailed, match="subgraphs into which DDP's buckets"
    ) as refused:
        step(x)
    assert "gradient_as_bucket_view=True" in str(refused.value)
    assert "optimize_ddp = False" in str(refused.value)
    named = str(refused.value).partition('{"budget": "')[2].partition('"')[0]
    torch._dynamo.reset()
    peak_bytes, _ = trained(*wrapped(named, view=False))
    assert peak_bytes <= parse_budget(named).size_bytes
