"""Models that are called several times a step, on several shapes, or beside each other."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from remat.compile.graph_context import compiled_plans
from remat.graph_capture.devices.memory_events import measure_peak
from remat.graph_capture.errors import BudgetError, RewriteError, SolverError
from tests.limits import AMPLE_S
from tests.remat.compile.one_start import Classifier, twice

NEW_CODE = {"fx_graph_cache": False}  # torch's key does not say what backward writes over
FEW = {"replays": 4, "solver": "cut", "time_limit_s": AMPLE_S}


class Net(nn.Module):
    """Two parts of linear layers and activations, by name."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = part(width), part(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def part(width: int) -> nn.Sequential:
    layers = [m for _ in range(3) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers)


def peak_of(model: nn.Module, batch: Tensor, step: object) -> int:
    model.zero_grad()
    held = [*model.parameters(), batch]
    resident_bytes = sum(t.untyped_storage().nbytes() for t in held)
    return resident_bytes + measure_peak(step)  # pyright: ignore


@pytest.mark.slow
def test_each_shape_has_a_plan_of_its_own() -> None:
    model = Net()
    compiled = torch.compile(model, backend="remat", options={**FEW, "budget": "70%"})
    before = len(compiled_plans())
    for size in (4096, 2048):
        x = torch.randn(size, 32)
        model.zero_grad()
        compiled(x).backward()
        plan = compiled_plans()[-1]
        assert len(compiled_plans()) == before + 1
        before += 1
        assert plan.budget_bytes == int(0.7 * plan.baseline_peak_bytes)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert peak_of(model, x, lambda x=x: compiled(x).backward()) <= plan.budget_bytes
        model.zero_grad()
        model(x).backward()
        for gradient, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, p.grad)
    larger, smaller = compiled_plans()[-2:]
    assert smaller.budget_bytes < 0.6 * larger.budget_bytes
    compiled(torch.randn(4096, 32)).backward()
    # Dynamo has made sizes symbols by now, and asks its newest graph first.
    assert len(compiled_plans()) <= before + 1
    before = len(compiled_plans())
    for size in (2048, 4096):
        compiled(torch.randn(size, 32)).backward()
    assert len(compiled_plans()) == before, "both plans are at hand"


@pytest.mark.slow
def test_the_last_batch_of_an_epoch_may_take_what_others_take() -> None:
    model = Net(128)
    compiled = torch.compile(model, backend="remat", options={**FEW, "budget": "70%"})
    for rows in (2048, 8):
        compiled(torch.randn(rows, 128)).backward()
    larger, last = compiled_plans()[-2:]
    assert last.budget_bytes == larger.budget_bytes > last.baseline_peak_bytes
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="remat", options={**FEW, "budget": "70%"})
    with pytest.raises(BackendCompilerFailed, match=r"is below .* the lowest peak"):
        compiled(torch.randn(8, 128))


@pytest.mark.slow
def test_two_forwards_before_backward_need_room_for_both() -> None:
    model, x = Net(), torch.randn(4096, 32)

    def step() -> None:
        (compiled(x) + compiled(x)).backward()

    compiled = torch.compile(model, backend="remat", options={**FEW, "budget": "60%"})
    compiled(x).backward()
    compiled(x).backward()
    one = compiled_plans()[-1]
    with pytest.raises(BudgetError, match=r"(?s)call backward before.*\"calls\": 2.*its own"):
        step()
    with torch.no_grad():
        held = [compiled(x) for _ in range(2)]
    compiled(x).backward()
    assert len(held) == 2, "what needs no backward leaves nothing"

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="remat", options={**FEW, "budget": "60%", "calls": 2})
    model.zero_grad()
    step()
    plan = compiled_plans()[-1]
    assert plan.baseline_peak_bytes > 1.3 * one.baseline_peak_bytes
    assert peak_of(model, x, step) <= plan.budget_bytes
    with pytest.raises(BudgetError, match=r"(?s)\"calls\": 3.*2 forwards whose"):
        (compiled(x) + compiled(x) + compiled(x)).backward()


class Split(Net):
    """The same, of two graphs whose gradients are as large as what they keep."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y).square().mean()


@pytest.mark.slow
def test_gradients_of_all_graphs_of_a_split_model_count() -> None:
    x = torch.randn(256, 256)
    for budget in ("100%", "1GiB"):
        torch._dynamo.reset()
        model = Split(256)
        compiled = torch.compile(model, backend="remat", options={**FEW, "budget": budget})
        before = len(compiled_plans())
        for _ in range(2):
            model.zero_grad()
            compiled(x).backward()
        plans = compiled_plans()[before:]
        measured = peak_of(model, x, lambda run=compiled: run(x).backward())
        assert len(plans) == 2
        handed_to_backward_bytes = 4
        assert measured - handed_to_backward_bytes <= plans[-1].budget_bytes
        assert max(plan.peak_bytes for plan in plans) == pytest.approx(measured, rel=0.01)
    torch._dynamo.reset()
    parameters_bytes = sum(p.numel() * p.element_size() for p in Split(256).parameters())
    too_small = {**FEW, "budget": 2 * parameters_bytes}
    with pytest.raises(BackendCompilerFailed, match=r"is below .*the lowest peak of"):
        torch.compile(Split(256), backend="remat", options=too_small)(x)


@pytest.mark.slow
def test_two_models_may_share_their_options() -> None:
    options = {**FEW, "budget": "70%"}
    for width in (32, 48):
        model, x = Net(width), torch.randn(2048, width)
        compiled = torch.compile(model, backend="remat", options=options)
        for _ in range(2):
            compiled(x).backward()
        own_bytes = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), x))
        assert compiled_plans()[-1].held_bytes == own_bytes, "nothing of the other model"


def planned(**options: object) -> set[str]:
    """What a plan computes again."""
    torch._dynamo.reset()
    compiled = torch.compile(Net(), backend="remat", options={**FEW, "budget": "90%", **options})
    compiled(torch.randn(2048, 32)).backward()
    schedule = compiled_plans()[-1].schedule
    assert schedule is not None
    return {op for op, count in schedule.computations().items() if count > 1}


@pytest.mark.slow
def test_globs_pin_modules() -> None:
    first, second = planned(recompute="first"), planned(recompute="second", keep="first")
    assert first
    assert second
    assert not first & second


@pytest.mark.slow
def test_a_glob_that_matches_nothing_is_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"thrid.*matches no") as caught:
        planned(keep="thrid")
    assert isinstance(caught.value.inner_exception, SolverError)


@pytest.mark.parametrize("backend", ["inductor", "remat"])
def test_a_second_backward_is_refused_as_torch_does(backend: str) -> None:
    model, x = Classifier(), torch.randn(64, 16)
    options = {"budget": "100%", "warm": False} if backend == "remat" else NEW_CODE
    compiled = torch.compile(model, backend=backend, options=options)
    compiled(x).backward()
    with pytest.raises(RuntimeError, match=r"torch\._functorch\.config\.donated_buffer=False"):
        compiled(x).backward(retain_graph=True)
    torch._dynamo.reset()
    with functorch_config.patch(donated_buffer=False, enable_autograd_cache=False):
        compiled = torch.compile(model, backend=backend, options=options)
        compiled(x).backward()
        assert not any(map(torch.any, twice(model, compiled(x))))


def test_donated_buffers_switched_off_too_late_are_refused() -> None:
    model, x = Classifier(), torch.randn(64, 16)
    compiled = torch.compile(model, backend="remat", options={"budget": "100%", "warm": False})
    compiled(x).backward()
    with functorch_config.patch(donated_buffer=False):
        with pytest.raises(RewriteError, match=r"^set torch\._functorch\.config\.donated_buffer"):
            compiled(x)
        torch._dynamo.reset()
        assert not any(map(torch.any, twice(model, compiled(x))))
