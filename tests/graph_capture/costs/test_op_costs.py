"""Costs: measured once per distinct op, kept on disk, never in the way."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from remat.graph_capture import trace
from remat.graph_capture.costs import cache as cost_cache
from remat.graph_capture.costs import op_costs
from remat.graph_capture.costs.cache import (
    FUSED_ATTENTION,
    CostCache,
    OpCost,
    flops_of,
    flops_of_call,
    moved_bytes,
)
from remat.graph_capture.costs.op_costs import SAVE_RNG_KEY
from remat.graph_capture.costs.op_times import sample_arguments
from remat.graph_capture.devices.memory_events import measure_peak, measure_regions
from remat.graph_capture.devices.meter import CpuMeter
from tests.models import make

pytestmark = pytest.mark.usefixtures("clocked")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    return tmp_path


def test_every_real_op_has_a_cost_and_equal_ops_have_equal_costs(folder: Path) -> None:
    model, args, *_ = make("dropout")
    graph = op_costs.measure_costs(trace(model, args))
    assert graph.cost_origin == "measured"
    ours = ("remat.tangents", "remat.statistics")
    assert all(op.cost_us > 0 for op in graph.ops if op.target not in ours)
    costs = {op.cost_us for op in graph.ops if op.target == "aten.gelu.default"}
    assert len(costs) == 1
    assert graph.hash == trace(model, args).graph.hash


def test_a_second_timing_measures_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, *_ = make("plain")
    first = op_costs.measure_costs(trace(model, args))
    monkeypatch.setattr(op_costs, "time_ops", lambda *_: pytest.fail("measured again"))
    assert op_costs.measure_costs(trace(model, args)) == first
    assert len(list(folder.glob("prices-*.json"))) == 1


def test_a_cost_that_is_kept_stays_while_others_are_measured(folder: Path) -> None:
    kept = OpCost(77.0)
    cache = CostCache()
    cache.costs[SAVE_RNG_KEY] = kept
    cache.save()
    model, args, *_ = make("dropout")
    for _ in range(2):
        _, found = op_costs.measure_costs_with(trace(model, args), CpuMeter(), CostCache())
        assert found.of_key[SAVE_RNG_KEY] == CostCache().costs[SAVE_RNG_KEY] == kept


def test_measured_again_costs_take_the_place_of_those_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args, *_ = make("plain")
    op_costs.measure_costs(trace(model, args))
    other = dict.fromkeys(CostCache().costs, OpCost(cost_us=77.0))
    monkeypatch.setattr(op_costs, "time_ops", lambda *_: (other, frozenset()))
    assert 77.0 not in {op.cost_us for op in op_costs.measure_costs(trace(model, args)).ops}
    op_costs.measure_costs(trace(model, args), measure_again=True)
    assert set(CostCache().costs.values()) == {OpCost(cost_us=77.0)}


def test_of_two_processes_that_measure_one_op_the_first_is_believed_by_both(folder: Path) -> None:
    first, second = CostCache(), CostCache()
    first.costs["an op"] = OpCost(1.0, 0)
    second.costs["an op"] = OpCost(2.0, 0)
    first.save()
    second.save()
    assert second.costs["an op"] == CostCache().costs["an op"] == OpCost(1.0, 0)
    second.costs["another"] = OpCost(3.0, 0)
    second.save()
    first.save()
    assert first.costs == second.costs == CostCache().costs
    anew = CostCache()
    anew.forget()
    anew.costs["an op"] = OpCost(4.0, 0)
    anew.save()
    first.save()
    assert CostCache().costs == {"an op": OpCost(4.0, 0), "another": OpCost(3.0, 0)}
    assert first.costs["an op"] == OpCost(1.0, 0)


def test_a_corrupt_cache_is_ignored_with_a_warning_and_replaced(folder: Path) -> None:
    model, args, *_ = make("plain")
    op_costs.measure_costs(trace(model, args))
    (path,) = folder.glob("prices-*.json")
    path.write_text("{nonsense")
    with pytest.warns(UserWarning, match="which is made anew"):
        op_costs.measure_costs(trace(model, args))
    assert CostCache().costs


def test_a_cache_of_another_schema_is_not_read_and_written_anew(folder: Path) -> None:
    model, args, *_ = make("plain")
    op_costs.measure_costs(trace(model, args))
    (path,) = folder.glob("prices-*.json")
    path.write_text(path.read_text().replace('"schema_version":8', '"schema_version":7'))
    assert CostCache().costs == CostCache().steps == {}
    op_costs.measure_costs(trace(model, args))
    assert CostCache().costs
    assert list(CostCache().steps) == [trace(model, args).graph.hash]


def test_an_estimate_is_the_time_to_move_the_bytes_that_work_counts() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1, 4, device="meta").expand(1000, 4)
    node = graph.call_function(torch.ops.aten.exp.default, (x,))
    node.meta["val"] = torch.empty(1000, 4, device="meta")
    with pytest.warns(UserWarning, match="its cost is estimated from the bytes it moves"):
        estimate = op_costs._estimated(node, RuntimeError("no"))
    assert moved_bytes(node) == 4 * 4 + 4 * 4000
    assert estimate.cost_us == moved_bytes(node) / op_costs.ESTIMATED_BYTES_PER_US
    assert estimate.is_estimate


def test_a_folder_that_cannot_be_written_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("REMAT_CACHE", str(blocked / "cache"))
    model, args, *_ = make("plain")
    with pytest.warns(UserWarning, match="costs are not kept"):
        assert op_costs.measure_costs(trace(model, args)).time_us > 0


def test_timing_leaves_the_random_stream_alone(folder: Path) -> None:
    model, args, *_ = make("noise")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    op_costs.measure_costs(trace(model, args))
    assert torch.equal(before, torch.get_rng_state())


def test_progress_is_told_in_order(folder: Path) -> None:
    model, args, *_ = make("plain")
    told: list[tuple[int, int | None]] = []
    named: list[str] = []

    def progress(done: int = 0, total: int | None = None, *, text: str = "") -> None:
        if text:
            named.append(text)
        else:
            told.append((done, total))

    op_costs.measure_costs(trace(model, args), progress=progress)
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, total in told} == {len(told)}
    assert named[0] == f"timing {len(told)} kinds of op"


def test_the_profiler_sees_what_is_allocated() -> None:
    def run() -> torch.Tensor:
        big = torch.empty(1000, dtype=torch.float64)
        small = torch.empty(10, dtype=torch.float64)
        del big
        return small

    assert measure_peak(run) == 8080
    regions = measure_regions([run, lambda: torch.zeros(7, dtype=torch.uint8)])
    assert [r.final_bytes for r in regions] == [80, 7]
    assert [r.peak_bytes for r in regions] == [8080, 7]


def test_garbage_is_not_collected_while_memory_is_measured() -> None:
    before: list[torch.Tensor] = []
    measure_peak(lambda: before.append(torch.empty(1000, dtype=torch.float64)))

    def run() -> tuple[torch.Tensor, list[list[int]]]:
        cycle: list[object] = [before.pop()]
        cycle.append(cycle)
        del cycle
        first = torch.empty(500, dtype=torch.float64)
        many = [[i] for i in range(50)]
        return torch.cat([first, first]), many

    thresholds = gc.get_threshold()
    gc.set_threshold(10)
    try:
        assert measure_peak(run) == 12_000
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize(("target", "is_factor"), [("addmm", True), ("gelu", False)])
def test_products_are_timed_on_numbers_of_both_signs(target: str, is_factor: bool) -> None:
    """What others read may have to be a probability."""
    model = nn.Sequential(nn.Linear(8192, 3), nn.GELU())
    joint = trace(model, (torch.randn(5, 8192),)).joint
    (node,) = (n for n in joint.node_of_op.values() if n.name == target)
    made = sample_arguments(node, joint.module)[0][1 if is_factor else 0]
    assert bool(made.min() < 0) == is_factor
    assert (made.min() > 0.09 and made.max() < 0.91) != is_factor
    assert len(made.unique()) > 0.9 * made.numel()  # rows differ


def test_an_assertion_is_measured_with_what_it_asserts() -> None:
    class OneHot(nn.Linear):
        def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            # As one_hot does, in newer releases of torch.
            torch._assert_async((classes < self.out_features).all(), "no such class")
            one_hot = nn.functional.one_hot(classes, self.out_features)
            return (super().forward(x).softmax(1) * one_hot).sum()

    joint = trace(OneHot(8, 4), (torch.randn(64, 8), torch.randint(4, (64,)))).joint
    asserted = [node for name, node in joint.node_of_op.items() if "assert" in name]
    assert asserted
    for node in asserted:
        # Made flags are True nine times in ten.
        drawn = [sample_arguments(node, joint.module)[0][0] for _ in range(100)]
        assert all(bool(condition.all()) for condition in drawn)


class GroupedQueries(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = super().forward(x).view(2, 16, 4, 8).transpose(1, 2)
        k, v = q[:, :2], q[:, 2:]
        attention = nn.functional.scaled_dot_product_attention
        return attention(q, k, v, is_causal=True, enable_gqa=True).sum()


def test_a_head_of_keys_is_read_by_all_its_queries() -> None:
    """Torch's own formula takes as many of both alone, in older releases."""
    joint = trace(GroupedQueries(32, 32), (torch.randn(2, 16, 32),)).joint
    found = {
        op.phase: flops_of(joint.node_of_op[op.name])
        for op in joint.graph.ops if op.target.startswith(FUSED_ATTENTION)
    }  # fmt: skip
    product = 2 * 2 * 4 * 16 * 16 * 8
    assert found == {"forward": 2 * product, "backward": 5 * product}


CONVOLUTIONS = {
    **{f"{g} groups": (nn.Conv2d(128, 128, 3, groups=g), (14, 14)) for g in (1, 2, 8, 32, 128)},
    "depthwise": (nn.Conv2d(96, 96, 7, padding=3, groups=96), (14, 14)),
    "more out than in": (nn.Conv2d(32, 64, 3, stride=2, groups=4), (14, 14)),
    "1d": (nn.Conv1d(32, 64, 5, groups=8), (40,)),
    "3d": (nn.Conv3d(16, 32, 3, groups=4), (6, 6, 6)),
    "transposed": (nn.ConvTranspose2d(32, 64, 3, stride=2, groups=8), (7, 7)),
    "transposed 1d": (nn.ConvTranspose1d(32, 16, 4, stride=2, groups=2), (20,)),
    "transposed 3d": (nn.ConvTranspose3d(8, 16, 3, groups=2), (4, 4, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_backward_of_a_convolution_takes_twice_the_flops_of_forward(name: str) -> None:
    """Torch's own formula counts that of the weights once for each group."""
    module, image = CONVOLUTIONS[name]
    x = torch.randn(2, module.in_channels, *image, requires_grad=True)
    joint = trace(module, (x,), loss_fn=torch.sum).joint
    found = {
        op.phase: flops_of(joint.node_of_op[op.name])
        for op in joint.graph.ops if op.target.startswith("aten.convolution")
    }  # fmt: skip
    of_each = x if module.transposed else module(x)
    forward = 2 * 2 * module.weight.numel() * of_each[0, 0].numel()
    assert found == {"forward": forward, "backward": 2 * forward}


def test_backward_of_a_convolution_counts_the_gradients_that_it_makes() -> None:
    joint = trace(nn.Conv2d(8, 8, 3, groups=4), (torch.randn(2, 8, 9, 9),), loss_fn=torch.sum).joint
    flops = [
        flops_of(joint.node_of_op[op.name])
        for op in joint.graph.ops if op.target.startswith("aten.convolution")
    ]  # fmt: skip
    assert flops[0] == flops[1] > 0  # no gradient of the batch


@pytest.mark.parametrize(
    ("left", "right", "made", "flops"),
    [
        ((40, 16), (4, 16, 8), (40, 8), 2 * 40 * 16 * 8),  # rows of each expert
        ((16, 40), (40, 8), (4, 16, 8), 2 * 16 * 40 * 8),  # gradients of weights
        ((4, 10, 16), (16, 8), (10, 8), 2 * 10 * 16 * 8),  # columns of each
        ((4, 10, 16), (4, 16, 8), (4, 10, 8), 4 * 2 * 10 * 16 * 8),
    ],
)
def test_products_in_groups_have_the_flops_of_their_parts(
    left: tuple[int, ...], right: tuple[int, ...], made: tuple[int, ...], flops: int
) -> None:
    given, result = [torch.empty(left), torch.empty(right), None], torch.empty(made)
    assert flops_of_call(torch.ops.aten._grouped_mm.default, given, {}, result) == flops


@pytest.mark.slow
def test_measuring_writes_nothing_and_leaves_the_environment_alone() -> None:
    script = (
        "import os, torch\n"
        "from remat.graph_capture.devices.memory_events import measure_peak\n"
        "assert measure_peak(lambda: torch.ones(1000)) >= 4000\n"
        "assert 'KINETO_LOG_LEVEL' not in os.environ\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


BUSY, QUIET = 0.4, 0.0


def kept_as(cost: OpCost, monkeypatch: pytest.MonkeyPatch, *, is_quiet: bool) -> CostCache:
    """A cache that keeps that cost, as a process finds it while the machine is quiet or not."""
    monkeypatch.setattr(CpuMeter, "is_quiet", lambda _: is_quiet)
    cache = CostCache()
    cache.keep_costs({"an op": cost})
    return CostCache()


def test_what_was_measured_while_the_machine_was_busy_is_measured_on_a_quiet_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cost, is_quiet, is_settled in (
        (OpCost(9.0, away=BUSY), False, True),
        (OpCost(9.0, away=BUSY), True, False),
        (OpCost(3.0, away=QUIET), True, True),
    ):
        cache = kept_as(cost, monkeypatch, is_quiet=is_quiet)
        assert cache.costs["an op"] == cost
        assert cache.settled(["an op", "another"], CpuMeter()) == (
            {"an op"} if is_settled else set()
        )


def test_of_two_costs_the_one_of_the_quieter_time_stays(folder: Path) -> None:
    cache = CostCache()
    busy, less, quiet = OpCost(9.0, away=BUSY), OpCost(8.0, away=BUSY), OpCost(8.5, away=QUIET)
    for found, stays in (
        (busy, busy), (less, less), (busy, less), (quiet, quiet),
        (less, quiet), (OpCost(1.0, away=QUIET), quiet),
    ):  # fmt: skip
        cache.keep_costs({"an op": found})
        assert cache.costs["an op"] == CostCache().costs["an op"] == stays


def test_a_step_that_is_quicker_than_its_costs_has_them_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args, *_ = make("plain")
    traced = trace(model, args)
    op_costs.measure_costs(traced)
    op_costs.doubt_costs(traced)
    keys = op_costs.examples(traced.joint)
    meter = CpuMeter()
    assert CostCache().settled(keys, meter) == set(keys)
    monkeypatch.setattr(CpuMeter, "is_quiet", lambda _: True)
    assert CostCache().settled(keys, meter) == set()
    assert not CostCache().has_step(traced.joint.timed_hash, meter)
    monkeypatch.setattr(cost_cache, "BUSY", 1.0)  # nothing that is measured now is in doubt
    op_costs.measure_costs(traced)
    assert CostCache().settled(keys, meter) == set(keys)
