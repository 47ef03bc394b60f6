"""Steps from CUDA graphs: eager's bits, one pool, and an error where a replay would be wrong."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import ArenaError, StateChangedError
from remat.rewriter.arena.captured import GraphCounts, StepGraphs, capture_steps
from remat.rewriter.user_module.module import RematModule
from tests.fake_graphs import FakeGraphs, graphs
from tests.models import make
from tests.steps import rewritten

__all__ = ["graphs"]


class _Step(NamedTuple):
    loss: Tensor
    gradients: list[Tensor | None]
    offset: int  # of the device's random stream


class _Training:
    """Steps of a model on batches that differ; `zero` says when gradients are dropped."""

    def __init__(self, runtime: FakeGraphs, name: str, module: nn.Module) -> None:
        self.runtime, self.module = runtime, module
        _, self.args, _, self.loss_fn, self.target = make(name)
        self.optimizer = torch.optim.SGD(module.parameters(), 0.1)
        self.generator = runtime.default.clone_state()
        self.n_steps = 0

    def loss(self) -> Tensor:
        by = 0.01 * self.n_steps
        args = [
            one + by if one.is_floating_point() else one.roll(self.n_steps) for one in self.args
        ]
        self.n_steps += 1
        if self.loss_fn is None:
            found = self.module(*args)
        elif isinstance(self.module, RematModule):
            found = self.module(*args, target=self.target)
        else:
            found = self.loss_fn(self.module(*args), self.target)
        return found.square().mean() if found.dim() else found

    def step(self, zero: str = "before") -> _Step:
        before = self.runtime.default.graphsafe_get_state()
        self.runtime.default.graphsafe_set_state(self.generator)
        with self.runtime:
            if zero in ("before", "to zeros"):
                self.optimizer.zero_grad(set_to_none=zero == "before")
            loss = self.loss()
            if zero == "between":
                self.optimizer.zero_grad()
            loss.backward()
        self.runtime.default.graphsafe_set_state(before)
        given = [p.grad if p.grad is None else p.grad.clone() for p in self.module.parameters()]
        self.optimizer.step()
        return _Step(loss.detach(), given, self.generator.of.offset)

    def state(self) -> list[Tensor]:
        return [one.clone() for one in self.module.state_dict().values()]


def pair(
    runtime: FakeGraphs, name: str, kind: str = "chen_sqrt"
) -> tuple[_Training, _Training, Any]:
    """Eager's training and that of a captured plan, which begin alike; and the graphs."""
    model, module, _ = rewritten(name, kind)
    eager = _Training(runtime, name, copy.deepcopy(model))
    return eager, _Training(runtime, name, module), capture_steps(module)


def require_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            require_same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("plain", "to zeros"), ("dropout", "between"), ("batch_norm_in_place_relu", "never"),
        ("loss_function_with_target", "before"), ("logits_without_loss", "before"),
        ("tied_weights", "between"),
    ],
)  # fmt: skip
def test_eagers_bits_in_every_step(graphs: FakeGraphs, name: str, zero: str) -> None:
    eager, planned, own = pair(graphs, name)
    expected = [eager.step(zero) for _ in range(4)]
    # Losses are compared at the end: later steps have not written over them.
    require_same([planned.step(zero) for _ in range(4)], expected)
    require_same(planned.state(), eager.state())
    assert own.counts == GraphCounts(without=1, captured=1, replayed=3)


def test_gradients_that_were_given_out_are_added_to(graphs: FakeGraphs) -> None:
    eager, planned, _ = pair(graphs, "plain")
    for zero in ("before", "before", "before", "never", "never", "before"):
        require_same(planned.step(zero), eager.step(zero))


def test_a_step_runs_first_then_both_passes_are_captured_in_one_pool(graphs: FakeGraphs) -> None:
    _, planned, _ = pair(graphs, "plain")
    planned.step()
    assert not graphs.graphs
    planned.step()
    assert len(graphs.pools) == 1
    into, out_of = "own waits for main", "main waits for own"
    assert graphs.log == ["capture", into, out_of, "capture", into, out_of]
    planned.step()
    assert graphs.log[6:] == [into, out_of] * 2
    assert [one.n_replays for one in graphs.graphs] == [2, 2]


def test_what_is_drawn_again_follows_the_stream_wherever_it_is_put(graphs: FakeGraphs) -> None:
    eager, planned, _ = pair(graphs, "dropout")
    for one in (eager, planned):
        for _ in range(2):
            one.step()
        one.generator.of.seed, one.generator.of.offset = 11, 400
    require_same(planned.step(), eager.step())
    drawn_again = [len(one.states) - 1 for one in graphs.graphs]
    assert drawn_again[1] > 0, "nothing was drawn again"


def test_parameters_elsewhere_are_captured_again(graphs: FakeGraphs) -> None:
    eager, planned, own = pair(graphs, "plain")
    for i in range(5):
        if i == 3:
            for p in planned.module.parameters():
                p.data = p.data.clone()
        require_same(planned.step(), eager.step())
    assert own.counts == GraphCounts(without=2, captured=2, replayed=3)


def test_addresses_that_keep_changing_are_told_once(graphs: FakeGraphs) -> None:
    _, planned, _ = pair(graphs, "plain")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            for p in planned.module.parameters():
                p.data = p.data.clone()
            planned.step()
            planned.step()
    texts = [str(one.message) for one in told if "captured for the 4th time" in str(one.message)]
    assert len(texts) == 1
    assert texts[0].startswith("leave out cuda_graphs=True, or keep parameters and buffers where")


def captured(runtime: FakeGraphs, name: str = "plain", kind: str = "chen_sqrt") -> _Training:
    _, planned, _ = pair(runtime, name, kind)
    for _ in range(2):
        planned.step()
    return planned


def test_one_backward_for_each_forward(graphs: FakeGraphs) -> None:
    planned = captured(graphs)
    with graphs:
        first, second = planned.loss(), planned.loss()
        with pytest.raises(
            ArenaError, match="call backward once for each forward, before the next"
        ):
            first.backward()
        second.backward(retain_graph=True)
        with pytest.raises(ArenaError, match="have written over what its forward saved"):
            second.backward()


def test_a_parameter_replaced_before_backward_is_an_error(graphs: FakeGraphs) -> None:
    planned = captured(graphs, kind="store_all")
    with graphs:
        loss = planned.loss()
        for p in planned.module.parameters():
            p.data = p.data.clone()
        with pytest.raises(
            StateChangedError, match="replace parameters and buffers after backward"
        ):
            loss.backward()


def test_a_parameter_written_before_backward_is_torchs_error(graphs: FakeGraphs) -> None:
    planned = captured(graphs, kind="store_all")
    with graphs:
        loss = planned.loss()
        with torch.no_grad():
            for p in planned.module.parameters():
                p.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_backward_that_begins_with_other_strides_is_an_error(graphs: FakeGraphs) -> None:
    planned = captured(graphs, "logits_without_loss")
    with graphs, pytest.raises(ArenaError, match="give loss_fn, so that the loss is part of the"):
        planned.module(*planned.args).sum().backward()


def test_gradients_that_others_hold_are_an_error(graphs: FakeGraphs) -> None:
    planned = captured(graphs)
    planned.step()
    kept = [p.grad for p in planned.module.parameters()]
    with graphs:
        planned.loss()  # .grad holds them still, so they are moved
        planned.optimizer.zero_grad()
        assert all(one is not None for one in kept)
    planned.step()
    kept = [p.grad.view(-1) for p in planned.module.parameters() if p.grad is not None]
    planned.optimizer.zero_grad()
    with graphs, pytest.raises(ArenaError, match="clone the gradients that you keep into the next"):
        planned.loss()
    del kept
    planned.step()


def test_closed_graphs_leave_steps_as_before(graphs: FakeGraphs) -> None:
    eager, planned, own = pair(graphs, "plain")
    for i in range(4):
        require_same(planned.step(), eager.step())
        if i == 2:
            own.close()
    assert own.counts.replayed == 2


def test_a_copy_of_the_module_has_its_own_addresses(graphs: FakeGraphs) -> None:
    planned = captured(graphs)
    other = _Training(graphs, "plain", copy.deepcopy(planned.module))
    other.n_steps = planned.n_steps
    require_same(other.step(), planned.step())


def test_within_a_capture_of_the_users_ops_go_there(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, planned, own = pair(graphs, "plain")
    for one in (eager, planned):
        for _ in range(2):
            one.step()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    require_same(planned.step(), eager.step())
    assert own.counts.replayed == 1


def test_rematerialize_takes_the_option(graphs: FakeGraphs) -> None:
    model, args, *_ = make("dropout")
    eager = _Training(graphs, "dropout", copy.deepcopy(model))
    fast = remat.rematerialize(
        model, args, budget="80%", cuda_graphs=True, accumulate=True, check=False, verbose=False
    )
    planned = _Training(graphs, "dropout", fast)
    for _ in range(3):
        require_same(planned.step("never"), eager.step("never"))
    source = fast._remat_compiled_step.memory.source  # pyright: ignore
    assert isinstance(source, StepGraphs)
    assert source.counts.replayed == 2
