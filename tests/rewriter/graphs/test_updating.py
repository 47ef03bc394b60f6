"""Updates during backward in a schedule that computes again what reads a parameter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from remat.graph_capture import trace
from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import UPDATE
from remat.graph_capture.joint.gradients import GradientRelease
from remat.graph_capture.tracing.traced_step import Trace
from remat.rewriter.graphs.updating import Updates
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.solver.problem import Problem
from remat.solver.reductions.updates import late_sequence
from remat.solver.state import schedule_of
from tests.behaviours.behaviours import Fails
from tests.models import make


def traced(model: nn.Module, args: Any) -> Trace:
    updates = tuple(name for name, _ in model.named_parameters())
    return trace(model, args, gradient_release=GradientRelease(is_added=False, updates=updates))


def updating(model: nn.Module, one: Trace, schedule: Schedule) -> tuple[RematModule, Optimizer]:
    own = SGD(model.parameters(), lr=0.1, momentum=0.9)
    updates = Updates(own, "Scalar", accumulates=False)
    return rewrite(model, schedule, trace=one, updates=updates), own


def recomputing_late(problem: Problem) -> list[int]:
    """All that forward makes is made once more at the end, in so far as it is not kept."""
    graph = problem.graph
    made_again = [
        i for i, op in enumerate(graph.ops) if op.phase == "forward" and not op.no_recompute
    ]
    return [*range(len(graph.ops)), *made_again]


def test_a_parameter_that_is_read_late_is_updated_later() -> None:
    model, args, *_ = make("plain")
    eager, one = copy.deepcopy(model), traced(model, args)
    problem = Problem.of(one.graph)
    sequence = recomputing_late(problem)
    with pytest.raises(ScheduleError, match=r"which op update_\w+ has updated"):
        simulate(one.graph, schedule_of(problem, sequence))
    late = late_sequence(problem, sequence)
    updates = {i for i, op in enumerate(one.graph.ops) if op.target == UPDATE}
    assert min(late.index(i) for i in updates) > late.index(max(set(sequence) - updates))
    module, own = updating(model, one, schedule_of(problem, late))
    simulate(one.graph, module.schedule)
    others = SGD(eager.parameters(), lr=0.1, momentum=0.9)
    for trained, optimizer in ((eager, others), (module, own)):
        for _ in range(3):
            trained(*args).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, eager.parameters(), model.parameters()))


def test_updates_run_in_backward_in_the_order_of_the_schedule() -> None:
    model, args, *_ = make("plain")
    one = traced(model, args)
    order = range(len(one.graph.ops))
    module, own = updating(model, one, schedule_of(Problem.of(one.graph), order))
    loss = module(*args)
    before = [p.detach().clone() for p in model.parameters()]
    changed: list[list[bool]] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: changed.append(
                [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
            )
        )
    loss.backward()
    # All parameters of an op are updated once the last of their gradients is there.
    sizes = [len(places) for places in one.joint.accumulations.values()]
    expected = [sum(sizes[:i]) for i, n in enumerate(sizes) for _ in range(n)]
    assert [sum(one) for one in changed] == expected
    assert len(own.state) == len(before)


def test_the_optimizer_steps_once_for_each_update_op(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, *_ = make("plain")
    one = traced(model, args)
    n_updates = sum(op.target == UPDATE for op in one.graph.ops)
    assert 1 < n_updates < len(list(model.parameters()))
    module, own = updating(
        model, one, schedule_of(Problem.of(one.graph), range(len(one.graph.ops)))
    )
    stepped: list[int] = []
    usual = type(own).step

    def counted(self: Any) -> Any:
        stepped.append(sum(len(group["params"]) for group in self.param_groups))
        return usual(self)

    monkeypatch.setattr(type(own), "step", counted)
    module(*args).backward()
    assert (len(stepped), sum(stepped)) == (n_updates, len(list(model.parameters())))
    first = next(iter(model.parameters()))
    stepped.clear()
    module(*args).backward(inputs=[first])  # fills no set: it is updated when backward ends
    assert stepped == [1]
    assert first.grad is None


def test_a_step_that_failed_leaves_no_hooks_that_update() -> None:
    model, args, *_ = make("plain")
    one = traced(model, args)
    schedule = schedule_of(Problem.of(one.graph), range(len(one.graph.ops)))
    module, _ = updating(model, one, schedule)
    with pytest.raises(MemoryError), Fails(MemoryError, 16):
        module(*args).backward()
    model.zero_grad()
    module(*args).backward()
    assert all(p.grad is None for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    model(*args).backward()
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is not None for p in model.parameters())
