"""Warm starts: what an earlier process has planned is neither planned nor timed again.

A second start in the same process, with all that dynamo and the backend know forgotten, reads what
a second process would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

from remat import solver
from remat.compile import start
from remat.compile.graph_context import CompiledPlan, compiled_plans
from remat.graph_capture.devices.memory_events import measure_peak
from remat.rewriter.inductor import lowering
from remat.rewriter.inductor.kernel_costs import CallCosts
from tests.paths import ROOT
from tests.remat.compile.one_start import FEW, Classifier, Net, twice


class Broken(Net):
    """A graph break between two halves."""

    def forward(self, x: Tensor) -> Tensor:
        half = self.layers[:3](x)
        torch._dynamo.graph_break()
        return self.layers[3:](half).square().mean()


Step = Callable[[Tensor], Tensor]


class Counted:
    """How often ops were timed, steps solved, and code generated to be replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._count(monkeypatch, solver, "solve_within")
        self._count(monkeypatch, CallCosts, "_measured")
        self._count(monkeypatch, lowering, "lower")
        self._count(monkeypatch, start.PlanSearch, "stock")

    def _count(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def started(
    make: Callable[[], nn.Module] = Net, size: int = 4096, **options: Any
) -> tuple[list[CompiledPlan], list[Tensor], Step, Tensor]:
    """A start from nothing: its plans, its gradients, the compiled step and its batch."""
    torch._dynamo.reset()
    counters.clear()
    model, before = make(), len(compiled_plans())
    step = torch.compile(model, backend="remat", options={**FEW, "budget": "70%", **options})
    torch.manual_seed(1)
    x = torch.randn(size, 32)
    step(x).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return list(compiled_plans()[before:]), gradients, step, x


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def figures(plans: list[CompiledPlan]) -> list[tuple[Any, ...]]:
    """All of plans but how they were found."""
    return [
        (p.budget_bytes, p.peak_bytes, p.baseline_peak_bytes, p.held_bytes, p.saved_bytes,
         p.overhead, p.recomputed, p.schedule)
        for p in plans
    ]  # fmt: skip


def test_a_second_start_plans_and_times_nothing(kept_plans: Path, counted: Counted) -> None:
    cold, expected, _, _ = started()
    assert cold[0].recomputed > 0
    assert cold[0].replays > 0
    assert {"solve_within", "_measured", "stock"} <= set(counted.calls)
    counted.calls.clear()
    warm, gradients, step, x = started()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert not counted.calls
    assert figures(warm) == figures(cold)
    assert warm[0].replays == 0
    assert same(gradients, expected)
    assert "0 replays" in repr(warm[0])

    def again() -> None:
        step(x).backward()

    resident = [*step.parameters(), x]  # pyright: ignore
    resident_bytes = sum(t.untyped_storage().nbytes() for t in resident)
    gradient_bytes = sum(g.nbytes for g in gradients)
    assert resident_bytes + measure_peak(again) <= warm[0].budget_bytes + gradient_bytes


@pytest.mark.slow
def test_a_kept_plan_serves_where_torch_has_lost_its_code(
    kept_plans: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold, expected, _, _ = started()
    counted.calls.clear()
    monkeypatch.setattr(AOTAutogradCache, "_lookup", lambda *_: None)
    warm, gradients, _, _ = started()
    assert counters["aot_autograd"]["autograd_cache_miss"] == 1
    assert not counted.calls
    assert figures(warm) == figures(cold)
    assert same(gradients, expected)


@pytest.mark.slow
def test_another_budget_is_planned_anew(kept_plans: Path) -> None:
    started()
    plans, _, _, _ = started(budget="80%")
    assert plans[0].replays > 0
    assert len(list(kept_plans.iterdir())) == 2


@pytest.mark.slow
def test_a_plan_of_another_graph_under_the_same_key_is_not_taken(
    kept_plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "start_key", lambda *_: "ab" * 32)
    first, _, _, _ = started()
    second, expected, _, _ = started(size=2048, budget=first[0].budget_bytes)
    third, gradients, _, _ = started(size=2048, budget=first[0].budget_bytes)
    assert second[0].replays > 0
    assert second[0].peak_bytes < first[0].peak_bytes
    assert third[0].replays == 0
    assert figures(third) == figures(second)
    assert same(gradients, expected)


@pytest.mark.slow
def test_damage_is_noticed_and_planned_anew(kept_plans: Path) -> None:
    cold, expected, _, _ = started()
    (path,) = kept_plans.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="which is made anew: it is damaged"):
        anew, gradients, _, _ = started()
    assert anew[0].replays > 0
    assert figures(anew) == figures(cold)
    assert same(gradients, expected)
    assert started()[0][0].replays == 0


@pytest.mark.slow
def test_nothing_is_kept_where_the_user_says_so(kept_plans: Path) -> None:
    started(warm=False)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        started()
    assert not kept_plans.exists()
    with pytest.raises(Exception, match="warm must be True or False"):
        started(warm="no")


@pytest.mark.slow
def test_a_graph_without_gradients_starts_warm(kept_plans: Path) -> None:
    found: list[Tensor] = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        step = torch.compile(Net().eval(), backend="remat", options={**FEW, "budget": "70%"})
        with torch.no_grad():
            found.append(step(torch.ones(64, 32)))
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert torch.equal(*found)


@pytest.mark.slow
def test_graphs_that_share_a_budget_start_warm_together(kept_plans: Path, counted: Counted) -> None:
    cold, expected, _, _ = started(Broken, budget="4MiB")
    assert len(cold) == 2
    counted.calls.clear()
    warm, gradients, _, _ = started(Broken, budget="4MiB")
    assert not counted.calls
    assert figures(warm) == figures(cold)
    assert same(gradients, expected)


@pytest.mark.slow
def test_each_shape_starts_warm_and_keeps_to_its_guards(kept_plans: Path) -> None:
    found: list[tuple[list[tuple[Any, ...]], list[Tensor]]] = []
    for _ in range(2):
        plans, gradients, step, x = started()
        for size in (2048, 4096, 2048):
            torch.manual_seed(2)
            step(x[:size]).backward()
            gradients += [p.grad.clone() for p in step.parameters()]  # pyright: ignore
        plans = list(compiled_plans()[-2:])
        found.append((figures(plans), gradients))
    assert [plan.replays for plan in plans] == [0, 0]  # pyright: ignore
    assert found[0][0] == found[1][0]
    assert found[0][0][0] != found[0][0][1]
    assert same(found[1][1], found[0][1])


@pytest.mark.slow
def test_the_least_peak_is_kept_too(kept_plans: Path, counted: Counted) -> None:
    cold, expected, _, _ = started(budget="min")
    counted.calls.clear()
    warm, gradients, _, _ = started(budget="min")
    assert not counted.calls
    assert figures(warm) == figures(cold)
    assert same(gradients, expected)


@pytest.mark.slow
def test_auto_takes_a_plan_that_is_as_good_now(
    kept_plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = started(warm=False)[0][0]
    room_bytes = cut.peak_bytes - cut.held_bytes
    place = sys.modules["remat.compile.graph_context"]
    replays: list[bool] = []
    # In a little more, nothing is sought; in much more, less need run again; in less, more must.
    for factor in (1.0, 1.005, 1.4, 1.0):
        free_bytes = int(factor * room_bytes)
        monkeypatch.setattr(place, "auto_bytes", lambda _, found=free_bytes: found)
        plans, _, _, _ = started(budget="auto")
        replays.append(plans[0].replays > 0)
        assert plans[0].peak_bytes <= plans[0].budget_bytes
    assert replays == [True, False, True, True]


@pytest.mark.slow
def test_processes_start_warm_after_each_other_and_beside_each_other(tmp_path: Path) -> None:
    def process() -> subprocess.Popen[str]:
        # With folders of their own both compile at the same pace, and time the same ops at once.
        kept = {"REMAT_CACHE": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code")}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.remat.compile.one_start"], cwd=ROOT,
            env={**os.environ, **kept, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def said(one: subprocess.Popen[str]) -> Any:
        text, _ = one.communicate()
        assert one.returncode == 0
        return json.loads(text.splitlines()[-1])

    cold = [said(one) for one in [process(), process()]]
    warm = [said(one) for one in [process(), process()]]
    assert [one[0] for one in warm] == [0, 0]
    assert all(one[0] > 0 for one in cold)
    assert all(one[1:] == warm[0][1:] for one in warm)


def test_code_for_a_second_backward_is_kept_for_no_other_start(
    kept_plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AOTAutogradCache, "_lookup", lambda *_: None)  # Inductor has it alone

    def compiled() -> tuple[nn.Module, Step, Tensor]:
        torch._dynamo.reset()
        model, x = Classifier(), torch.randn(64, 16)
        return model, torch.compile(model, backend="remat", options={"budget": "100%"}), x

    for is_twice in (True, False, True):
        model, step, x = compiled()
        loss = step(x)
        if is_twice:
            assert not any(map(torch.any, twice(model, loss)))
            continue
        loss.backward()
        del loss
        model.zero_grad()
        held_bytes = x.nbytes + sum(p.nbytes for p in model.parameters())
        peak_bytes = held_bytes + measure_peak(lambda step=step, x=x: step(x).backward())
        assert peak_bytes == pytest.approx(compiled_plans()[-1].peak_bytes, rel=0.005)
