"""Functions of autograd whose kernels no trace enters: planned as ops, to eager's bits.

NumPy stands for a kernel of Triton's, of ctypes or of an extension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import remat
from remat.graph_capture.costs.cache import CostCache
from remat.graph_capture.costs.op_costs import examples
from remat.graph_capture.devices.placement import meter_of
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import CUSTOM, Op
from remat.graph_capture.tracing.trace import trace
from tests.rewriter.other_peoples_code.small_models import WIDTH, Base, batch

RUNS = {"counted": 0}


def kernel(function: Callable[..., Any], *given: Any) -> Tensor:
    """What NumPy makes of tensors, which no fake one gives it."""
    return torch.from_numpy(np.asarray(function(*(x.detach().numpy() for x in given))))


class Gate(Function):
    """Saves its result, and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 2.0) -> Tensor:
        ctx.scale = scale
        y = kernel(lambda a: np.tanh(a * np.float32(scale)), x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return kernel(lambda a, b: a * (1 - b * b) * np.float32(ctx.scale), g, y), None


class Norm(Function):
    """Saves a view of its input, and writes what it returns over the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        inverse = kernel(lambda a: 1 / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6), rows)
        ctx.save_for_backward(rows, weight, inverse)
        return kernel(lambda a, r, w: a * r * w, rows, inverse, weight).view(x.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, inverse = ctx.saved_tensors
        given = g.contiguous().view(-1, WIDTH)
        scaled = kernel(lambda a, w: a * w, given, weight)
        dot = kernel(lambda a, b: (a * b).mean(-1, keepdims=True), scaled, x)
        of_weight = kernel(lambda a, b, r: (a * b * r).sum(0), given, x, inverse)
        found = inverse.numpy() * scaled.numpy() - inverse.numpy() ** 3 * x.numpy() * dot.numpy()
        given.numpy()[...] = found
        return given.view(g.shape), of_weight


class CrossEntropy(Function):
    """Puts the gradient over its logits in forward, as Liger's does; two results, one constant."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, None]:
        z, t = logits.detach().numpy(), target.numpy()
        p = np.exp(z - z.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        rows = np.arange(len(t))
        loss = torch.from_numpy(np.asarray(-np.log(p[rows, t]).mean(), dtype=np.float32))
        right = torch.from_numpy(np.asarray(z.argmax(-1) == t, dtype=np.float32))
        p[rows, t] -= 1
        z[...] = p / len(t)
        ctx.save_for_backward(logits.detach())
        ctx.mark_non_differentiable(right)
        return loss, right, None

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        z.numpy()[...] *= g.numpy()
        return z, None


class Dirty(Function):
    """In place, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.detach().numpy()[...] *= np.float32(3)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return kernel(lambda a: a * np.float32(3), g)


class InTwo(Function):
    """With `setup_context`, tensors in a list, a result that nothing reads, and no made zeros."""

    @staticmethod
    def forward(x: Tensor, factors: list[Tensor], power: int = 2) -> tuple[Tensor, Tensor]:
        y = kernel(lambda a, b: a * b**power, x, factors[0])
        return y, kernel(lambda a, b: a + b, x, factors[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factors, ctx.power = inputs[1], inputs[2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> tuple[Tensor | None, None, None]:
        assert h is None
        assert g is not None
        return kernel(lambda a, b: a * b**ctx.power, g, ctx.factors[0]), None, None


class Counted(Gate):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 2.0) -> Tensor:
        RUNS["counted"] += 1
        return Gate.forward(ctx, x, scale)


class Drawn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape)
        ctx.save_for_backward(noise)
        return kernel(lambda a, b: a * b, x, noise)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return kernel(lambda a, b: a * b, g, *ctx.saved_tensors)


norm, in_two = Norm.apply, InTwo.apply  # bound before anything is planned
SCALE = torch.linspace(0.5, 1.5, WIDTH)
FORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a number": lambda m, x: x + Gate.apply(m(x), 1.5),
    "a default": lambda m, x: x + Gate.apply(m(x)),
    "over the gradient": lambda m, x: x + m(norm(m(x), m.bias)),
    "in place": lambda m, x: x + Dirty.apply(m(x) * 1.0),
    "in two": lambda m, x: x + InTwo.apply(m(x), [SCALE, SCALE])[0],
    "in two, bound before": lambda m, x: x + in_two(m(x), [SCALE, SCALE])[0],
    "counted": lambda m, x: x + Counted.apply(m(x)),
    "drawn": lambda m, x: torch.dropout(x + Drawn.apply(m(x)), 0.1, True),
    "under autocast": lambda m, x: x + Gate.apply(m(x), 0.5),
}


class Layers(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(FORMS[self.form](layer, x))
        return x.square().mean()


def opaque_ops(step: Any) -> list[Op]:
    return [op for op in step.ops if "remat_function" in op.target]


def bits(model: nn.Module, step: Callable[[], Any]) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    step().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + [torch.rand(1)]


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_in_a_function_is_planned_to_eagers_bits(form: str) -> None:
    model, x = Layers(form), torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted = bits(model, lambda: model(x))
    fast: Any = remat.rematerialize(model, (x,), budget="min", time_limit_s=2)
    found = bits(model, lambda: fast(x))
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
    ops = opaque_ops(remat.plans(fast)[-1].step)
    assert len(ops) == 8
    twice = {op.name for op in ops if op.phase == "forward" and not op.no_recompute}
    assert bool(twice) == (form not in ("counted", "drawn"))


def test_what_shows_no_reason_against_it_is_recomputed() -> None:
    model, x = Layers("a number"), torch.randn(512, WIDTH)
    step = remat.capture(model, (x,), device=None)
    names = {op.name for op in opaque_ops(step)}
    again = remat.solve(step, "min").schedule.computations()
    assert any(again[name] > 1 for name in names)


def test_a_function_that_counts_is_run_once_and_its_count_is_eagers() -> None:
    model, x = Layers("counted"), batch()
    RUNS["counted"] = 0
    fast: Any = remat.rematerialize(model, (x,), budget="100%", time_limit_s=2)
    assert RUNS["counted"] == 0
    fast(x).backward()
    assert RUNS["counted"] == 4
    ops = opaque_ops(remat.plans(fast)[-1].step)
    assert {op.no_recompute for op in ops} >= {
        f"{CUSTOM}: it changes {__name__}.RUNS. It runs again only if recompute names its module"
    }


def test_a_loss_that_writes_over_its_logits() -> None:
    class Head(Base):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            loss, right, nothing = CrossEntropy.apply(self.linear(x), target)
            assert nothing is None
            return loss, right

    model, x = Head(), batch()
    target = torch.randint(WIDTH, (len(x),), generator=torch.Generator().manual_seed(2))
    wanted = bits(model, lambda: model(x, target)[0])
    fast: Any = remat.rematerialize(model, (x, target), budget="100%", time_limit_s=2)
    assert all(map(torch.equal, bits(model, lambda: fast(x, target)[0]), wanted))
    assert torch.equal(fast(x, target)[1], model(x, target)[1])
    assert not fast(x, target)[1].requires_grad


def test_later_readers_of_what_a_kernel_has_written_read_that() -> None:
    class Reader(Base):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.linear(x)
            return CrossEntropy.apply(logits, target)[0], logits.detach() * 1.0

    model, x = Reader(), batch()
    target = torch.zeros(len(x), dtype=torch.int64)
    wanted = model(x, target)[1]
    fast: Any = remat.rematerialize(model, (x, target), budget="100%", time_limit_s=2)
    assert torch.equal(fast(x, target)[1], wanted)


class Changing(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.noise = object()
        return kernel(np.tanh, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class GivenCode(Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        return kernel(np.tanh, module(x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g


class Broken(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return kernel(lambda a: a[:, 99], x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def test_a_range_of_sizes_is_refused_with_the_way_out() -> None:
    sizes = {"x": {0: ("rows", 16, 64)}}
    with pytest.raises(CaptureError, match=r"leave dynamic out: Gate"):
        remat.capture(Layers("a number"), (torch.randn(64, WIDTH),), dynamic=sizes)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda m, x: Changing.apply(m(x)),
            "save_for_backward: Changing.* keeps .* for the same data",
        ),
        (
            lambda m, x: GivenCode.apply(m, x),
            r"pass tensors alone to GivenCode: .* code \(Linear\)",
        ),
        (
            lambda m, x: Broken.apply(m(x)),
            r"custom_op.* Broken.* nor run on made data \(IndexError",
        ),
    ],
)
def test_what_no_op_can_carry_is_refused(call: Any, said: str) -> None:
    class Odd(Base):
        def forward(self, x: Tensor) -> Tensor:
            return call(self.linear, x).sum() + self.linear(x).sum()

    with pytest.raises(CaptureError, match=said):
        remat.capture(Odd(), (batch(),))


# Ops that users have made of their kernels themselves.


@torch.library.custom_op("tried::plain", mutates_args=())
def plain(x: Tensor) -> Tensor:
    return x.tanh()


@torch.library.custom_op("tried::counting", mutates_args=())
def counting(x: Tensor) -> Tensor:
    RUNS["counted"] += 1
    return x.tanh()


@torch.library.custom_op("tried::drawing", mutates_args=())
def drawing(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape)


@torch.library.custom_op("tried::writing", mutates_args=())
def writing(x: Tensor) -> Tensor:
    y = x.tanh()
    x.zero_()
    return y


OPS: dict[str, tuple[Any, str]] = {
    "plain": (plain, ""),
    "counting": (counting, f"it changes {__name__}.RUNS"),
    "drawing": (drawing, "it draws random numbers"),
    "writing": (writing, "it writes to its arguments"),
}
for op, _ in OPS.values():
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, g: g * 2.0)


@pytest.mark.parametrize("name", OPS)
def test_ops_of_users_are_tried_before_they_may_run_twice(name: str) -> None:
    class WithOp(Base):
        def forward(self, x: Tensor) -> Tensor:
            return OPS[name][0](self.linear(x)).sum()

    RUNS["counted"] = 0
    model, x = WithOp(), batch()
    before = torch.get_rng_state()
    step = remat.capture(model, (x,))
    assert RUNS["counted"] == 0
    assert torch.equal(torch.get_rng_state(), before)
    (found,) = [op for op in step.ops if "tried" in op.target]
    assert OPS[name][1] in found.no_recompute
    assert bool(found.no_recompute) == bool(OPS[name][1])


def test_an_op_that_counts_has_eagers_count_after_three_steps() -> None:
    class Counting(Base):
        def forward(self, x: Tensor) -> Tensor:
            return counting(torch.relu(counting(self.linear(x)))).sum()

    RUNS["counted"] = 0
    model, x = Counting(), batch()
    fast: Any = remat.rematerialize(model, (x,), budget="100%", time_limit_s=2)
    for _ in range(3):
        fast(x).backward()
    assert RUNS["counted"] == 6


def test_a_plan_says_what_must_not_run_twice_and_why() -> None:
    class Counting(nn.Module):  # in the root module, whose name is empty
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(Counted.apply(x @ self.weight)).sum()

    plan = remat.solve(remat.capture(Counting(), (batch(),)), "100%", solver="store_all")
    assert f"it changes {__name__}.RUNS." in " ".join(str(plan.explain()).split())


def test_costs_of_code_that_users_edit_are_not_kept() -> None:
    model, x = Layers("a number"), torch.randn(64, WIDTH)
    keys = [key for key in examples(trace(model, (x,)).joint) if "remat_function" in key]
    remat.capture(model, (x,))
    kept = CostCache.of(meter_of("cpu")).costs
    assert keys
    assert kept.keys().isdisjoint(keys)


def test_a_refusal_leaves_the_users_tracer_where_it_was() -> None:
    class Odd(Base):
        def forward(self, x: Tensor) -> Tensor:
            return Broken.apply(self.linear(x)).sum()

    def tracer(*_: Any) -> None: ...

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with pytest.raises(CaptureError, match="Broken"):
            remat.capture(Odd(), (batch(),))
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
