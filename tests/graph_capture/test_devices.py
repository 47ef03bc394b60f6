"""Devices that are not here: the table, modelled costs, models without storage."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import remat
from remat.graph_capture import capture, trace
from remat.graph_capture.devices.known_devices import (
    ALLOCATION_BYTES,
    GB,
    device_table,
    modelled_device,
)
from remat.graph_capture.errors import CaptureError, DeviceError, RewriteError, ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.rewriter.checking.check import check
from remat.rewriter.rewriting import rewrite
from remat.schedules.simulate import simulate
from tests.limits import AMPLE_S
from tests.models import make
from tests.rows import each_nth

WIDTH, HEADS, SEQ = 64, 2, 96


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), dropout
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*parts, None, self.dropout, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape)) * self.scale


def blocks(dropout: float = 0.0, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(dropout) for _ in range(3)]).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, SEQ, WIDTH, dtype=dtype)


def planned(model: nn.Module, device: str = "h100") -> TrainingGraph:
    dtype = next(model.parameters()).dtype
    return capture(model, (batch(dtype),), loss_fn=torch.sum, device=device)


@pytest.mark.parametrize("name", list(device_table().devices))
def test_each_device_states_what_a_roofline_needs(name: str) -> None:
    device = modelled_device(name)
    assert 10 * GB < device.memory_bytes < 1000 * GB
    assert device.flops_per_us("float32") <= device.flops_per_us("float16")
    assert device.flops_per_us("bfloat16") >= device.flops_per_us("float32")
    assert 1e5 < device.bytes_per_us < 1e7
    assert device.source.startswith("https://")


def test_faster_devices_have_faster_steps() -> None:
    model = blocks()
    times = [planned(model, name).time_us for name in ("t4", "a100", "h100")]
    assert times == sorted(times, reverse=True)


def test_a_modelled_graph_says_so_and_rounds_sizes_as_the_device_does() -> None:
    graph = planned(blocks())
    assert (graph.device, graph.cost_origin) == ("h100", "modelled")
    assert all(value.size_bytes % ALLOCATION_BYTES == 0 for value in graph.values)
    assert all(op.cost_us > 0 for op in graph.ops if op.target != "remat.tangents")
    assert graph.resident.total_bytes % ALLOCATION_BYTES == 0
    assert TrainingGraph.from_json(graph.to_json()) == graph


def test_attention_is_bound_by_its_arithmetic_and_has_its_float32_sums() -> None:
    graph = planned(blocks(dtype=torch.bfloat16))
    backward = [op for op in graph.ops if "attention" in op.target and op.phase == "backward"]
    padded = 2 * HEADS * 128
    assert len(backward) == 3
    assert {op.workspace_bytes for op in backward} == {4 * padded * (WIDTH // HEADS + 1)}


def test_planning_for_another_device_changes_no_model() -> None:
    model, x = blocks(0.1), batch()
    torch.manual_seed(1)
    before = model(x)
    planned(model)
    torch.manual_seed(1)
    assert torch.equal(model(x), before)


@pytest.mark.slow
def test_the_plan_of_another_device_is_refused_where_its_ops_are_not_those_here() -> None:
    model = blocks(0.1)
    traced = trace(model, (batch(),), loss_fn=torch.sum, device="h100")
    result = remat.solve(planned(model), "auto")
    assert result.schedule is not None
    with pytest.raises(ScheduleError):
        rewrite(model, result.schedule)
    with pytest.raises(ScheduleError):
        rewrite(model, result.schedule, trace=traced)


def test_the_plan_of_another_device_runs_here_where_the_ops_are_the_same() -> None:
    model, x = nn.Sequential(*[nn.Linear(WIDTH, WIDTH), nn.GELU()] * 3), batch()
    graph = capture(model, (x,), loss_fn=torch.sum, device="h100")
    peak_bytes = simulate(graph, remat.solver.make_solver("store_all").schedule(graph)).peak_bytes
    result = remat.solve(graph, f"{peak_bytes * 9 // 10}B allocated")
    assert result.schedule is not None
    module = rewrite(model, result.schedule)
    found = check(model, module, (x,), loss_fn=torch.sum, steps=1)
    assert found.differences == ()


def test_a_model_without_storage_is_planned_as_one_with_it_and_put_back() -> None:
    model, x = blocks(), batch()
    empty = copy.deepcopy(model).to("meta")
    empty[1].norm.weight = empty[0].norm.weight
    model[1].norm.weight = model[0].norm.weight
    before = {name: id(p) for name, p in empty.named_parameters(remove_duplicate=False)}
    here = capture(model, (x,), loss_fn=torch.sum, device="a100")
    graph = capture(empty, (x,), loss_fn=torch.sum, device="a100")
    assert graph == here
    assert {n: id(p) for n, p in empty.named_parameters(remove_duplicate=False)} == before
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    result = remat.solve(graph, "auto")
    assert result.schedule is not None
    with pytest.raises(RewriteError, match="meta device and cannot train"):
        rewrite(empty, result.schedule)
    with pytest.raises(CaptureError, match=r"(?s)meta device.*device='h100'"):
        capture(empty, (x,), loss_fn=torch.sum)


def test_auto_is_the_memory_of_the_device_less_a_tenth() -> None:
    result = remat.solve(planned(blocks(), "l4"), "auto")
    assert result.budget_bytes == int(0.9 * modelled_device("l4").memory_bytes)
    assert (result.status, result.overhead) == ("optimal", 0.0)


@pytest.mark.parametrize(
    "name", each_nth(4, ["attention", "tied_weights", "batch_norm_in_place_relu", "dropout"])
)
def test_each_kind_of_model_can_be_planned_for_a_device(name: str) -> None:
    model, args, kwargs, loss_fn, target = make(name)
    graph = capture(model, args, kwargs, loss_fn=loss_fn, target=target, device="rtx4090")
    result = remat.solve(graph, "min", "cut", time_limit_s=AMPLE_S)
    assert result.schedule is not None
    assert simulate(graph, result.schedule).peak_bytes == result.peak_bytes


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="this torch sees no CUDA device"):
        planned(blocks(), name)


@pytest.mark.parametrize("name", [7, torch.device("cpu")])
def test_a_device_is_named_by_a_text(name: Any) -> None:
    with pytest.raises(DeviceError, match="give a device as a string"):
        planned(blocks(), name)


def test_near_names_are_listed() -> None:
    with pytest.raises(DeviceError, match="'H100': did you mean h100"):
        planned(blocks(), "H100")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_fake_cuda_tensors_are_refused_before_autograd_sees_them() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, SEQ, WIDTH, device="cuda")
        weight = nn.Parameter(torch.empty(WIDTH, device="cuda"))
    with pytest.raises(DeviceError, match=r"args\[0\] is on cuda"):
        capture(blocks(), (x,), loss_fn=torch.sum, device="h100")
    model = blocks()
    model[0].norm.weight = weight
    with pytest.raises(DeviceError, match=r"parameter 0\.norm\.weight is on cuda"):
        capture(model, (batch(),), loss_fn=torch.sum)


def test_the_table_is_plain_json_of_known_keys() -> None:
    from remat.graph_capture.devices.known_devices import DEVICES_FILE

    shown = json.loads(DEVICES_FILE.read_text())
    assert json.loads(msgspec.json.encode(device_table())) == shown
