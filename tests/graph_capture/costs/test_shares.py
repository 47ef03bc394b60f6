"""Which kind an op is of, and what its kind reaches of a device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from remat.graph_capture import capture, trace
from remat.graph_capture.costs.cache import OpWork, work_of
from remat.graph_capture.costs.roofline import Roofline
from remat.graph_capture.devices import known_devices
from remat.graph_capture.devices.known_devices import (
    SHARES_FILE,
    Efficiency,
    WorkKind,
    device_table,
    modelled_device,
    shares_of,
)

PAIR = Efficiency(0.5, 0.25)


def kinds(model: nn.Module, *args: torch.Tensor) -> dict[str, str]:
    """By target."""
    joint = trace(model, args, loss_fn=torch.sum).joint
    nodes = {op.target: joint.node_of_op.get(op.name) for op in joint.graph.ops}
    return {target: work_of(node).kind for target, node in nodes.items() if node is not None}


def test_a_convolution_is_depthwise_where_each_group_has_one_channel() -> None:
    x = torch.randn(1, 8, 9, 9, requires_grad=True)
    for groups, kind in ((1, "convolution"), (4, "convolution"), (8, "depthwise")):
        found = kinds(nn.Conv2d(8, 8, 3, groups=groups), x)
        assert found["aten.convolution.default"] == kind
        assert found["aten.convolution_backward.default"] == kind
    of_one = kinds(nn.Conv2d(1, 8, 3), torch.randn(1, 1, 9, 9))
    assert of_one["aten.convolution.default"] == "convolution"
    transposed = kinds(nn.ConvTranspose1d(8, 8, 3, groups=8), torch.randn(1, 8, 9))
    assert transposed["aten.convolution.default"] == "depthwise"


class Attention(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = nn.functional.layer_norm(super().forward(x), (16,))
        y = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return nn.functional.log_softmax(nn.functional.gelu(y), -1)


def test_ops_are_of_the_kind_that_their_kernels_are_alike_in() -> None:
    found = kinds(Attention(16, 16), torch.randn(2, 2, 32, 16))
    expected = {
        "aten.addmm.default": "matmul", "aten.mm.default": "matmul",
        "aten.native_layer_norm.default": "norm",
        "aten.native_layer_norm_backward.default": "norm_backward",
        "aten._scaled_dot_product_flash_attention_for_cpu.default": "attention",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": "attention_backward",
        "aten._log_softmax.default": "softmax",
        "aten._log_softmax_backward_data.default": "softmax",
        "aten.gelu.default": "other", "aten.gelu_backward.default": "other",
    }  # fmt: skip
    assert {target: found[target] for target in expected} == expected


@pytest.mark.parametrize("name", device_table().devices)
def test_each_kind_has_a_share_on_each_device(name: str) -> None:
    shares = shares_of(modelled_device(name))
    assert shares.keys() == set(get_args(WorkKind))
    assert set(device_table().kinds.values()) <= shares.keys()
    assert all(0.05 <= part <= 1 for one in shares.values() for part in (one.rate, one.bandwidth))


@pytest.fixture
def own_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "shares.json"
    monkeypatch.setattr(known_devices, "SHARES_FILE", path)
    cache: Any = known_devices._shares  # pyright: ignore[reportPrivateUsage]
    cache.cache_clear()
    yield path
    cache.cache_clear()


def test_modelled_times_are_those_of_the_shares_in_the_file(own_shares: Path) -> None:
    work = OpWork("other", moved_bytes=10**9)
    shares = json.loads(SHARES_FILE.read_text())
    shares["hopper"]["other"] = {"rate": 0.5, "bandwidth": 0.25}
    own_shares.write_text(json.dumps(shares))
    device = modelled_device("h100")
    expected_us = device_table().launch_us + 1e9 / (0.25 * device.bytes_per_us)
    assert Roofline.assumed(device).cost_us("", work) == pytest.approx(expected_us)
    x = torch.randn(2**20, requires_grad=True)
    graph = capture(nn.GELU(), (x,), loss_fn=torch.sum, device="h100")
    gelu = next(op for op in graph.ops if op.target == "aten.gelu.default")
    gelu_us = device_table().launch_us + 2 * 4 * 2**20 / (0.25 * device.bytes_per_us)
    assert gelu.cost_us == pytest.approx(gelu_us)


def test_products_take_their_traffic_too_and_depthwise_ones_no_tensor_cores() -> None:
    device = modelled_device("a100")
    roofline = Roofline(device, {"matmul": PAIR, "depthwise": PAIR, "convolution": PAIR}, 0.0)
    flops, moved_bytes = 10**12, 10**9
    traffic_us = moved_bytes / device.bytes_per_us / 0.25

    def us(kind: WorkKind) -> float:
        return roofline.cost_us("", OpWork(kind, "bfloat16", flops, moved_bytes))

    of_tensor_cores_us = flops / device.flops_per_us("bfloat16") / 0.5
    assert us("matmul") == pytest.approx(of_tensor_cores_us + traffic_us)
    assert us("convolution") == pytest.approx(max(of_tensor_cores_us, traffic_us))
    assert us("depthwise") == pytest.approx(flops / device.flops_per_us("float32") / 0.5)
