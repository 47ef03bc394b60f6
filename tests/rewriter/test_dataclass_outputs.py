"""Results that are dataclasses, as models return them, without a word to torch about them."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError
from remat.ranks.same_order import agreed_load
from remat.rewriter.plans.loading import plan_of, save_plan


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor | None = None
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: Tensor
    name: str = "a name"


@dataclasses.dataclass(slots=True)
class Slots:
    loss: Tensor
    count: int = 3


@dataclasses.dataclass
class Strict:
    """What it is made of is checked, and something is set that is no field."""

    loss: Tensor
    made: list[int] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.made.append(1)
        self.half = self.loss / 2


@dataclasses.dataclass
class Child(Output):
    aux: tuple[Tensor, ...] = ()

    @property
    def total(self) -> Tensor:
        return self.loss + sum(one.mean() for one in self.aux)


KINDS: dict[str, Any] = {
    "plain": lambda h: Output(h.square().mean(), h),
    "one part": lambda h: Output(h),
    "two parts": lambda h: Output(h.square().mean(), more=h),
    "frozen": lambda h: Frozen(h.square().mean()),
    "slots": lambda h: Slots(h.square().mean()),
    "checked": lambda h: Strict(h.square().mean()),
    "inherited": lambda h: Child(h.square().mean(), None, {"n": 2}, (h, 2 * h)),
    "inside of each other": lambda h: Output(h.sum(), h, Output(h.mean(), more=[Frozen(h.exp())])),
    "in a tuple": lambda h: (h.mean(), {"out": Output(h.square().mean())}),
    "one tensor twice": lambda h: Output(h.mean(), h, [h, h[:2]]),
}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        layers = [nn.Linear(16, 16), nn.Dropout(0.1), nn.GELU(), nn.BatchNorm1d(16)]
        self.layers = nn.Sequential(*(copy.deepcopy(layer) for _ in range(3) for layer in layers))

    def forward(self, x: Tensor) -> Any:
        return KINDS[self.kind](self.layers(x))


def parts(value: Any) -> Any:
    """What a result holds, in containers that can be compared."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: parts(getattr(value, f.name)) for f in dataclasses.fields(value)}
        others = {k: parts(v) for k, v in getattr(value, "__dict__", {}).items()}
        return [type(value).__name__, {**fields, **others}]
    if isinstance(value, dict):
        return {key: parts(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *map(parts, value)]
    return value


def roots(value: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(parts(value))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@pytest.mark.parametrize("budget", ["100%", "min"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_eagers_and_so_are_gradients(kind: str, budget: str) -> None:
    model = Model(kind)
    eager, x = copy.deepcopy(model), torch.randn(8, 16)
    fast = remat.rematerialize(model, (x,), budget=budget)
    found: list[Any] = []
    for module in (eager, fast):
        torch.manual_seed(1)
        result = module(x)
        sum(root.sum() for root in roots(result)).backward()
        found.append(result)
    expected, leaves = (pytree.tree_flatten(parts(one)) for one in found)
    assert str(expected[1]) == str(leaves[1])
    assert all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(expected[0], leaves[0], strict=True)
    )
    for mine, eagers in zip(fast.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, eagers.grad)
    assert remat.check(model, fast, (x,), steps=1).differences == ()


def test_its_methods_and_properties_are_there() -> None:
    x = torch.randn(8, 16)
    fast = remat.rematerialize(Model("inherited"), (x,), budget="min")
    result = fast(x)
    assert isinstance(result, Child)
    result.total.backward()
    assert fast.layers[0].weight.grad is not None
    assert dataclasses.replace(result, more=None).more is None
    assert Child not in pytree.SUPPORTED_NODES


def test_one_tensor_that_comes_twice_is_one() -> None:
    x = torch.randn(8, 16)
    fast = remat.rematerialize(Model("one tensor twice"), (x,), budget="min")
    result = fast(x)
    assert result.logits is result.more[0]


def test_a_loss_reads_it_and_a_kept_plan_gives_it(tmp_path: Path) -> None:
    def loss_fn(output: Output, target: Tensor) -> Tensor:
        return output.loss + (output.more - target).square().mean()

    model, (x, target) = Model("two parts"), torch.randn(2, 8, 16)
    fast = remat.rematerialize(model, (x,), loss_fn=loss_fn, target=target, budget="min")
    fast(x, target=target).backward()
    alone = remat.rematerialize(model, (x,), budget="min")
    save_plan(plan_of(alone), tmp_path / "plan.json")
    loaded = agreed_load(tmp_path / "plan.json", model, (x,))
    assert isinstance(loaded(x), Output)


def test_caches_ranges_and_blocks_give_it() -> None:
    x = torch.randn(8, 16)
    cache = remat.rematerialize(Model("plain"), budget="100%")
    assert all(isinstance(cache(torch.randn(n, 16)), Output) for n in (8, 5))
    ranged = remat.rematerialize(
        Model("plain"), budget="100%", dynamic={"x": {0: ("rows", 4, 64)}}, check=False
    )
    assert all(isinstance(ranged(torch.randn(n, 16)), Output) for n in (8, 5, 64))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Model("one part") for _ in range(2))

        def forward(self, x: Tensor) -> Output:
            for block in self.blocks:
                x = block(x).loss
            return Output(x.square().mean())

    model = Outer()
    fast = remat.rematerialize(model, (x,), blocks="blocks.*", budget="min")
    result = fast(x)
    assert isinstance(result, Output)
    result.loss.backward()


def test_what_it_holds_and_no_graph_can_is_named() -> None:
    class Holding(nn.Linear):
        def forward(self, input: Tensor) -> Output:
            return Output(super().forward(input).mean(), more=object())

    with pytest.raises(CaptureError, match=r"the result\.more of Holding is a object, whose"):
        remat.capture(Holding(4, 4), (torch.randn(2, 4),))
