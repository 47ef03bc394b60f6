"""Models that are no one graph: planned in parts, to eager's bits, within the budget."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import (
    BudgetError,
    CaptureError,
    PlanError,
    RewriteError,
    SignatureError,
    StateChangedError,
)
from remat.solver.stopping import DEFAULT_GAP
from tests.remat.parts.models import (
    LOSSES,
    ROWS,
    SCALE,
    WIDTH,
    Around,
    Balanced,
    Branching,
    Drawing,
    Gathering,
    Telling,
    Tower,
    WithSlot,
    rows,
)


def trained(model: nn.Module, module: nn.Module, steps: int = 3) -> list[Tensor]:
    """What steps of training leave: losses, parameters, buffers and the random streams."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(3)
    random.seed(3)
    losses: list[Tensor] = []
    for step in range(steps):
        loss = module(rows(step))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    drawn = torch.tensor(random.random(), dtype=torch.float64)
    return [*losses, *model.parameters(), *model.buffers(), torch.get_rng_state(), drawn]


def planned(model: nn.Module, budget: Any = "75%", **options: Any) -> Any:
    """The model in parts."""
    return remat.rematerialize(model, (rows(),), budget=budget, **options)


def require_same(model: nn.Module, budget: Any = "75%") -> Any:
    """The module that trains as `model` does, to the bit."""
    twin = copy.deepcopy(model)
    module = planned(model, budget)
    for one, other in zip(trained(twin, twin), trained(model, module), strict=True):
        assert torch.equal(one, other)
    return module


@pytest.mark.parametrize("budget", ["75%", "min"])
def test_blocks_that_look_at_values(budget: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Tower()
    with caplog.at_level(logging.INFO, "remat"):
        module = require_same(model, budget)
    assert module.modules_again
    said = next(one for one in caplog.messages if one.startswith("remat: Tower in parts"))
    assert f"{len(module.modules_again)} of " in said
    assert "the rest runs as it is" in said
    assert "equal to eager" in said
    found = remat.check(model, module, (rows(),), steps=1)
    assert found.equal
    assert found.plan_peak_bytes < 0.9 * found.baseline_peak_bytes
    if budget != "min":
        assert found.plan_peak_bytes <= 0.75 * found.baseline_peak_bytes


def test_experts_that_gather_their_rows() -> None:
    model = Tower(*(Gathering() for _ in range(3)))
    module = require_same(model)
    assert module.planned_share > 0.8


def test_modules_within_modules_that_run_again_do_so_too() -> None:
    model = Tower(Group(), Group())
    module = require_same(model, "min")
    again = module.modules_again
    assert any(inner.startswith(f"{outer}.") for outer in again for inner in again)


class Group(nn.Sequential):
    """Blocks in a block."""

    def __init__(self) -> None:
        super().__init__(*(Branching() for _ in range(6)))


@pytest.mark.parametrize("kind", [Around, Drawing])
def test_what_does_more_than_compute_runs_once(kind: Callable[[], nn.Module]) -> None:
    module = require_same(Tower(*(kind() for _ in range(3))), "min")
    assert module.modules_again
    assert all("block" in path.split(".")[2:] for path in module.modules_again)


def test_a_count_is_that_of_eager() -> None:
    model = Tower(*(Around() for _ in range(3)))
    module = planned(model, "min")
    trained(model, module)
    assert [block.calls for block in model.blocks] == [3, 3, 3]


def test_a_list_outside_of_the_model_is_that_of_eager() -> None:
    model = Tower(*(Balanced() for _ in range(3)))
    LOSSES.clear()
    module = planned(model, "min")
    assert not LOSSES
    assert module.modules_again
    trained(model, module)
    assert len(LOSSES) == 9


def test_what_is_set_again_before_backward_is_read_once() -> None:
    module = require_same(Telling(), "min")
    assert module.modules_again
    assert all("block" in path.split(".")[2:] for path in module.modules_again)


def test_backward_runs_modules_in_the_mode_of_forward() -> None:
    model = Tower()
    twin = copy.deepcopy(model)
    for one, module in ((twin, twin), (model, planned(model))):
        torch.manual_seed(0)
        loss = module(rows())
        one.eval()
        loss.backward()
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # pyright: ignore


def frozen_statistics(model: Tower) -> None:
    model.blocks[0].statistics.eval()


def another_block(model: Tower) -> None:
    model.blocks[0] = Branching()


@pytest.mark.parametrize("change", [frozen_statistics, another_block])
def test_other_modules_are_refused_or_planned_anew(change: Callable[[Tower], None]) -> None:
    model = Tower()
    module, cache = planned(model), remat.rematerialize(model, budget="80%")
    cache(rows()).backward()
    change(model)
    with pytest.raises(StateChangedError, match="plan it again: modules of Tower came"):
        module(rows())
    cache(rows()).backward()
    assert len(remat.plans(cache)) == 2


def test_what_is_given_an_object_runs_once() -> None:
    module = require_same(WithSlot(), "min")
    assert module.modules_again
    assert all("block" in path.split(".")[2:] for path in module.modules_again)


def test_a_hook_inside_keeps_a_module_from_running_twice() -> None:
    model = Tower()
    seen: list[int] = []
    model.blocks[1].body.register_forward_hook(lambda *_: seen.append(1))
    module = planned(model, "min")
    assert module.modules_again
    assert not any(path in ("blocks.1",) for path in module.modules_again)
    seen.clear()
    trained(model, module)
    assert len(seen) == 3


def test_buffers_that_are_read_and_written() -> None:
    class Decaying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Branching()
            self.register_buffer("rate", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            scaled = self.block(x * self.rate.clone())
            self.rate.mul_(0.9)
            return scaled

    module = require_same(Tower(*(Decaying() for _ in range(4))), "min")
    assert any(path.count(".") == 1 for path in module.modules_again)


class Late(nn.Module):
    """A block that does more than compute where it is given large values."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.calls, self.kept = Branching(), 0, dict[str, float]()
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            self.effect(x)
        return self.block(torch.tanh(x).exp().sin())

    def effect(self, x: Tensor) -> None:
        raise NotImplementedError


class Writes(Late):
    def effect(self, x: Tensor) -> None:
        self.most.copy_(x.max().detach())


class Counts(Late):
    def effect(self, x: Tensor) -> None:
        self.calls += 1


class Keeps(Late):
    def effect(self, x: Tensor) -> None:
        self.kept["most"] = x.max().item()


class Appends(Late):
    def effect(self, x: Tensor) -> None:
        LOSSES.append(x.max().detach())


class Draws(Late):
    def effect(self, x: Tensor) -> None:
        random.random()


@pytest.mark.parametrize(
    ("kind", "effect"),
    [
        (Writes, "write to most"), (Counts, "set calls"), (Keeps, "set an item of kept"),
        (Appends, "set an item of .*LOSSES.*"), (Draws, "draw from random"),
    ],
)  # fmt: skip
def test_what_a_later_step_does_beside_its_work_is_refused(kind: type[Late], effect: str) -> None:
    model = Tower(*(kind() for _ in range(3)))
    module = planned(model, "min")
    assert any(path.count(".") == 1 for path in module.modules_again)
    module(rows()).backward()
    with pytest.raises(RewriteError, match=f"^{effect} outside of {kind.__name__}, or plan again"):
        module(rows() * 1000)


def test_what_a_later_step_sets_before_backward_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Scaled(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.block(torch.tanh(x * SCALE["now"]).exp().sin())

    module = planned(Tower(*(Scaled() for _ in range(3))), "min")
    assert any(path.count(".") == 1 for path in module.modules_again)
    for scale in (0.5, 1.0):
        monkeypatch.setitem(SCALE, "now", scale)  # between steps
        loss = module(rows())
        loss.backward()
    loss = module(rows())
    monkeypatch.setitem(SCALE, "now", 2.0)
    with pytest.raises(RewriteError, match=r"^set .*SCALE.* after backward, or plan again"):
        loss.backward()


CONTEXT: dict[str, Tensor] = {}


def test_no_tensor_of_a_step_is_kept_for_the_next() -> None:
    class Gated(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.block(torch.tanh(x * CONTEXT["gate"]).exp().sin())

    class Gating(Tower):
        def forward(self, x: Tensor) -> Tensor:
            CONTEXT["gate"] = self.blocks[0].block.norm.weight.sigmoid()
            return super().forward(x)

    module = planned(Gating(*(Gated() for _ in range(3))), "min")
    assert any(path.count(".") == 1 for path in module.modules_again)
    for seed in range(2):
        module(rows(seed)).backward()
    gc.collect()  # what is left of the trace
    held = [one for one in gc.get_objects() if type(one) is Tensor and one.grad_fn is not None]
    assert [one is CONTEXT["gate"] for one in held if one.shape == (WIDTH,)] == [True]


COUNTED: list[int] = []


@torch.library.custom_op("parts::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    """A copy, counted."""
    COUNTED.append(1)
    return x.clone()


counted.register_fake(torch.empty_like)
counted.register_autograd(lambda _, gradient: gradient)


def test_an_op_of_the_users_own_runs_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Branching()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(counted(x))

    model = Tower(*(Counting() for _ in range(3)))
    module = planned(model, "min")
    assert module.modules_again
    assert all("block" in path.split(".")[2:] for path in module.modules_again)
    COUNTED.clear()
    trained(model, module)
    assert len(COUNTED) == 9


def test_backward_comes_twice() -> None:
    model = Tower()
    module = planned(model)
    torch.manual_seed(0)
    loss = module(rows())
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    second = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(2 * one, two) for one, two in zip(first, second, strict=True))


def test_a_parameter_that_is_changed_before_backward_is_named() -> None:
    model = Tower()
    module = planned(model)
    loss = module(rows())
    with torch.no_grad():  # one that nothing reads again but a run in backward
        again = model.get_submodule(module.modules_again[-1])
        next(p for p in reversed([*again.parameters()]) if p.ndim == 1).mul_(2)
    with pytest.raises(RewriteError, match=r"change .* after backward"):
        loss.backward()


def test_another_shape_is_refused_or_planned_anew() -> None:
    model = Tower()
    with pytest.raises(SignatureError, match="make another plan for this shape"):
        planned(model)(rows(count=ROWS // 2))
    cache: Any = remat.rematerialize(model, budget="80%")
    for count in (ROWS, ROWS // 2, ROWS):
        cache(rows(count=count)).backward()
    assert len(type(cache)._remat_plans) == 2


def test_other_parameters_are_trained() -> None:
    model = Tower()
    cache: Any = remat.rematerialize(model, budget="80%")
    cache(rows()).backward()
    model.blocks[0].requires_grad_(False)
    cache(rows()).backward()
    assert len(type(cache)._remat_plans) == 2


def test_copies_and_pickles_follow_the_plan() -> None:
    model = Tower()
    module = planned(model)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.modules_again == module.modules_again
        assert other.original_module is not model
        twin = copy.deepcopy(model)
        own: Any = other.original_module
        for one, two in zip(trained(twin, twin), trained(own, other), strict=True):
            assert torch.equal(one, two)


def test_its_plan_can_be_inspected_and_is_in_no_file(tmp_path: Path) -> None:
    module = planned(Tower())
    (plan,) = remat.plans(module)
    assert plan.peak_bytes == plan.check.plan_peak_bytes
    assert plan.overhead > 0
    assert 0 <= plan.gap <= DEFAULT_GAP
    again = {name for name, count in plan.schedule.computations().items() if count > 1}
    assert {f"{path} 0" for path in module.modules_again} <= again
    with pytest.raises(PlanError, match="in each process"):
        plan.save(tmp_path / "plan.json")


def test_the_least_that_fits_is_named() -> None:
    with pytest.raises(BudgetError, match=r"(?s)try budget=.*runs once, or again as a whole"):
        planned(Tower(), "20%")


def test_a_model_without_modules_to_plan() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(x @ self.weight)
            return (x if x.sum() > 0 else -x).square().mean()

    with pytest.raises(
        BudgetError, match=r"(?s)^try .*No module of Alone can run again"
    ) as refused:
        planned(Alone(), "50%")
    assert "one static graph cannot hold both branches" in str(refused.value)
    assert "with remat.rematerialize" not in str(refused.value)  # which gave this answer
    module = require_same(Alone(), "100%")
    assert module.modules_again == ()


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"keep": "blocks.0"}, "Leave out keep= to plan it in parts."),
        ({"blocks": "blocks.*"}, "Or plan it in parts, with remat.rematerialize, or"),
    ],
)
def test_what_only_a_graph_can_do_is_refused(options: dict[str, Any], way: str) -> None:
    with pytest.raises(CaptureError, match="one static graph cannot hold both branches") as refused:
        planned(Tower(), **options)
    assert way in "\n".join([str(refused.value), *refused.value.__notes__])
    assert planned(Tower()).modules_again  # as it says


def test_a_graph_is_still_one_graph() -> None:
    with pytest.raises(CaptureError, match="one static graph cannot hold both branches"):
        remat.capture(Tower(), (rows(),))


def test_evaluation_runs_the_models_own_forward() -> None:
    model = Tower()
    module = planned(model)
    model.eval()
    assert torch.equal(module(rows()), model(rows()))


def test_gradients_that_are_sparse() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 64, sparse=True)
            self.tower = Tower()

        def forward(self, x: Tensor) -> Tensor:
            return self.tower(x + self.table(torch.arange(len(x)) % 50))

    model = Looked()
    twin = copy.deepcopy(model)
    module = planned(model)
    torch.manual_seed(0)
    twin(rows()).backward()
    torch.manual_seed(0)
    module(rows()).backward()
    one, other = twin.table.weight.grad, model.table.weight.grad
    assert one is not None
    assert other is not None
    assert other.is_sparse
    assert torch.equal(one.to_dense(), other.to_dense())


def test_a_loss_and_its_target() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Branching() for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x)

    model, target = Net(), rows(9)
    loss_fn = nn.functional.mse_loss
    module = planned(model, loss_fn=loss_fn, target=target)
    torch.manual_seed(0)
    ours = module(rows(), target=target)
    torch.manual_seed(0)
    assert torch.equal(ours, loss_fn(model(rows()), target))
