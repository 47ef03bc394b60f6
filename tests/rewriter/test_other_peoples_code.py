"""What models of others do beside computing: state that they set, hooks, draws, and names."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.graph_capture.errors import CaptureError, RewriteError

WIDTH = 16


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)


def batch() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def planned(model: nn.Module, *args: Any, **options: Any) -> Any:
    return remat.rematerialize(model, args, budget="100%", solver="store_all", **options)


def gradients(model: nn.Module, step: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    step().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_tensor_that_forward_sets_is_set_by_each_step_and_can_be_trained_with() -> None:
    class Auxiliary(Base):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.auxiliary = y.square().mean()
            self.parts = {"mean": y.mean(), "name": "y"}
            return y.mean()

    model, x = Auxiliary(), batch()
    fast = planned(model, x)
    eager = gradients(model, lambda: model(x) + model.auxiliary)
    kept = model.auxiliary.detach().clone()
    del model.auxiliary, model.parts
    ours = gradients(model, lambda: fast(x) + fast.auxiliary)
    assert all(map(torch.equal, eager, ours))
    assert torch.equal(model.auxiliary, kept)
    assert model.parts["name"] == "y"


def test_a_mask_that_is_made_at_the_first_call_is_planned_and_kept() -> None:
    class Masked(Base):
        mask: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.ones(WIDTH, WIDTH).tril()
            return self.linear(x) @ self.mask

    model, x = Masked(), batch()
    fast = planned(model, x)
    assert model.mask is None
    ours = fast(x)
    assert isinstance(model.mask, Tensor)
    assert torch.equal(ours, model(x))


def test_what_forward_would_read_again_from_its_batch_is_refused() -> None:
    class Remembering(Base):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            before = x if self.last is None else self.last
            self.last = x
            return self.linear(before)

    with pytest.raises(CaptureError, match=r"sets last at its first call"):
        remat.capture(Remembering(), (batch(),))


def test_what_forward_sets_and_reads_in_one_call_is_carried() -> None:
    class Noting(Base):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.linear(x)
            return self.last.square().mean()

    model, x = Noting(), batch()
    fast = planned(model, x)
    fast(x)
    ours = model.last
    model(x)
    assert isinstance(ours, Tensor)
    assert torch.equal(ours, model.last)


def test_a_cached_function_keeps_no_tensor_of_the_trace() -> None:
    @functools.cache
    def table(size: int) -> Tensor:
        return torch.arange(float(size)).sin()

    class Cached(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + table(WIDTH))

    model, x = Cached(), batch()
    fast = planned(model, x)
    assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize(
    ("draw", "stream"),
    [(random.random, "random"), (lambda: np.random.rand(), "numpy.random")],
    ids=["python", "numpy"],
)
def test_draws_of_other_streams_are_refused_with_their_line(
    draw: Callable[[], float], stream: str
) -> None:
    class Drawing(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * draw()

    state, array = random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(CaptureError, match=rf"draws from {stream} \(.*test_other.*py:\d+"):
        remat.capture(Drawing(), (batch(),))
    assert random.getstate() == state
    assert np.array_equal(np.random.get_state()[1], array)


def test_a_seed_set_in_forward_is_refused_with_its_line() -> None:
    class Seeded(Base):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(0)
            return nn.functional.dropout(self.linear(x))

    with pytest.raises(CaptureError, match=r"calls torch\.manual_seed \(.*test_other.*py:\d+"):
        remat.capture(Seeded(), (batch(),))


def test_the_check_leaves_what_is_upstream_alone() -> None:
    first, second, x = Base().linear, Base().linear, batch()
    cache = remat.plan_cache(second, budget="100%", solver="store_all")
    out = cache(first(x))
    assert first.weight.grad is None
    out.sum().backward()
    assert first.weight.grad is not None


def test_hooks_of_parameters_do_not_run_in_the_check() -> None:
    model, x = Base().linear, batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    planned(model, x)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_parameters_that_forward_writes_are_put_back_by_the_check() -> None:
    class Momentum(Base):
        def __init__(self) -> None:
            super().__init__()
            self.slow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.slow.weight.mul_(0.9).add_(self.linear.weight, alpha=0.1)
            return (self.linear(x) - self.slow(x)).square().mean()

    model, x = Momentum(), batch()
    before = model.slow.weight.clone()
    planned(model, x)
    assert torch.equal(model.slow.weight, before)


def test_a_list_that_forward_consumes_is_left_to_the_user() -> None:
    class Popping(Base):
        def forward(self, parts: list[Tensor]) -> Tensor:
            return self.linear(parts.pop())

    parts = [batch()]
    planned(Popping(), parts)
    assert len(parts) == 1


def test_a_hook_of_the_whole_model_runs_once() -> None:
    model, x = Base().linear, batch()
    model.register_forward_hook(lambda _, args, out: out * 2)
    fast = planned(model, x)
    assert torch.equal(fast(x), model(x))


def test_a_hook_that_forward_sets_and_that_keeps_something_is_refused() -> None:
    class Watching(Base):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.register_hook(lambda g: self.seen.append(g.detach()))
            return y.mean()

    with pytest.raises(CaptureError, match=r"backward of Watching changes seen"):
        remat.capture(Watching(), (batch(),))


def test_the_users_names_stay_his() -> None:
    class Named(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("schedule", torch.linspace(0, 1, 5))
            self.code = "mine"

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

        def graph(self, n: int) -> int:
            return n + 1

    model, x = Named(), batch()
    fast = planned(model, x)
    assert torch.equal(fast.schedule, model.schedule)
    assert (fast.code, fast.graph(1)) == ("mine", 2)
    fast.code = "other"
    assert model.code == "other"
    assert remat.plan_of(fast).schedule.steps


def test_a_registry_of_subclasses_is_not_told_of_a_plan() -> None:
    class Registered(Base):
        known: ClassVar[list[str]] = []

        def __init_subclass__(cls, **words: Any) -> None:
            super().__init_subclass__(**words)
            Registered.known.append(cls.__name__)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    class Own(Registered):
        pass

    planned(Own(), batch())
    assert Registered.known == ["Own"]


def test_a_loss_that_is_a_module_trains_its_own_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("weights", torch.rand(WIDTH))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return ((out - target).square() * self.scale * self.weights).mean()

    model, loss_fn, x, y = Base().linear, Scaled(), batch(), torch.zeros(8, WIDTH)
    fast = planned(model, x, loss_fn=loss_fn, target=y)
    loss_fn(model(x), y).backward()
    eager = [p.grad.clone() for p in (*model.parameters(), *loss_fn.parameters())]
    model.zero_grad()
    loss_fn.zero_grad()
    fast(x, target=y).backward()
    assert all(
        torch.equal(a, p.grad)
        for a, p in zip(eager, (*model.parameters(), *loss_fn.parameters()), strict=True)
    )


def test_dropout_at_rest_is_its_input() -> None:
    class InPlace(Base):
        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            y = nn.functional.dropout(h, 0.1, training=False)
            y += 1
            return torch.tanh(h)

    model, x = InPlace(), batch()
    assert torch.equal(planned(model, x)(x), model(x))


def test_what_torch_cannot_take_apart_is_refused_with_the_call_that_helps() -> None:
    @dataclasses.dataclass
    class Batch:
        x: Tensor

    class Taking(Base):
        def forward(self, given: Batch) -> Tensor:
            return self.linear(given.x)

    with pytest.raises(CaptureError, match=r"args\[0\] is a .*Batch.*register_dataclass\(Batch\)"):
        remat.capture(Taking(), (Batch(batch()),))


def test_an_expanded_batch_is_planned() -> None:
    class Adding(Base):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return self.linear(x) + bias

    model, x, bias = Adding(), batch(), torch.randn(1, WIDTH).expand(8, WIDTH)
    assert torch.equal(planned(model, x, bias)(x, bias), model(x, bias))


def test_a_tensor_that_is_returned_twice_is_one_tensor_and_predicted() -> None:
    class States(Base):
        def forward(self, x: Tensor) -> Any:
            states = [x]
            for _ in range(3):
                states.append(torch.tanh(self.linear(states[-1])))
            self.last = states[-1]
            return states[-1], {"all": tuple(states), "again": states[-1], "number": 3}

    model, x = States(), torch.randn(512, WIDTH)
    graph = remat.capture(model, (x,))
    result = remat.solve(graph, "100%")
    assert result.schedule is not None
    fast = remat.rewrite(model, result.schedule)
    found = remat.check(model, fast, (x,), steps=1)
    assert found.equal
    assert found.plan_peak_bytes == result.peak_bytes
    last, rest = fast(x)
    assert last is rest["again"] is rest["all"][-1] is model.last
    assert rest["number"] == 3


@pytest.mark.parametrize(
    ("use_reentrant", "says"),
    [(False, r"block\.1\.running_mean inside torch\.utils\.checkpoint"), (True, "use_reentrant")],
)
def test_a_buffer_written_inside_a_checkpoint_is_refused_with_the_way_out(
    use_reentrant: bool, says: str
) -> None:
    class Checkpointed(Base):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

        def forward(self, x: Tensor, is_checkpointed: bool = True) -> Tensor:
            h = self.linear(x)
            if is_checkpointed:
                return checkpoint(self.block, h, use_reentrant=use_reentrant)
            return self.block(h)

    model, x = Checkpointed(), batch()
    with pytest.raises(CaptureError, match=says):
        remat.capture(model, (x,))
    assert planned(model, x, False)(x, False).shape == x.shape


def test_no_schedule_is_no_plan() -> None:
    model, x = Base().linear, batch()
    remat.capture(model, (x,))
    with pytest.raises(RewriteError, match="no schedule to rewrite to"):
        remat.rewrite(model, None)  # type: ignore[arg-type]


def test_what_a_solve_returns_is_no_schedule_and_the_way_out_works() -> None:
    model, x = Base().linear, batch()
    graph = remat.capture(model, (x,))
    lost, found = remat.solve(graph, 1), remat.solve(graph, "min")
    assert lost.schedule is None
    assert f"{lost.least_feasible_bytes} bytes are known to do" in lost.message
    with pytest.raises(RewriteError, match=r"but Result\(infeasible.* result.message says what"):
        remat.rewrite(model, lost)  # type: ignore[arg-type]
    with pytest.raises(RewriteError, match=r"pass the schedule in it, rewrite\(model, result.sch"):
        remat.rewrite(model, found)  # type: ignore[arg-type]
    assert found.schedule is not None
    assert torch.equal(remat.rewrite(model, found.schedule)(x), model(x))


def test_a_loss_that_makes_its_gradient_in_forward_keeps_eagers_peak() -> None:
    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            total, gradient = x.new_zeros(()), torch.zeros_like(weight)
            for part in x.chunk(8):
                z = (part @ weight).tanh()
                total = total + z.sum()
                gradient = gradient + part.T @ (1 - z * z)
            ctx.save_for_backward(gradient)
            return total

        @staticmethod
        def backward(ctx: Any, given: Tensor) -> tuple[None, Tensor]:
            return None, given * ctx.saved_tensors[0]

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 512) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return Chunked.apply(x, self.weight)

    torch.manual_seed(0)
    model, x = Summed(), torch.randn(1024, WIDTH)
    fast = planned(model, x)
    found = remat.check(model, fast, (x,), steps=1)
    assert found.equal
    assert found.plan_peak_bytes <= 1.02 * found.baseline_peak_bytes
    again = [op.name for op in remat.plan_of(fast).graph.ops if op.phase == "backward"]
    assert not any("tanh" in name for name in again)


def test_a_flag_that_is_set_once_is_set_by_each_step() -> None:
    class Config:
        kind: str | None = None

    class Choosing(Base):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()
            self.is_set = False

        def forward(self, x: Tensor) -> Tensor:
            if self.config.kind is None:
                self.config.kind = "mean"
            self.is_set = self.is_set or True
            return getattr(self.linear(x), self.config.kind)()

    model, x = Choosing(), batch()
    fast = planned(model, x)
    assert model.config.kind is None
    for _ in range(2):
        assert torch.equal(fast(x), model(x))
        assert (model.config.kind, model.is_set) == ("mean", True)


def test_a_first_call_that_initialises_something_is_refused() -> None:
    class Initialised(Base):
        is_ready = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            if not self.is_ready:
                self.is_ready = True
                y = y / y.std()
            return y.mean()

    model, x = Initialised(), batch()
    with pytest.raises(CaptureError, match="sets is_ready at its first call"):
        remat.capture(model, (x,))
    model(x)
    assert torch.equal(planned(model, x)(x), model(x))


def test_code_that_looks_at_values_made_of_numbers_alone_takes_the_way_of_eager() -> None:
    class Positions(Base):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(x.shape[0])[None]
            steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
            kept = torch.ones(3, dtype=torch.bool)
            kept[1] = False
            scale = 2.0 if (steps == 1).all() and not kept[1] else 100.0
            return self.linear(x).sum() * scale * torch.tensor([1, 3]).tolist()[1]

    model, x = Positions(), batch()
    fast = planned(model, x)
    pairs = zip(gradients(model, lambda: model(x)), gradients(model, lambda: fast(x)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_known_tensor_that_is_given_values_of_the_batch_is_known_no_more() -> None:
    class Written(Base):
        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(2)
            first = total[:1]
            total[0] = x.sum()
            return self.linear(x).sum() * (2.0 if first.item() > 0 else 1.0)

    with pytest.raises(CaptureError, match=r"the values of args\[0\].*Leave args\[0\] out"):
        planned(Written(), batch())


def test_an_option_that_draws_is_named_as_the_way_out_of_a_branch_on_a_random_number() -> None:
    class LayerDrop(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum() if torch.rand([]) < 0.5 else x.sum()

    with pytest.raises(CaptureError, match=r"a random number.*layerdrop.*to 0"):
        planned(LayerDrop(), batch())


def test_code_that_catches_what_only_a_trace_raises_is_refused() -> None:
    class Careful(Base):
        def forward(self, x: Tensor) -> Tensor:
            try:
                scale = 2.0 if x.sum() > 0 else 1.0
            except RuntimeError:
                scale = 3.0
            return self.linear(x).sum() * scale

    with (
        pytest.warns(UserWarning, match="traced as if it were compiled"),
        pytest.raises(RewriteError),
    ):
        planned(Careful(), batch())


def averaged_by_data(model: nn.Module) -> None:
    for own, other in zip(model.teacher.parameters(), model.linear.parameters(), strict=True):
        own.data = own.data * 0.9 + other.data * 0.1


def averaged_by_vectors(model: nn.Module) -> None:
    own = nn.utils.parameters_to_vector(model.teacher.parameters())
    nn.utils.vector_to_parameters(own.detach() * 0.9, model.teacher.parameters())


def averaged_by_set(model: nn.Module) -> None:
    with torch.no_grad():
        model.teacher.weight.set_(model.teacher.weight * 0.9)


def averaged_by_copy(model: nn.Module) -> None:
    for own, other in zip(model.teacher.parameters(), model.linear.parameters(), strict=True):
        own.data.copy_(own.data * 0.9 + other.data * 0.1)


class Averaged(Base):
    """A teacher whose weights are averages of the student's, as in MoCo and BYOL."""

    def __init__(self, average: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.linear).requires_grad_(False)
        self.average = average

    def forward(self, x: Tensor) -> Tensor:
        self.average(self)
        return (self.linear(x) - self.teacher(x)).square().mean()


@pytest.mark.parametrize("average", [averaged_by_data, averaged_by_vectors, averaged_by_set])
def test_other_data_of_a_parameter_is_refused_with_the_way_out(
    average: Callable[[nn.Module], None],
) -> None:
    model = Averaged(average)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError, match=r"other data.*tensor\.data\.copy_\(other\)"):
        planned(model, batch())
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_the_way_out_of_other_data_trains_as_eager() -> None:
    eager = Averaged(averaged_by_copy)
    model = copy.deepcopy(eager)
    module, x = planned(model, batch()), batch()
    for one in (eager, module):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(x).backward()
            optimizer.step()
    for name, tensor in eager.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
