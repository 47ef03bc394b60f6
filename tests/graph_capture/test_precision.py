"""What float32 may be rounded to, as either of torch's two APIs sets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.compile.start import _surroundings
from remat.graph_capture import capture
from remat.graph_capture.chunking.same_bits import _digest_of
from remat.graph_capture.devices.cuda import CudaMeter
from remat.graph_capture.devices.meter import CpuMeter
from remat.graph_capture.errors import StateChangedError
from remat.graph_capture.torch_private.core import PRECISIONS, precision_settings
from tests.fake_cuda import FakeCuda, cuda

__all__ = ["cuda"]

BACKENDS: Any = torch.backends
DEFAULT = "ieee", "tf32", "tf32", "ieee", "ieee", "ieee"
CHANGES = {
    **{name: (name, "bf16" if "mkldnn" in name else "tf32") for name in PRECISIONS},
    PRECISIONS[1]: (PRECISIONS[1], "ieee"),
    PRECISIONS[2]: (PRECISIONS[2], "ieee"),
    "all": ("torch.backends.fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    BACKENDS.fp32_precision = "none"
    for name, value in zip(PRECISIONS, DEFAULT, strict=True):
        put(name, "none" if value == "ieee" else value)
    assert precision_settings() == DEFAULT


def put(name: str, value: str) -> None:
    owner: Any = torch
    for part in name.removeprefix("torch.").split(".")[:-1]:
        owner = getattr(owner, part)
    owner.fp32_precision = value


def step() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 5)), (torch.ones(256, 512),)


@pytest.mark.parametrize("how", CHANGES)
def test_a_step_is_captured_planned_and_compiled_with_the_newer_api(how: str) -> None:
    put(*CHANGES[how])
    model, batch = step()
    assert capture(model, batch, loss_fn=torch.sum, device="h100").ops
    fast = remat.rematerialize(model, batch, budget="100%")
    fast(*batch).sum().backward()
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="remat", options={"budget": "100%"})
    compiled(*batch).sum().backward()


@pytest.mark.parametrize("how", CHANGES)
def test_costs_and_compiled_plans_are_of_one_precision(cuda: FakeCuda, how: str) -> None:
    def keys() -> tuple[str, str, str]:
        return CudaMeter("cuda:0").settings, CpuMeter().settings, "".join(_surroundings("cpu"))

    before = keys()
    put(*CHANGES[how])
    changed = [now != then for now, then in zip(keys(), before, strict=True)]
    assert changed == [how == "all" or "mkldnn" not in how, how == "all" or "mkldnn" in how, True]


def test_products_in_tf32_are_priced_as_such() -> None:
    def cost_us() -> float:
        return capture(*step(), loss_fn=torch.sum, device="h100").time_us

    exact_us = cost_us()
    torch.set_float32_matmul_precision("high")
    by_older_us = cost_us()
    torch.set_float32_matmul_precision("highest")
    assert cost_us() == exact_us
    put(PRECISIONS[0], "tf32")
    assert cost_us() == by_older_us < exact_us


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_plan_is_for_the_precision_at_its_capture(name: str) -> None:
    model, batch = step()
    fast = remat.rematerialize(model, batch, budget="100%")
    put(*CHANGES[name])
    with pytest.raises(StateChangedError, match=f"{name} was .* is {CHANGES[name][1]} now"):
        fast(*batch)
    put(name, DEFAULT[PRECISIONS.index(name)])
    fast(*batch).sum().backward()


def test_bits_in_chunks_are_kept_by_precision() -> None:
    """The digest of a region with no parts is of its settings alone."""

    def digest() -> str:
        region: Any = type("Region", (), {"parts": (), "nodes": ()})
        return _digest_of(region)

    before = digest()
    put(PRECISIONS[3], "bf16")
    assert digest() != before
