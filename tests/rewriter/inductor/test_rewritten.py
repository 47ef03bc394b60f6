"""Rewritten modules that run Inductor's code: gradients, streams, buffers and peaks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
import remat.one_call
from remat.graph_capture.devices.memory_events import measure_peak
from remat.graph_capture.distributed.sharding import Sharding
from remat.graph_capture.errors import BudgetError, CaptureError, RewriteError
from remat.ranks.same_order import agreed_load, agreed_rewrite
from remat.rewriter.checking.comparison import differing_beyond
from remat.rewriter.inductor import compiler
from remat.rewriter.plans.loading import plan_of, save_plan
from tests.limits import AMPLE_S

CLOSE = 2e-6
"""Relative; float32 has 6e-8, and kernels that fuse otherwise add up otherwise."""


def squared(output: Tensor) -> Tensor:
    return output.square().mean()


class Tied(nn.Module):
    """Dropout, a batch norm with running statistics, a counter, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.2)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.norm(self.embed(x))
        for layer in self.layers:
            y = y + self.drop(torch.nn.functional.gelu(layer(y)))
        return self.head(y)


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tied(), torch.randint(64, (2048,))


def trained(model: nn.Module, module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients, buffers and the stream after one step from a fixed seed."""
    torch.manual_seed(1)
    model.zero_grad()
    kept = copied_buffers(model)
    module(x).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    found |= copied_buffers(model)
    found["stream"] = torch.get_rng_state()
    model.load_state_dict(kept, strict=False)
    return found


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(
        float((found[k].double() - v.double()).norm() / v.double().norm().clamp_min(1e-30))
        for k, v in expected.items()
    )


def peak_of(model: nn.Module, module: nn.Module, x: Tensor) -> int:
    held = [*model.parameters(), *model.buffers(), x]
    resident_bytes = sum(t.untyped_storage().nbytes() for t in held)
    model.zero_grad()
    kept = copied_buffers(model)
    peak_bytes = measure_peak(lambda: module(x).backward())
    model.load_state_dict(kept, strict=False)
    return resident_bytes + peak_bytes


@pytest.mark.slow
def test_gradients_are_those_of_the_step_that_keeps_everything() -> None:
    model, x = made()
    graph = remat.capture(model, (x,), loss_fn=squared)
    keep_all = remat.solve(graph, "100%", solver="store_all").schedule
    assert keep_all is not None
    everything = agreed_rewrite(model, keep_all, compile=True)
    expected = trained(model, everything, x)
    peaks = [peak_of(model, everything, x)]
    module = remat.rematerialize(
        model, (x,), loss_fn=squared, budget="55%",
        compile=True, check=False, solver="cut", time_limit_s=AMPLE_S,
    )  # fmt: skip
    found = trained(model, module, x)
    assert furthest(found, expected) < CLOSE
    assert torch.equal(found["stream"], expected["stream"])
    assert torch.equal(found["calls"], expected["calls"])
    peaks.append(peak_of(model, module, x))
    assert peaks[1] <= 0.55 * remat.budgets.unmodified(graph).peak_bytes < peaks[0]
    assert "remat.rewriter.graphs.rng" not in str(module), "printed graphs stay ATen's"


@pytest.mark.slow
def test_random_numbers_are_eagers_in_a_plan_that_draws_again() -> None:
    model, x = made()
    module = remat.rematerialize(
        model, (x,), loss_fn=squared, budget="55%", recompute=["drop"],
        compile=True, check=False, solver="cut", time_limit_s=AMPLE_S,
    )  # fmt: skip
    assert "run_with_rng_state" in module.code
    expected = trained(model, lambda x: squared(model(x)), x)  # pyright: ignore
    found = trained(model, module, x)
    assert torch.equal(found["stream"], expected["stream"])
    assert furthest(found, expected) < 1e-4


@pytest.mark.slow
def test_the_check_says_to_what_tolerance_it_compared() -> None:
    model, x = made()
    module = remat.rematerialize(
        model, (x,), loss_fn=squared, budget="75%", compile=True, solver="cut", time_limit_s=AMPLE_S
    )
    found = remat.check(model, module, (x,), loss_fn=squared, steps=1)
    assert found.equal
    assert (found.tolerance, found.rng_equal) == (0.01, True)
    assert 0 < found.largest_error < 1e-4
    strict = remat.check(model, module, (x,), loss_fn=squared, steps=1, tolerance=0.0)
    assert not strict.gradients_equal, "bits are compared, and eager's are others"
    assert strict.rng_equal


def test_a_wrong_gradient_is_beyond_the_tolerance() -> None:
    torch.manual_seed(0)
    right, noise = torch.randn(1000), 1e-9 * torch.randn(1000)
    expected: dict[str, Any] = {"gradient of a": right, "gradient of b": noise, "stream": right}
    rounded = {**expected, "gradient of a": right * (1 + 1e-5), "gradient of b": -noise}
    assert differing_beyond(expected, rounded, 0.01)[0] == ()
    other_mask = {**expected, "gradient of a": right * (torch.rand(1000) > 0.1)}
    wrong, error = differing_beyond(expected, other_mask, 0.01)
    assert wrong == ("gradient of a",)
    assert error > 0.1
    assert differing_beyond(expected, {**expected, "gradient of a": right / 0}, 0.01)[0]


def test_few_bits_may_differ_by_more() -> None:
    torch.manual_seed(0)
    right = torch.randn(1000)
    expected = {"output": right.bfloat16()}
    assert differing_beyond(expected, {"output": (right * 1.02).bfloat16()}, 0.01)[0] == ()
    assert differing_beyond(expected, {"output": (right * 1.3).bfloat16()}, 0.01)[0] == ("output",)


def test_a_plan_whose_code_exceeds_its_budget_is_warned_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, "code_peak_bytes", lambda joint, schedule: 2**40)
    monkeypatch.setattr("remat.rewriter.rewriting.module_for", lambda *args, **kwargs: None)
    model, x = made()
    graph = remat.capture(model, (x,), loss_fn=squared)
    schedule = remat.solve(graph, "100%").schedule
    assert schedule is not None
    with pytest.warns(UserWarning, match=r"peak of 1099511627776 bytes, above its budget of \d+"):
        agreed_rewrite(model, schedule, compile=True)


def test_a_budget_that_no_code_keeps_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.compile.code_plans.code_peak_bytes", lambda joint, schedule: 2**30)
    model, x = made()
    text = r"give budget='1GiB'.*compiled, no plan was found within .* is 1\.00 GiB"
    with pytest.raises(BudgetError, match=text):
        remat.rematerialize(
            model,
            (x,),
            loss_fn=squared,
            budget="60%",
            compile=True,
            solver="cut",
            time_limit_s=AMPLE_S,
        )


def test_a_sharding_is_refused() -> None:
    model, x = made()
    with pytest.raises(RewriteError, match="sharding is not taken with compile=True"):
        remat.rematerialize(model, (x,), budget="60%", compile=True, sharding=Sharding("ddp", 2))


class Scaled(nn.Module):
    """Multiplies by a plain tensor of few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), torch.full((8,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.slow
def test_a_tensor_that_is_no_parameter_may_change_in_place() -> None:
    model, x = Scaled(), torch.randn(4, 8)
    graph = remat.capture(model, (x,), loss_fn=squared)
    schedule = remat.solve(graph, "100%").schedule
    assert schedule is not None
    module = agreed_rewrite(model, schedule, compile=True)
    for _ in range(2):
        torch.testing.assert_close(module(x), squared(model(x)))
        model.scale.mul_(3)


@pytest.mark.slow
def test_what_is_unpickled_runs_inductors_code_too() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    graph = remat.capture(model, (x,), loss_fn=squared)
    schedule = remat.solve(graph, "100%").schedule
    assert schedule is not None
    module = agreed_rewrite(model, schedule, compile=True)
    copied = pickle.loads(pickle.dumps(module))
    found = remat.check(copied.original_module, copied, (x,), loss_fn=squared, steps=1)
    assert found.tolerance == 0.01
    assert found.equal


class Own(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(8, 8), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * torch.rand(y.shape, generator=self.generator)


def test_a_generator_of_its_own_is_refused() -> None:
    model, x = Own(), torch.randn(4, 8)
    if torch.__version__.startswith("2.11"):
        with pytest.raises(CaptureError, match=r"generator of its own \(module \(root\) of Own"):
            remat.capture(model, (x,), loss_fn=squared)
        return
    graph = remat.capture(model, (x,), loss_fn=squared)
    schedule = remat.solve(graph, "100%").schedule
    assert schedule is not None
    with pytest.raises(RewriteError, match=r"rewrite without compile=True.*generator of its own"):
        agreed_rewrite(model, schedule, compile=True)


@pytest.mark.slow
def test_a_kept_plan_is_loaded_with_inductors_code(tmp_path: Path) -> None:
    model, x = made()
    module = remat.rematerialize(
        model, (x,), loss_fn=squared, budget="60%",
        compile=True, check=False, solver="cut", time_limit_s=AMPLE_S,
    )  # fmt: skip
    save_plan(plan_of(module), tmp_path / "plan.json")
    expected, peak_bytes = trained(model, module, x), peak_of(model, module, x)
    loaded = agreed_load(
        tmp_path / "plan.json", model, loss_fn=squared, compile=True
    )  # fmt: skip
    found = trained(model, loaded, x)
    assert furthest(found, expected) < CLOSE, "Inductor adds the embedding's rows up by atomics"
    assert torch.equal(found["stream"], expected["stream"])
    assert peak_of(model, loaded, x) == peak_bytes
    without = trained(model, agreed_load(tmp_path / "plan.json", model, loss_fn=squared), x)
    assert torch.equal(without["stream"], found["stream"])
    assert furthest(without, found) < 1e-4
