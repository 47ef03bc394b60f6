"""What planned steps of a script do, seen from outside: how many run, and what they have live.

A planned step is one whose backward ran a plan's graph. Runs that planning itself makes, to time
and to check, are not counted.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor, nn

from remat.blocks import rematerialized
from remat.caches import per_shape_plans
from remat.graph_capture.devices.memory_events import RegionMemory, measure_regions
from remat.graph_capture.tracing.resident import storage_bytes
from remat.rewriter.compiled import StepAllocator
from remat.step_spec import StepSpec

MUST_RUN = "REMAT_REQUIRE_TRAINERS"
"""A variable that is set where a recipe whose library is missing is to fail, as in `.ci/run`."""


def require_libraries(*needed: str) -> None:
    """Skip a script whose libraries are not installed; fail where it has to run."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        says = f"without {' and '.join(missing)}: pip install 'remat[trainers]'"
        assert not os.environ.get(MUST_RUN), says
        pytest.skip(says)
    if needed:
        from tests.zoo.case import name_ops_of_torchvision

        name_ops_of_torchvision()


@dataclass(frozen=True)
class Step:
    """One planned step as it ran in the script: its measured peak, and the budget of its plan.

    Attributes
    ----------
    peak_bytes : what the plan accounts for, and no more: parameters, buffers, the batch and the
        gradients that are there before the step; what forward's graph and backward's graph
        allocate while they run, as the profiler sees it; and the gradients of the results. What the
        script allocates outside of the planned module is not the plan's.
    budget_bytes : None where the plan is for blocks, which share one budget.
    """

    peak_bytes: int
    budget_bytes: int | None


@dataclass
class _Forward:
    """A forward whose backward has not run.

    Attributes
    ----------
    resident_bytes : that were there before it, without gradients. peak_bytes : while it ran.
    kept_bytes : of its results and of what it keeps for backward. seen : all these storages.
    """

    resident_bytes: int
    peak_bytes: int
    kept_bytes: int
    seen: set[int]


@dataclass
class Watched:
    """What a script has done so far.

    Attributes
    ----------
    planned : its planned steps. backwards : how often it called `Tensor.backward`.
    """

    planned: list[Step] = field(default_factory=list[Step])
    backwards: int = 0
    _is_planning: bool = False
    _plans: dict[StepAllocator, tuple[nn.Module, int]] = field(
        default_factory=dict[StepAllocator, "tuple[nn.Module, int]"]
    )
    _forwards: dict[StepAllocator, _Forward] = field(default_factory=dict[StepAllocator, _Forward])

    def planning(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`make`, which plans; what runs meanwhile does not count."""

        @functools.wraps(make)
        def planned(spec: StepSpec, *known: Any) -> Any:
            self._is_planning = True
            try:
                made = make(spec, *known)
            finally:
                self._is_planning = False
            step = getattr(type(made), "_remat_compiled_step", None)
            if step is not None:
                self._plans[step.memory] = spec.model, type(made)._remat_schedule.budget_bytes
            return made

        return planned

    def counting(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """`Tensor.backward`, counted."""

        @functools.wraps(backward)
        def counted(*args: Any, **options: Any) -> Any:
            self.backwards += 1
            return backward(*args, **options)

        return counted

    def around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`StepAllocator.around`, whose graphs are measured."""

        def around(memory: StepAllocator, phase: str, graph: Any) -> Any:
            run: Any = real(memory, phase, graph)
            watch = self._forward if phase == "forward" else self._backward

            def watched(args: list[Any]) -> Any:
                return run(args) if self._is_planning else watch(memory, run, args)

            watched._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
            return watched

        return around

    def _forward(self, memory: StepAllocator, run: Any, args: list[Any]) -> Any:
        seen: set[int] = set()
        model = self._model(memory)
        resident_bytes = storage_bytes([*args, *model.buffers()], seen)
        gradients_bytes = _gradients_bytes(model)
        results, used = _measured(run, args)
        storage_bytes(results, seen)
        peak_bytes = resident_bytes + gradients_bytes + used.peak_bytes
        self._forwards[memory] = _Forward(resident_bytes, peak_bytes, used.final_bytes, seen)
        return results

    def _backward(self, memory: StepAllocator, run: Any, args: list[Any]) -> Any:
        forward = self._forwards[memory]
        # What forward kept is counted: of these, the gradients of the results are left.
        arriving_bytes = storage_bytes(args, forward.seen)
        # Lightning drops those of the step before between forward and backward.
        gradients_bytes = _gradients_bytes(self._model(memory))
        results, used = _measured(run, args)
        before_bytes = forward.resident_bytes + gradients_bytes + forward.kept_bytes
        peak_bytes = max(forward.peak_bytes, before_bytes + arriving_bytes + used.peak_bytes)
        _, budget_bytes = self._plans.get(memory, (None, None))
        self.planned.append(Step(peak_bytes, budget_bytes))
        return results

    def _model(self, memory: StepAllocator) -> nn.Module:
        return self._plans[memory][0] if memory in self._plans else nn.Module()


def _gradients_bytes(model: nn.Module) -> int:
    return storage_bytes(parameter.grad for parameter in model.parameters())


def _measured(run: Any, args: list[Any]) -> tuple[Any, RegionMemory]:
    kept: list[Any] = []
    (used,) = measure_regions([lambda: kept.append(run(args))])
    return kept[0], used


@contextmanager
def watched() -> Iterator[Watched]:
    """Watch the planned steps of what runs meanwhile, on the CPU."""
    watch = Watched()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepAllocator, "around", watch.around(StepAllocator.around))
        patch.setattr(Tensor, "backward", watch.counting(Tensor.backward))
        for room, name in (
            (per_shape_plans, "plan_one_size"), (per_shape_plans, "cached_plan"),
            (rematerialized, "blocks_planned"),
        ):  # fmt: skip
            patch.setattr(room, name, watch.planning(getattr(room, name)))
        yield watch
