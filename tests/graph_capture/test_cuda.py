"""Capture for a CUDA device, with the step on the CPU and a device that only counts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture import capture, refusals, trace
from remat.graph_capture.costs import op_costs
from remat.graph_capture.costs.cache import Profile
from remat.graph_capture.devices.cuda import CudaMeter
from remat.graph_capture.devices.known_devices import (
    ALLOCATION_BYTES,
    allocator_rounding,
    check_device,
    table_name,
)
from remat.graph_capture.devices.memory_events import RegionMemory
from remat.graph_capture.devices.placement import check_placement, resolved_device
from remat.graph_capture.errors import CaptureError, DeviceError, ProfileError
from remat.graph_capture.graph import TANGENTS, TrainingGraph
from remat.graph_capture.joint import exact_ops
from remat.graph_capture.refusals import cudnn_rnn_message, refuse_module
from remat.rewriter.checking.check import check
from remat.rewriter.rewriting import rewrite
from tests.fake_cuda import LIBRARY_BYTES, PROPERTIES, TITLE, FakeCuda, as_if_on_cuda, cuda
from tests.models import make

__all__ = ["as_if_on_cuda", "cuda"]


def step(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 17), nn.GELU(), nn.Dropout(0.1), nn.Linear(17, 5))
    return {"model": model, "args": (torch.randn(9, 33),), "loss_fn": torch.sum, **changes}


def test_a_graph_of_a_cuda_device_has_its_costs_sizes_and_versions(
    as_if_on_cuda: FakeCuda,
) -> None:
    as_if_on_cuda.device_us = 1e6
    graph = capture(**step(), device="cuda")
    assert (graph.device, graph.cost_origin) == ("cuda:0", "measured")
    assert {round(op.cost_us) for op in graph.ops if op.target != TANGENTS} == {10**6}
    assert all(v.size_bytes % ALLOCATION_BYTES == 0 for v in graph.values)
    assert any(v.size_bytes for v in graph.values if v.producer)
    assert graph.resident.libraries_bytes == LIBRARY_BYTES
    assert graph.resident.total_bytes % ALLOCATION_BYTES == 0
    assert graph.versions["priced_on"] == TITLE
    assert {"cuda", "cudnn", "driver"} <= graph.versions.keys()
    assert TrainingGraph.from_json(graph.to_json()) == graph


def test_what_made_data_took_is_given_back_once_ops_are_priced(
    as_if_on_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CudaMeter.median_us

    def leaving(self: CudaMeter, *given: Any) -> float:
        as_if_on_cuda.reserved_bytes += 999  # segments that stay with the allocator
        return run(self, *given)

    monkeypatch.setattr(CudaMeter, "median_us", leaving)
    capture(**step(), device="cuda")
    assert as_if_on_cuda.reserved_bytes == as_if_on_cuda.allocated_bytes


def test_workspaces_are_what_an_op_asks_for_beyond_its_results(
    as_if_on_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def regions(_: CudaMeter, runs: Iterable[Any]) -> list[RegionMemory]:
        return [RegionMemory(peak_bytes=3000, final_bytes=0) for _ in runs]

    monkeypatch.setattr(CudaMeter, "regions", regions)
    graph = capture(**step(), device="cuda")
    (gelu,) = (op for op in graph.ops if op.target == "aten.gelu.default")
    assert gelu.workspace_bytes == allocator_rounding("cuda:0")(3000 - 9 * 17 * 4) == 2560
    assert allocator_rounding("cpu")(700) == 700


def test_a_saved_random_state_takes_nothing_on_the_device() -> None:
    from remat.graph_capture.joint.build import rng_state_bytes

    assert rng_state_bytes(torch.device("cuda:0")) == 0
    assert rng_state_bytes(torch.device("cpu")) == torch.get_rng_state().nbytes


def test_what_a_step_has_on_the_host_takes_nothing_on_the_device() -> None:
    joint = trace(**step()).joint
    assert op_costs._on_the_host(joint) == frozenset(joint.base_of_value)


def test_a_profile_of_a_cuda_device_names_it_and_serves_it(as_if_on_cuda: FakeCuda) -> None:
    profile = remat.profile(**step(), device="cuda")
    assert (profile.device, profile.title) == ("cuda", TITLE)
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.versions.keys() == {"cuda", "cudnn", "driver"}
    graph = capture(**step(), device="cuda", profile=profile)
    assert graph.notes[0] == f"measured on {TITLE} with torch {torch.__version__}"
    with pytest.raises(ProfileError, match="of cuda, not a CPU"):
        capture(**step(), profile=profile, device="cpu")
    on_a_cpu = msgspec.structs.replace(profile, device="cpu")
    with pytest.raises(ProfileError, match="of cpu, not a CUDA device"):
        capture(**step(), device="cuda", profile=on_a_cpu)


def test_a_profile_of_a_cuda_device_serves_the_device_of_the_table_that_it_is(
    as_if_on_cuda: FakeCuda,
) -> None:
    profile = remat.profile(**step(), device="cuda")
    graph = capture(**step(), device="h100", profile=profile)
    assert graph.cost_origin == "mixed"
    assert f"measured on {TITLE}" in graph.notes[0]
    with pytest.raises(ProfileError, match=f"device='h100', .* of cuda, not a100; .* on {TITLE}"):
        capture(**step(), device="a100", profile=profile)


def test_the_clocks_are_kept_with_the_costs(
    as_if_on_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(meter: CudaMeter) -> None:
        meter.clocks = {"sm_mhz": "1755"}

    monkeypatch.setattr(CudaMeter, "settle", settle)
    for _ in range(2):  # the second finds its costs on disk
        assert capture(**step(), device="cuda").versions["sm_mhz"] == "1755"
    assert remat.profile(**step(), device="cuda").versions["sm_mhz"] == "1755"


@pytest.mark.parametrize(("memory_gb", "is_whole"), [(79.2, True), (39.5, False)])
def test_a_device_with_less_memory_than_its_name_says_is_not_that_device(
    as_if_on_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, memory_gb: float, is_whole: bool
) -> None:
    monkeypatch.setattr(PROPERTIES, "total_memory", int(memory_gb * 10**9))
    profile = remat.profile(**step(), device="cuda")
    assert (table_name(profile.title), profile.title == TITLE) == ("h100" * is_whole, is_whole)
    if not is_whole:
        assert profile.title == f"{TITLE}, 39.5 GB of it"
        with pytest.raises(ProfileError, match=r"^plan for device='cuda', .* of cuda, not h100"):
            capture(**step(), device="h100", profile=profile)


@pytest.mark.parametrize(
    ("title", "name"),
    [
        (TITLE, "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce GTX 1080", ""),
        ("A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", ""),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""),
        ("NVIDIA GeForce RTX 4090 D", ""),
        ("NVIDIA GH200 480GB", ""),
    ],
)
def test_the_table_knows_a_device_by_its_drivers_title(title: str, name: str) -> None:
    assert table_name(title) == name


def test_the_device_is_where_the_model_is_and_has_an_index(cuda: FakeCuda) -> None:
    assert resolved_device(None, nn.Linear(2, 2)) == "cpu"
    assert resolved_device("cuda", nn.Linear(2, 2)) == "cuda:0"
    assert resolved_device("h100", nn.Linear(2, 2)) == "h100"
    check_device("cuda:0")
    with pytest.raises(DeviceError, match="no device 'cuda:1': this torch sees cuda:0"):
        check_device("cuda:1")


@pytest.mark.parametrize(
    ("found", "device", "says"),
    [
        ("cpu", "cuda:0", r"\.to\('cuda:0'\): weight is on cpu, .* captured on cuda:0"),
        ("cuda:1", "cuda:0", "weight is on cuda:1, and the step is captured on cuda:0"),
        ("cuda:0", "cpu", "capture with device='cuda:0', .* weight is on cuda:0"),
        ("cuda:0", "h100", "weight is on cuda:0, and a step for h100 is captured on cpu"),
    ],
)
def test_tensors_of_two_devices_are_refused_by_name(
    cuda: FakeCuda, found: str, device: str, says: str
) -> None:
    with pytest.raises(DeviceError, match=says):
        check_placement("weight", torch.device(found), device)
    for good in (("cpu", "cpu"), ("cuda:0", "cuda:0"), ("meta", "h100")):
        check_placement("weight", torch.device(good[0]), good[1])


def test_a_batch_that_is_elsewhere_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(DeviceError, match=r"parameter 0\.weight is on cpu"):
        capture(**step(), device="cuda")


ELSEWHERE = """
import torch, remat
class Elsewhere(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) @ torch.zeros(4, 4, device="cuda")
for device in (None, "cpu", "h100"):
    try:
        remat.capture(Elsewhere(4, 4), (torch.zeros(2, 4),), loss_fn=torch.sum, device=device)
    except remat.RematError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_forward_that_makes_cuda_tensors_is_refused_and_ends_no_process() -> None:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 3
    assert all("makes a tensor on cuda:0 in a step captured on cpu" in s for s in said)
    assert all("with device=x.device: " in s and "(module (root) of Elsewhere" in s for s in said)


def test_recurrent_layers_of_cudnn_are_refused(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "check_placement", lambda *_: None)
    model = nn.Sequential(nn.LSTM(8, 8))
    with pytest.raises(
        CaptureError, match=r"(?s)cudnn\.flags\(enabled=False.*\n0 runs as one cuDNN op"
    ):
        refuse_module(model, "cuda:0")
    with torch.backends.cudnn.flags(enabled=False):
        refuse_module(model, "cuda:0")
    assert "a recurrent layer runs" in cudnn_rnn_message("")


def test_what_only_a_cpu_cannot_do_is_not_refused_on_cuda(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "check_placement", lambda *_: None)
    with pytest.raises(CaptureError, match="hidden_size 5"):
        refuse_module(nn.GRUCell(5, 5), "cpu")
    refuse_module(nn.GRUCell(5, 5), "cuda:0")


def test_an_op_that_breaks_the_device_ends_timing(
    as_if_on_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(CudaMeter, "median_us", broken)
    monkeypatch.setattr(CudaMeter, "rng_state", lambda _: torch.zeros(1))
    with pytest.raises(RuntimeError, match="device-side assert"):
        capture(**step(), device="cuda")
    node = next(iter(trace(**step()).joint.node_of_op.values()))
    with pytest.raises(CaptureError, match="left the CUDA device unusable in this process"):
        op_costs._refuse_broken_device(node, RuntimeError("CUDA error: device-side assert"))
    op_costs._refuse_broken_device(node, RuntimeError("out of memory"))


@pytest.fixture
def by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norms take the op that chooses between kernels; on a CPU it has one to choose."""
    monkeypatch.setattr(exact_ops, "is_by_cudnn", lambda *_: True)


@pytest.mark.parametrize("kind", ["store_all", "chen_sqrt"])
def test_batch_norms_of_chosen_kernels_train_as_eager(by_cudnn: None, kind: str) -> None:
    model, args, *_ = make("batch_norm_in_place_relu")
    graph = capture(model, args)
    norms = [op for op in graph.ops if "batch_norm" in op.target]
    assert {op.target for op in norms} == {
        "aten._batch_norm_with_update_functional.default", "aten.batch_norm_backward.default"
    }  # fmt: skip
    assert all("reserved" in op.no_recompute for op in norms if op.phase == "backward")
    schedule = remat.solver.make_solver(kind).schedule(graph)
    module = rewrite(model, schedule)
    assert ("remat.batch_norm" in module.code) == (kind == "chen_sqrt")
    assert check(model, module, args, steps=1).differences == ()


class WithoutStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()).square().mean()


def test_batch_norms_without_statistics_too(by_cudnn: None) -> None:
    model, args = WithoutStatistics(), (torch.randn(2, 3, 8, 8),)
    graph = capture(model, args)
    assert "remat.batch_norm.default" in {op.target for op in graph.ops}
    module = rewrite(model, remat.solver.make_solver("chen_sqrt").schedule(graph))
    assert check(model, module, args, steps=1).differences == ()


def test_what_a_kernel_trusts_comes_from_its_own_op(
    by_cudnn: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from remat.graph_capture.costs import op_times

    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    taken: list[str] = []
    honest = op_times.runner_of

    def noted(source: Any, constants: Any) -> Any:
        taken.append(str(source.target))
        return honest(source, constants)

    monkeypatch.setattr(op_times, "runner_of", noted)
    capture(WithoutStatistics(), (torch.randn(2, 3, 8, 8),))
    assert set(taken) == {"remat.batch_norm.default"}
