"""Planning block by block: eager's bits, the predicted peak, the user's model untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.blocks.rematerialized import planned_blocks
from remat.graph_capture.errors import (
    BudgetError,
    CaptureError,
    PlanError,
    RewriteError,
    SolverError,
)
from remat.rewriter.user_module.module import RematModule
from tests.block_models import (
    ROWS,
    WIDTH,
    Beside,
    InPart,
    LooksAtTracing,
    Mlp,
    OwnAutocast,
    Stack,
    Twice,
    Words,
    convolutional,
    rows,
)
from tests.rows import each_nth

Case = tuple[nn.Module, str, dict[str, Any]]


def images() -> dict[str, Any]:
    target = torch.randint(10, (8,))
    args = (torch.randn(8, 3, 16, 16),)
    return {"args": args, "loss_fn": functional.cross_entropy, "target": target}


def whole_blocks() -> Case:
    """The blocks are the model but for a gradient that comes expanded from a sum."""
    chain = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*chain), "*", {"args": (rows(),), "loss_fn": lambda out: out.sum()}


CASES: dict[str, tuple[Callable[[], Case], int]] = {
    "learned scale": (lambda: (Stack(), "layers.*", {"args": (rows(),)}), 1),
    "constant scale": (
        lambda: (Stack(), "layers.*", {"args": (rows(),), "kwargs": {"learn": False}}),
        1,
    ),
    "unequal dropout": (
        lambda: (Stack((0.1, 0.2, 0.1, 0.2)), "layers.*", {"args": (rows(),)}),
        2,
    ),
    "some blocks": (lambda: (Stack(), "layers.[12]", {"args": (rows(),)}), 1),
    "batch norm": (lambda: (convolutional(), "[1-3]", images()), 1),
    "all": (whole_blocks, 2),
}
"""Each with the number of distinct blocks."""


@pytest.mark.parametrize("name", each_nth(2, CASES))
def test_bits_are_those_of_eager_and_the_peak_is_the_predicted_one(name: str) -> None:
    torch.manual_seed(0)
    make, n_distinct = CASES[name]
    model, pattern, batch = make()
    budget = "80%" if name in ("some blocks", "batch norm") else "70%"
    fast = remat.rematerialize(model, blocks=pattern, **batch, budget=budget, check=False)
    plan = planned_blocks(fast)
    assert plan.result.overhead > 0
    assert plan.distinct == n_distinct
    found = remat.check(model, fast, **batch, steps=1)
    assert found.differences == ()
    assert found.plan_peak_bytes <= plan.result.budget_bytes < found.baseline_peak_bytes
    assert found.plan_peak_bytes == pytest.approx(plan.result.peak_bytes, rel=0.001)


@pytest.mark.slow
def test_autocast_around_the_step_is_followed() -> None:
    torch.manual_seed(0)
    model, x = Stack(), rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = remat.rematerialize(model, (x,), blocks="layers.*", budget="80%", check=False)
        assert remat.check(model, fast, (x,), steps=1).differences == ()


@pytest.mark.slow
def test_the_least_budget_is_reached_and_one_below_it_is_refused() -> None:
    torch.manual_seed(0)
    model, x = Stack(), rows()
    least = planned_blocks(
        remat.rematerialize(model, (x,), blocks="layers.*", budget="min", check=False)
    )
    assert least.result.peak_bytes == least.result.budget_bytes
    with pytest.raises(
        BudgetError, match="the lowest peak that a schedule is known to reach"
    ) as caught:
        remat.rematerialize(model, (x,), blocks="layers.*", budget=least.result.peak_bytes // 2)
    assert "try budget=" in str(caught.value)


def test_nothing_of_the_users_is_changed() -> None:
    torch.manual_seed(0)
    model, x = Stack(), rows()
    before = [(name, dict(vars(module))) for name, module in model.named_modules()]
    generator = torch.get_rng_state()
    fast = remat.rematerialize(model, (x,), blocks="layers.*", budget="70%")
    assert torch.equal(torch.get_rng_state(), generator)
    for (_, attributes), module in zip(before, model.modules(), strict=True):
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())
    assert list(fast.state_dict()) == list(model.state_dict())
    assert type(fast) is Stack
    assert isinstance(fast.layers[0], RematModule)
    assert not isinstance(model.layers[0], RematModule)
    for name, parameter in model.named_parameters():
        assert fast.get_parameter(name) is parameter
    handle = fast.register_forward_hook(lambda *_: None)
    assert not model._forward_hooks
    handle.remove()


def test_eval_and_another_shape() -> None:
    torch.manual_seed(0)
    model, x = Stack((0.0,) * 3), rows()
    fast = remat.rematerialize(model, (x,), blocks="layers.*", budget="80%", check=False)
    fast.eval()
    assert torch.equal(fast(x[:32]), copy.deepcopy(model).eval()(x[:32]))
    fast.train()
    with pytest.raises(RewriteError, match=r"Mlp was planned for args\[0\] = float32\[256, 64\]"):
        fast(x[:32])


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "no match": (Stack, "blocks.*", "'blocks.*' matches no submodule of Stack; there are first,"),
    "twice": (Twice, "layers.*", r"block layers.0 \(Mlp\) is called 2 times in a step"),
    "beside": (
        Beside,
        "layers.*",
        "block layers.0 alone runs op add_. .* in backward, and the model",
    ),
    "in part": (InPart, "layers.*", "which calls parts of it from elsewhere"),
    "tracing": (LooksAtTracing, "layers.*", "is called differently in eager than when traced"),
    "autocast": (OwnAutocast, "layers.*", "under an autocast that forward enters"),
}


@pytest.mark.parametrize("name", each_nth(2, REFUSED))
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    make, pattern, text = REFUSED[name]
    with pytest.raises(CaptureError, match=text):
        remat.rematerialize(make(), (rows(),), blocks=pattern, budget="70%")


def test_frozen_and_unplanned_blocks_are_refused() -> None:
    model, x = Stack(), rows()
    model.layers[1].requires_grad_(False)
    with pytest.raises(CaptureError, match=r"block layers\.1: .*no parameter of Mlp requires grad"):
        remat.rematerialize(model, (x,), blocks="layers.*", budget="70%")
    model.layers[1].requires_grad_(True)
    fast = remat.rematerialize(model, (x,), blocks="layers.*", budget="80%", check=False)
    again = remat.rematerialize(fast, (x,), blocks="layers.*", budget="90%", check=False)
    assert planned_blocks(again).result.budget_bytes > planned_blocks(fast).result.budget_bytes
    whole = torch.nn.Sequential(fast.layers[0])
    with pytest.raises(RewriteError, match="already follows a plan"):
        remat.rematerialize(whole, (x,), blocks="0", budget="80%")
    with pytest.raises(PlanError, match="follows no plan"):
        remat.plans(Mlp())


def test_blocks_over_a_range_follow_one_plan_at_each_size() -> None:
    torch.manual_seed(0)
    model, dynamic = Stack(), {"x": {0: ("rows", 64, ROWS)}}
    fast = remat.rematerialize(
        model, (rows(),), blocks="layers.*", budget="75%", dynamic=dynamic, check=False
    )
    plan = planned_blocks(fast)
    assert plan.family is not None
    assert 1 < len(plan.family.members) == len(plan.members) <= 4
    assert plan.family.members[0].overhead < plan.result.overhead
    for member in plan.family.members:
        size = member.corners[0]["rows"]
        found = remat.check(model, fast, (rows()[:size].clone(),), steps=1)
        assert found.differences == ()
        assert found.plan_peak_bytes == pytest.approx(member.peak_bytes, rel=0.001)
        assert member.peak_bytes <= plan.result.budget_bytes
    with pytest.raises(RewriteError, match="was planned for rows from 64 to 256"):
        fast(rows()[:32])


def test_a_block_whose_size_is_none_of_the_batch_is_refused() -> None:
    class Halved(Stack):
        def forward(self, x: Tensor, *, learn: bool = True) -> Tensor:
            return super().forward(x[: x.shape[0] // 2], learn=learn)

    dynamic = {"x": {0: ("rows", 64, ROWS)}}
    with pytest.raises(CaptureError, match=r"^block layers.0: leave out blocks, .*rows // 2"):
        remat.rematerialize(Halved(), (rows(),), blocks="layers.*", budget="75%", dynamic=dynamic)


def with_words(model: nn.Module) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    batch = rows(), torch.randint(4096, (ROWS,))
    made = remat.rematerialize(
        model, batch, blocks="layers.*", budget="40%", split="exact", check=False
    )
    return made, batch


def test_a_head_runs_in_chunks_beside_blocks() -> None:
    torch.manual_seed(0)
    model = Words()
    fast, batch = with_words(model)
    plan = planned_blocks(fast)
    assert plan.head is not None
    assert (plan.head.paths, plan.head.exact) == (("head",), True)
    found = remat.check(model, fast, batch, steps=1)
    assert found.differences == ()
    assert found.plan_peak_bytes == pytest.approx(plan.result.peak_bytes, rel=0.001)
    assert found.plan_peak_bytes < 0.4 * found.baseline_peak_bytes
    fast.eval()
    assert torch.equal(fast(*batch), copy.deepcopy(model).eval()(*batch))


class Shifted(Words):
    """As language models of public libraries take their loss, with weights of classes."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits, weight = self.logits(x)[:-1].float(), torch.linspace(0.5, 1.5, 4096)
        return functional.cross_entropy(logits, target[1:], weight, None, 7)


class TwoHeads(Words):
    """Two losses of one step, as where several tokens are predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Linear(WIDTH, 4096)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        loss = functional.cross_entropy(self.head(x), target)
        return loss + 0.5 * functional.cross_entropy(self.after(x), target.roll(1))


@pytest.mark.parametrize(("make", "paths"), [(Shifted, ("head",)), (TwoHeads, ("head", "after"))])
def test_other_heads_run_in_chunks_beside_blocks(
    make: Callable[[], Words], paths: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    model = make()
    fast, batch = with_words(model)
    plan = planned_blocks(fast)
    assert plan.head is not None
    assert plan.head.paths == paths
    batch[1][::5] = 7  # which `Shifted` ignores
    fast(*batch)  # the first call compiles the head with its loss
    found = remat.check(model, fast, batch, steps=1)
    assert found.differences == ()
    assert found.plan_peak_bytes == pytest.approx(plan.result.peak_bytes, rel=0.01)


class Scaled(Words):
    is_scaled = False

    def logits(self, x: Tensor) -> Tensor:
        logits = super().logits(x)
        return logits * 1.0 if self.is_scaled else logits


def test_logits_in_chunks_are_there_for_their_loss_alone() -> None:
    fast, batch = with_words(Scaled())
    fast.is_scaled = True
    with pytest.raises(RewriteError, match=r"^leave out split='exact', or .*mul reads the logits"):
        fast(*batch)


def test_outputs_beside_blocks_are_those_that_a_head_in_chunks_leaves() -> None:
    with pytest.raises(CaptureError, match=r"^add split='exact', which makes no logits"):
        remat.rematerialize(Stack(), (rows(),), blocks="layers.*", budget="70%", outputs=(0,))


def test_updates_in_backward_beside_blocks() -> None:
    torch.manual_seed(0)
    model = Stack()
    eager, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters())
    fast = remat.rematerialize(
        model, (rows(),), blocks="layers.*", budget="70%", optimizer_in_backward=optimizer
    )
    own = torch.optim.AdamW(eager.parameters())
    for seed in range(3):
        for one in (fast, eager):
            torch.manual_seed(seed)
            one(rows()).backward()
        assert all(parameter.grad is None for parameter in fast.parameters())
        own.step()
        own.zero_grad()
    for theirs, ours in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs, ours)


def test_numbers_that_change_in_blocks() -> None:
    torch.manual_seed(0)
    model = Stack()
    eager = copy.deepcopy(model)
    names = [f"layers.{i}.p" for i in range(4)]
    fast = remat.rematerialize(
        model, (rows(),), blocks="layers.*", budget="75%", float_inputs=names
    )
    for seed in range(3):
        for layer in (*model.layers, *eager.layers):
            layer.p = 0.1 + 0.2 * seed
        losses: list[Tensor] = []
        for one in (fast, eager):
            torch.manual_seed(seed)
            losses.append(one(rows()))
            losses[-1].backward()
        assert torch.equal(*losses)
    for theirs, ours in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs.grad, ours.grad)


def ran_again(model: nn.Module, **pins: str) -> dict[str, set[str]]:
    fast = remat.rematerialize(
        model, (rows(),), blocks="layers.*", budget="75%", check=False, **pins
    )
    assert remat.check(model, fast, (rows(),), steps=1).differences == ()
    return {
        path: {op for op, n in one.computations().items() if n > 1}
        for path, one in planned_blocks(fast).schedules.items()
    }


def test_pins_inside_blocks_are_kept_to() -> None:
    torch.manual_seed(0)
    model = Stack()
    assert any("addmm" in ops for ops in ran_again(model).values())
    assert not any("addmm" in ops for ops in ran_again(model, keep="*.up").values())
    assert "addmm" in ran_again(model, recompute="layers.3.up")["layers.3"]
    with pytest.raises(SolverError, match=r"^name modules inside the blocks: recompute 'first'"):
        ran_again(model, recompute="first")
