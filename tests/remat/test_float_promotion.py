"""A float of Python's that changes at every step: one plan that reads it, or one for each value."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.graph_capture.errors import FloatInputError, StateChangedError
from tests.rows import rows

WIDTH = 16
STEPS = 4
Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A linear layer before what is tried, and one behind it."""

    def __init__(self, forward: Forward, value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.number, self.do = value, forward

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.do(self, self.first(x))).square().mean()


def steps_beside_eager(
    model: nn.Module,
    change: Callable[[nn.Module, int], None],
    make: Callable[[nn.Module], Any] = lambda m: remat.rematerialize(m, budget="100%", check=False),
) -> Any:
    """Steps of a planned model and of eager to the same bits; `change` sets the number before."""
    eager = copy.deepcopy(model)
    fast = make(model)
    for step in range(STEPS):
        x, found = torch.randn(8, WIDTH), list[list[Tensor]]()
        for own, call in ((model, fast), (eager, eager)):
            change(own, step)
            own.zero_grad()
            torch.manual_seed(step)
            loss = call(x)
            loss.backward()
            grads = [p.grad for p in own.parameters() if p.grad is not None]
            found.append([loss.detach(), *grads, *own.buffers(), torch.get_rng_state()])
        assert all(map(torch.equal, *found)), step
    return fast


def set_number(model: nn.Module, step: int) -> None:
    model.number = 0.3 + 0.15 * step


def attention(m: Net, x: Tensor) -> Tensor:
    q = x.view(1, 2, 4, WIDTH)
    return functional.scaled_dot_product_attention(q, q, q, dropout_p=m.number / 2).view(8, WIDTH)


READ: dict[str, Forward] = {
    "divides": lambda m, x: x / m.number,
    "is divided": lambda m, x: m.number / (x.square() + 1),
    "computed before": lambda m, x: x * (1 / (1 + 2 * m.number) ** 2),
    "by math": lambda m, x: x * math.exp(-m.number) + math.sqrt(m.number),
    "the larger one": lambda m, x: x * max(m.number, 0.1),
    "a branch": lambda m, x: x / m.number if m.number > 0.01 else x,
    "drops": lambda m, x: functional.dropout(x, m.number),
    "drops channels": lambda m, x: functional.dropout1d(x, m.number),
    "drops in attention": attention,
    "a slope": lambda m, x: functional.leaky_relu(x, m.number),
    "a power": lambda m, x: x.square() ** m.number,
    "a factor of a sum": lambda m, x: torch.add(x, x.tanh(), alpha=m.number),
    "between two": lambda m, x: torch.lerp(x, x.tanh(), m.number),
    "a bound": lambda m, x: x.clamp(min=-m.number) + torch.where(x > m.number, x, 0.0),
    "a full tensor": lambda m, x: x + torch.full_like(x, m.number),
    "sharpness": lambda m, x: functional.gumbel_softmax(x, tau=m.number),
    "smoothing": lambda m, x: (
        functional.cross_entropy(x, x.argmax(1), label_smoothing=m.number) + x
    ),
    "a margin": lambda m, x: functional.smooth_l1_loss(x, x.tanh(), beta=m.number) + x,
    "momentum": lambda m, x: functional.batch_norm(
        x, m.norm.running_mean, m.norm.running_var, training=True, momentum=m.number
    ),
    "epsilon": lambda m, x: functional.layer_norm(x, (WIDTH,), eps=m.number),
}


SLOW = (
    "is divided", "by math", "drops channels", "a slope", "between two", "a margin", "sharpness",
    "a full tensor", "divides", "a power", "a bound", "the larger one", "epsilon",
)  # fmt: skip
"""Ways for which another one stands in a quick run."""
WAYS = rows(READ, lambda name: name not in SLOW)


@pytest.mark.parametrize("name", WAYS)
def test_one_plan_serves_for_all_values_of_a_number(name: str) -> None:
    fast = steps_beside_eager(Net(READ[name], 0.3), set_number)
    # The first one was made before the number was known to change.
    assert len(remat.plans(fast)) == 2


def set_of_result(m: Net, x: Tensor) -> Tensor:
    m.seen = m.number * 2
    return x * m.number


PLANNED_EACH: dict[str, Forward] = {
    "a whole number": lambda m, x: x.topk(round(m.number * 10)).values.sum() + x,
    "a text": lambda m, x: x * {"0.3": 2.0}.get(f"{m.number:.1f}", 3.0),
    "by numpy": lambda m, x: x * float(np.sin(m.number)),
    "a tensor": lambda m, x: x * torch.tensor(m.number),
    "an attribute that forward sets": set_of_result,
    "a border of a tensor": lambda m, x: x if torch.full((), m.number) < 0.4 else x.tanh(),
    "a border": lambda m, x: x if m.number < 0.4 else x.tanh(),
}


@pytest.mark.parametrize(
    "name", rows(PLANNED_EACH, lambda name: name in ("a text", "a tensor", "a border"))
)
def test_where_a_number_cannot_be_followed_each_value_has_a_plan(name: str) -> None:
    fast = steps_beside_eager(Net(PLANNED_EACH[name], 0.3), set_number)
    assert len(remat.plans(fast)) >= 2


@dataclasses.dataclass
class Config:
    temperature: float = 0.3


number = 0.3


def in_global(value: float) -> None:
    globals()["number"] = value


class Holder:
    number = 0.3


def test_a_number_is_read_wherever_it_lives() -> None:
    config, cell = Config(), 0.3

    def in_cell(value: float) -> None:
        nonlocal cell
        cell = value

    places: list[tuple[Forward, Callable[[float], None]]] = [
        (lambda m, x: x / config.temperature, lambda v: setattr(config, "temperature", v)),
        (lambda m, x: x / number, in_global),
        (lambda m, x: x / cell, in_cell),
        (lambda m, x: x / Holder.number, lambda v: setattr(Holder, "number", v)),
    ]
    for forward, put in places:
        put(0.3)
        fast = steps_beside_eager(Net(forward, 0.0), lambda m, step, put=put: put(0.3 + 0.1 * step))
        assert len(remat.plans(fast)) == 2


def test_a_drop_rate_that_ends_at_zero_has_a_plan_for_zero() -> None:
    def change(model: nn.Module, step: int) -> None:
        model.number = [0.3, 0.2, 0.1, 0.0][step]

    fast = steps_beside_eager(Net(lambda m, x: functional.dropout(x, m.number), 0.3), change)
    assert len(remat.plans(fast)) == 3


def test_backward_has_the_numbers_of_its_own_forward() -> None:
    model = Net(lambda m, x: functional.dropout(x, m.number) / m.number, 0.25)
    eager = copy.deepcopy(model)
    fast = remat.rematerialize(
        model, (torch.randn(8, WIDTH),), budget="100%", float_inputs=["number"]
    )
    for own, call in ((model, fast), (eager, eager)):
        losses = list[Tensor]()
        for value in (0.25, 0.5):
            own.number = value
            torch.manual_seed(1)
            losses.append(call(torch.full((8, WIDTH), 0.5)))
        own.number = 0.75
        for loss in losses:
            loss.backward()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    assert all(torch.equal(p.grad, e.grad) for p, e in pairs if p.grad is not None)


def test_a_named_number_is_refused_beyond_what_the_trace_holds_for() -> None:
    model, x = Net(lambda m, x: x / m.number if m.number > 0.1 else x, 1.0), torch.randn(8, WIDTH)
    fast = remat.rematerialize(model, (x,), budget="100%", float_inputs="number")
    for value in (0.5, 2.0, 1.0):
        model.number = value
        assert torch.equal(fast(x), model(x))
    for value, text in ((0.05, "gt of it is False"), (0.0, "gt of it"), (1, "is 1"), ("a", "'a'")):
        model.number = value  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(StateChangedError, match=text):
            fast(x)


def test_a_copy_reads_its_own_number() -> None:
    model, x = Net(lambda m, x: x / m.number, 0.5), torch.randn(8, WIDTH)
    fast = remat.rematerialize(model, (x,), budget="100%", float_inputs=["number", "number"])
    model.number = 0.7
    other: Any = copy.deepcopy(fast)
    other.number = 0.9
    assert torch.equal(fast(x), model(x))
    model.number = 0.9
    assert torch.equal(other(x), model(x))


def test_what_cannot_be_an_input_is_refused_with_the_reason() -> None:
    x = torch.randn(8, WIDTH)
    for forward, names, text in (
        (READ["divides"], ["numbre"], "forward does not read.*: drop.p, .*number"),
        (READ["divides"], ["do"], "holds <function.* which is not a float"),
        (PLANNED_EACH["a text"], ["number"], "read by __format__"),
        (PLANNED_EACH["by numpy"], ["number"], "global np .* cannot be followed"),
        (PLANNED_EACH["a border of a tensor"], ["number"], "looks at the values of a tensor"),
        (PLANNED_EACH["a tensor"], ["number"], "a constant tensor depends on it"),
    ):
        with pytest.raises(FloatInputError, match=text):
            remat.rematerialize(Net(forward, 0.3), (x,), budget="100%", float_inputs=names)


def test_the_refusal_of_a_changed_number_says_how_to_make_it_an_input() -> None:
    model, x = Net(READ["divides"], 0.3), torch.randn(8, WIDTH)
    fast = remat.rematerialize(model, (x,), budget="100%")
    model.number = 0.4
    with pytest.raises(StateChangedError, match=r"float_inputs=\['number'\]\)") as refused:
        fast(x)
    assert refused.value.numbers == ("number",)
    fast = remat.rematerialize(model, (x,), budget="100%", float_inputs=refused.value.numbers)
    model.number = 0.5
    assert torch.equal(fast(x), model(x))
