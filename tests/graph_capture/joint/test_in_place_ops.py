"""What is made only to be written to takes no second copy, as in eager; and bits are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.budgets import unmodified
from remat.graph_capture import trace
from remat.graph_capture.graph import JOINED
from remat.graph_capture.joint.nodes import copy_of
from remat.rewriter.checking.check import check
from remat.rewriter.checking.measured_step import measured_step
from remat.rewriter.rewriting import rewrite
from remat.schedules.simulate import simulate
from tests.steps import schedule_of

PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda h, i: h.gather(1, i[:, :, None].expand(-1, -1, 32)),
    "index": lambda h, i: h[torch.arange(8)[:, None], i],
    "index_select": lambda h, i: h.index_select(1, i[0]),
    "take": lambda h, i: h.take(i),
    "topk": lambda h, _: h.topk(8, 1)[0],
    "sort": lambda h, _: h.sort(1)[0],
    "max": lambda h, _: h.max(1)[0],
    "cummax": lambda h, _: h.cummax(1)[0],
    "mode": lambda h, _: h.mode(1)[0],
    "trace": lambda h, _: h[0].trace(),
    "rfft": lambda h, _: torch.fft.rfft(h, dim=2).abs(),
}


class Picks(nn.Module):
    """The gradient of `h` is mostly zeros, and nothing in the step is larger."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.pick = nn.Linear(32, 32), PICKS[how]

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.pick(self.first(x), i).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 64, 32), torch.randint(0, 64, (8, 16))


@pytest.mark.parametrize("how", PICKS)
def test_bits_are_eagers_and_its_peak_fits(how: str) -> None:
    given, model = batch(), Picks(how)
    graph = remat.capture(model, given, split="none")
    assert any(JOINED in op.target for op in graph.ops)
    eager = measured_step(model, model, given).peak_bytes
    schedule = schedule_of(graph, "store_all")
    assert simulate(graph, schedule).peak_bytes <= eager
    found = check(model, rewrite(model, schedule), given, steps=1)
    assert found.equal
    assert found.plan_peak_bytes == simulate(graph, schedule).peak_bytes
    assert unmodified(graph).peak_bytes == pytest.approx(eager, rel=0.01)


class Mask(nn.Module):
    def forward(self, i: Tensor) -> Tensor:
        return torch.zeros(8, 64, 32).scatter_(1, i[:, :, None].expand(-1, -1, 32), 1.0)


class Masked(nn.Module):
    """Zeros that forward makes and fills, and backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mask = nn.Linear(32, 32), Mask()

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return (self.first(x) * self.mask(i)).tanh().sum()


def test_both_run_again_together() -> None:
    given, model = batch(), Masked()
    graph = remat.capture(model, given, split="none")
    (joined,) = (op for op in graph.ops if JOINED in op.target)
    assert joined.target == "aten.zeros.default + aten.scatter.value"
    schedule = remat.solve(graph, "200%", recompute="mask").schedule
    assert schedule is not None
    assert schedule.computations()[joined.name] == 2
    found = check(model, rewrite(model, schedule), given, steps=2)
    assert found.equal
    assert found.plan_peak_bytes == simulate(graph, schedule).peak_bytes


def test_the_code_that_fx_writes_of_the_trace_runs() -> None:
    """The step as a whole is timed by it."""
    module = copy_of(trace(Picks("index"), batch()).joint.module)
    inputs = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    with next(tensor.fake_mode for tensor in inputs if tensor is not None):
        results = module(*inputs)
    assert len(results) == len(module.graph.output_node().args[0])


class ReadsZeros(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros_like(x)
        return (zeros.index_add(0, torch.arange(4), x[:4]) * x + zeros).sum()


def test_what_others_read_stays_an_op_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(16, 16), ReadsZeros())
    x = torch.randn(8, 16)
    graph = remat.capture(model, (x,), split="none")
    assert not any("aten.zeros_like" in op.target and JOINED in op.target for op in graph.ops)
    assert check(model, rewrite(model, schedule_of(graph, "store_all")), (x,), steps=1).equal


class Frozen(nn.Module):
    def __init__(self, how: Callable[[], torch.no_grad | torch.inference_mode]) -> None:
        super().__init__()
        self.how, self.head = how, nn.Linear(128, 8)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in "abcd"))

    def forward(self, x: Tensor) -> Tensor:
        with self.how():
            h = self.body(x)
        return self.head(h.clone()).square().mean()


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode])
def test_what_no_gradient_needs_is_let_go_of_in_the_prediction(
    how: Callable[[], torch.no_grad | torch.inference_mode],
) -> None:
    if how is torch.inference_mode and torch.__version__ < "2.13":
        pytest.skip("functionalization of this torch ends in a KeyError there")
    model, x = Frozen(how), torch.randn(64, 128)
    graph = remat.capture(model, (x,), split="none")
    eager = measured_step(model, model, (x,)).peak_bytes
    assert unmodified(graph).peak_bytes == eager


def halves(h: Tensor, x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    made[:, :16], made[:, 16:] = h[:, :16], x[:, 16:]
    return made


def scaled_half(h: Tensor, x: Tensor) -> Tensor:
    made = h * 2
    made[:, :16].mul_(3)
    return made


def filled(h: Tensor, x: Tensor) -> Tensor:
    made = h + x
    made[0].fill_(3)
    made[1:3] = 7.0
    return made


def conjugate(h: Tensor, x: Tensor) -> Tensor:
    made = torch.zeros(h.shape[0], 32, dtype=torch.complex64)
    made[:, :17] = torch.fft.rfft(h).conj()
    return made.real


RECORDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zero_": lambda h, x: (h + x).zero_(),
    "copy_": lambda h, x: (h + x).copy_(x),
    "add_ and relu_": lambda h, x: (h * 2).add_(x).relu_(),
    "masked_fill_": lambda h, x: (h / 3).masked_fill_(x > 0, -1e9).softmax(-1),
    "halves": halves,
    "scaled half": scaled_half,
    "filled": filled,
    "conjugate": conjugate,
    "circular padding": lambda h, _: nn.functional.pad(h[None], (3, 5), mode="circular"),
    "irfft": lambda h, _: torch.fft.irfft(h),
    "ihfft": lambda h, _: torch.fft.ihfft(h).real,
}


class Writes(nn.Module):
    """Nothing in the step is larger than what forward writes to while autograd records."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.write = nn.Linear(32, 32), RECORDED[how]

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.first(x), x).sum()


@pytest.mark.parametrize("how", RECORDED)
def test_what_autograd_records_is_written_in_place_too(how: str) -> None:
    if how == "irfft" and torch.__version__ < "2.13":
        pytest.skip("the trace of this torch writes to copies that eager does not make")
    torch.manual_seed(0)
    model, given = Writes(how), (torch.randn(128, 32),)
    graph = remat.capture(model, given, split="none")
    assert any(JOINED in op.target for op in graph.ops)
    schedule = schedule_of(graph, "store_all")
    predicted = simulate(graph, schedule).peak_bytes
    assert predicted <= measured_step(model, model, given).peak_bytes + 64
    found = check(model, rewrite(model, schedule), given, steps=2)
    assert found.equal
    assert found.plan_peak_bytes == predicted


class Activation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).relu_()


def test_what_is_written_may_run_again_and_its_traffic_counts() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), Activation(), nn.Linear(32, 8)), torch.randn(64, 32)
    graph = remat.capture(model, (x,), split="none", device="h100")
    (joined,) = (op for op in graph.ops if JOINED in op.target)
    (plain,) = (op for op in graph.ops if op.target == "aten.threshold_backward.default")
    assert joined.cost_us > plain.cost_us
    schedule = remat.solve(graph, "200%", recompute="1").schedule
    assert schedule is not None
    assert schedule.computations()[joined.name] == 2
