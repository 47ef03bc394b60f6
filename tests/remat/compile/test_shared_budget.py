"""What each of several graphs may take, in numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from remat.compile.shared_budget import SharedBudget, WholeModel, forget_graphs, shared_budget
from remat.graph_capture.errors import BudgetError
from remat.rewriter.inductor.replay import ReplayedMemory


def step_of(static: int, gradient: int = 0) -> Any:
    return SimpleNamespace(
        static_bytes=static,
        dynamic_bytes=10,
        gradient_bytes=gradient,
        modules=1,
        alone=lambda found: found,
    )


def noted(
    shared: SharedBudget, frame: tuple[int, int], static: int, saved: int, peak: int,
    budget: int = 1000, gradient: int = 0, output: int = 0, is_bound: bool = True,
) -> None:  # fmt: skip
    replay = ReplayedMemory(peak, peak, saved, output)
    shared.note(frame, step_of(static, gradient), replay, replay, budget, is_bound=is_bound)


class CompiledFunction(torch.autograd.Function):
    """Stands for a compiled graph, whose autograd node is known by this name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return gradient


def ran(shared: SharedBudget, frame: tuple[int, int]) -> Tensor:
    """The result of a forward of `frame`, whose backward is still to come."""
    output = CompiledFunction.apply(torch.ones(2, requires_grad=True))
    assert isinstance(output, Tensor)
    shared.forwards.watch(frame, [output.view(2)])
    return output


def test_a_later_graph_has_what_the_open_forwards_leave() -> None:
    shared = SharedBudget()
    assert shared.held_bytes((0, 0), 100, 10) == 110
    noted(shared, (0, 0), static=100, saved=50, peak=70)
    assert shared.held_bytes((1, 0), 200, 10) == 210, "no forward is open"
    first = ran(shared, (0, 0))
    assert shared.held_bytes((1, 0), 200, 10) == 210 + 160
    assert shared.base_bytes((1, 0), step_of(200), ReplayedMemory(20, 20, 0), 370) == 390
    assert shared.base_bytes((1, 0), step_of(200), ReplayedMemory(5, 5, 0), 370) == 380, (
        "of graph 0"
    )
    second = ran(shared, (0, 0))
    assert shared.held_bytes((1, 0), 200, 10) == 210 + 160 + 60, "its parameters count once"
    first.sum().backward()
    assert shared.held_bytes((1, 0), 200, 10) == 210 + 160
    del second
    assert shared.held_bytes((1, 0), 200, 10) == 210, "nothing can reach it any more"


def test_compilations_of_a_frame_share_their_parameters() -> None:
    shared = SharedBudget()
    noted(shared, (0, 0), static=100, saved=50, peak=70)
    first = ran(shared, (0, 0))
    noted(shared, (0, 1), static=100, saved=20, peak=70)
    second = ran(shared, (0, 1))
    assert shared.held_bytes((1, 0), 0, 0) == 100 + 60 + 30
    assert shared.held_bytes((0, 2), 100, 10) == 100 + 60 + 30 + 10
    del first, second


def test_parameters_of_later_graphs_are_there_while_earlier_ones_run() -> None:
    shared = SharedBudget()
    noted(shared, (0, 0), static=100, saved=50, peak=70, budget=180)
    first = ran(shared, (0, 0))
    noted(shared, (1, 0), static=200, saved=0, peak=1, budget=380)
    with pytest.raises(BudgetError, match="breaks into 2 graphs, and graph 0 needs"):
        noted(shared, (1, 0), static=200, saved=0, peak=1, budget=379)
    del first


def test_gradients_of_later_graphs_are_there_in_backward_of_earlier_ones() -> None:
    shared = SharedBudget()
    noted(shared, (0, 0), static=100, saved=50, peak=70, gradient=100)
    first = ran(shared, (0, 0))
    noted(shared, (1, 0), static=200, saved=0, peak=1, gradient=200, budget=580)
    text = r"(?s)\"580B\".*graph 0 needs .* with the parameters and gradients"
    with pytest.raises(BudgetError, match=text):
        noted(shared, (1, 0), static=200, saved=0, peak=1, gradient=200, budget=579)
    noted(shared, (1, 0), static=200, saved=0, peak=1, gradient=200, budget=1, is_bound=False)
    assert shared.noted[1, 0].budget_bytes == 580, "the least is no bound that can be missed"
    base_bytes = shared.base_bytes((1, 0), step_of(200, 200), ReplayedMemory(1, 1, 0, 4), 370)
    assert base_bytes == 584, "that of graph 0, beside the loss"
    del first


def test_what_a_split_model_holds_is_counted_before_its_later_graphs_are_known() -> None:
    shared = SharedBudget()
    split, end = WholeModel(300, 290, is_split=True), WholeModel(300, 290, is_split=False)
    assert shared.expect(end, (0, 0), 100) == 0, "nothing follows"
    assert shared.held_bytes((0, 0), 100, 10) == 110
    assert shared.expect(split, (0, 0), 100) == 190
    assert shared.held_bytes((0, 0), 100, 10) == 310
    noted(shared, (0, 0), static=100, saved=50, peak=70, gradient=100)
    first = ran(shared, (0, 0))
    assert shared.expect(split, (1, 0), 20) == 170
    part = WholeModel(30, 20, is_split=False)
    assert shared.expect(part, (1, 0), 20) == 170, "a module inside, after which others follow"
    assert shared.expect(end, (2, 0), 20) == 0
    assert shared.held_bytes((2, 0), 150, 10) == 150 + 50 + 10 + (50 + 10 + 100)
    del first


def test_a_forward_beside_more_open_ones_than_planned_is_refused() -> None:
    shared = SharedBudget()
    noted(shared, (0, 0), static=100, saved=50, peak=70, budget=239)
    shared.require_room((0, 0))
    first = ran(shared, (0, 0))
    with pytest.raises(
        BudgetError, match=r"(?s)\{\"calls\": 2, \.\.\.\}\..*1 forwards .*1 of them its own"
    ):
        shared.require_room((0, 0))
    noted(shared, (0, 0), static=100, saved=50, peak=70, budget=240)
    shared.require_room((0, 0))
    del first


def test_another_shape_may_take_what_a_larger_one_was_given() -> None:
    shared = SharedBudget()
    assert shared.given_to_other_shapes_bytes((0, 0)) == 0
    noted(shared, (0, 0), static=100, saved=50, peak=70, budget=400)
    noted(shared, (1, 0), static=100, saved=50, peak=70, budget=900)
    assert shared.given_to_other_shapes_bytes((0, 0)) == 0, "its own is no other"
    assert shared.given_to_other_shapes_bytes((0, 1)) == 400, "not what other code was given"


def test_graphs_are_told_apart_by_their_options_until_dynamo_is_reset() -> None:
    options, others = {"budget": 1}, {"budget": 1}
    shared = shared_budget(options)
    assert shared_budget(options) is shared
    assert shared_budget(others) is not shared
    forget_graphs()
    assert shared_budget(options) is not shared


def test_dynamo_resets_the_backend() -> None:
    from remat.compile.backend import backend

    assert getattr(backend, "reset", None) is forget_graphs
