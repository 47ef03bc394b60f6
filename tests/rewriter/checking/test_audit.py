"""Audits: which steps they compare, what they put back, what they say, and when they rest."""

from __future__ import annotations

import copy
import pickle
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import remat
from examples.gpt import GPT, Sizes
from remat.graph_capture import measure_costs, trace
from remat.graph_capture.devices.memory_events import measure_live
from remat.graph_capture.errors import AuditError, RewriteError
from remat.graph_capture.tracing.resident import resident_bytes
from remat.rewriter.checking.audit import is_audited, others_may_draw, why_no_room
from remat.rewriter.checking.measured_step import measured_step
from remat.rewriter.checking.outcomes import HASH_BLOCK_BYTES, ForwardOutcomes, fingerprint
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from tests.behaviours.trainee import Trainee, differences
from tests.models import MODELS, make
from tests.rows import each_nth
from tests.steps import rewritten, schedule_of
from tests.threads import torch_threads

STEPS = 9
LONG_S = 60.0
"""No test waits as long, however busy the machine is."""
RANGE: Any = {"x": {0: ("batch", 2, 8)}}
OWN_OPS = {"custom_op"}
"""Models that run an op of their own."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


class Number:
    """Lies in a database, whose memory no guard looks into."""

    def __init__(self, value: int) -> None:
        self.base = sqlite3.connect(":memory:")
        self.set(value)

    def __deepcopy__(self, _: Any) -> Number:
        return Number(self.get())

    def set(self, value: int) -> None:
        self.base.execute(f"PRAGMA user_version = {value}")

    def get(self) -> int:
        return self.base.execute("PRAGMA user_version").fetchone()[0]


class Scaled(nn.Module):
    """Multiplies by a number of an object that no guard looks into, and counts its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), Number(1)
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).square().mean() * self.scale.get()


def planned(model: nn.Module, *args: Tensor, **options: Any) -> RematModule:
    """Everything is kept: audits are about what forward gives."""
    traced = trace(model, args)
    schedule = schedule_of(measure_costs(traced), "store_all")
    return rewrite(model, schedule, trace=traced, **options)


def trained(module: nn.Module, args: tuple[Any, ...], steps: int) -> None:
    for _ in range(steps):
        module(*args).sum().backward()


def test_powers_of_two_and_every_thousandth() -> None:
    assert [n for n in range(1, 3001) if is_audited(n)] == [
        *(2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1024, 2000, 2048, 3000)
    ]


def test_only_these_steps_run_the_users_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    module, runs = planned(Scaled(), torch.randn(4, 4)), [0]
    run = ForwardOutcomes._run

    def counted(outcomes: ForwardOutcomes, leaves: list[Any]) -> Any:
        runs[-1] += 1
        return run(outcomes, leaves)

    monkeypatch.setattr(ForwardOutcomes, "_run", counted)
    for _ in range(STEPS):
        module(torch.randn(4, 4)).backward()
        runs.append(0)
    assert [n for n, count in enumerate(runs, 1) if count] == [2, 4, 8]
    assert repr(module.audit) == "Audit(3 of 9 steps of Scaled were compared)"


@pytest.mark.parametrize("name", each_nth(2, MODELS))
def test_training_is_the_same_with_audits(name: str) -> None:
    """Without them it is eager's, as `tests/behaviours` holds, there with audits too."""
    left: list[dict[str, Any]] = []
    for audit in (False, True):
        model, args, kwargs, loss_fn, target = make(name)
        traced = trace(model, args, kwargs, loss_fn=loss_fn, target=target)
        schedule = schedule_of(measure_costs(traced), "chen_sqrt")
        module = rewrite(model, schedule, trace=traced, audit=audit)
        kwargs = kwargs if target is None else {**kwargs, "target": target}
        torch.manual_seed(3)
        left.append(_four_steps(Trainee(module, args, kwargs)))
    assert differences(*left) == []
    assert module.audit.audited == (0 if module.audit.why_not else 2)
    assert bool(module.audit.why_not) == (name in OWN_OPS), module.audit


def _four_steps(it: Trainee) -> dict[str, Any]:
    optimizer = torch.optim.SGD(it.module.parameters(), lr=1e-3)
    for i in range(4):
        it.step(i)
        optimizer.step()
    return it.observed()


class Writer(nn.Module):
    """Writes to a buffer, to its input and to an attribute, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(4))
        self.last: Any = None

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.linear(x)))
        with torch.no_grad():
            self.seen.mul_(0.5).add_(hidden.sum(0))
            cache[:, 1:].copy_(cache[:, :-1].clone())
            cache[:, 0].copy_(hidden.mean(1))
        self.last = hidden.detach() * 2
        return hidden.square().mean() + cache.sum()


def test_what_forward_writes_is_put_back() -> None:
    model, x = Writer(), torch.randn(4, 4)
    caches = torch.zeros(4, 3), torch.zeros(4, 3)
    eager = copy.deepcopy(model)
    module = planned(model, x, torch.zeros(4, 3))
    left: list[list[Tensor]] = []
    for one, cache in zip((eager, module), caches, strict=True):
        torch.manual_seed(1)
        trained(one, (x, cache), 4)
        grads = [p.grad for p in one.parameters() if p.grad is not None]
        left.append([*grads, *one.buffers(), cache, one.last, torch.get_rng_state()])
    assert type(module).audit.audited == 2
    assert all(map(torch.equal, *left))


def test_a_difference_is_an_error_that_says_what_to_do() -> None:
    model, x = Scaled(), torch.randn(4, 4)
    module = planned(model, x)
    trained(module, (x,), 2)
    model.scale.set(2)
    trained(module, (x,), 1)
    with pytest.raises(AuditError) as raised:
        module(x)
    said = str(raised.value).splitlines()
    assert said[0].startswith("call remat.rematerialize again, to plan Scaled as it is now")
    assert "gives another output than the plan" in said[1]
    assert said[2] == "This was step 4 of the plan for args[0]: float32[4, 4] on cpu; target: None"
    assert isinstance(raised.value, remat.RematError)


def test_a_cache_plans_anew_after_it() -> None:
    model, x = Scaled(), torch.randn(4, 4)
    module = remat.rematerialize(model, budget="100%")
    trained(module, (x,), 2)
    assert repr(module.audit) == "Audit(1 of 2 steps of Scaled were compared)"
    model.scale.set(2)
    trained(module, (x,), 1)
    with pytest.raises(AuditError):
        module(x)
    assert remat.plans(module) == []
    assert torch.equal(module(x), model(x))


def test_audits_can_be_left_out() -> None:
    x = torch.randn(4, 4)
    model = Scaled()
    made = [
        planned(model, x, audit=False),
        remat.rematerialize(Scaled(), (x,), budget="100%", audit=False),
        remat.rematerialize(
            Scaled(), (x,), budget="100%", audit=False, dynamic={"x": {0: ("batch", 2, 8)}}
        ),
        remat.rematerialize(Scaled(), budget="100%", audit=False),
    ]
    for module in (*made, *map(copy.deepcopy, made[:1])):
        trained(module, (x,), 1)
        module.scale.set(2)
        trained(module, (x,), 8)
    assert made[0].audit is None


def test_steps_of_a_check_do_not_count() -> None:
    model, x = Scaled(), torch.randn(4, 4)
    module = planned(model, x)
    assert remat.check(model, module, (x,), steps=2).equal
    measured_step(model, module, (x,))
    assert module.audit.steps == 0
    trained(module, (x,), 2)
    assert module.audit.audited == 1


def test_a_copy_is_audited_by_itself() -> None:
    x = torch.randn(4, 4)
    module = planned(nn.Linear(4, 4), x)
    trained(module, (x,), 2)
    again = pickle.loads(pickle.dumps(module))
    for other in (copy.deepcopy(module), again):
        trained(other, (x,), 3)
        assert (other.audit.steps, other.audit.audited) == (3, 1)
    assert module.audit.steps == 2


def test_each_member_of_a_range_is_audited() -> None:
    model = Scaled()
    module = remat.rematerialize(model, (torch.randn(4, 4),), budget="100%", dynamic=RANGE)
    trained(module, (torch.randn(8, 4),), 2)
    assert module.audit.audited == 1
    model.scale.set(2)
    with pytest.raises(AuditError, match="another output"):
        trained(module, (torch.randn(8, 4),), 2)


def test_so_is_each_block() -> None:
    blocks = nn.Sequential(Block(), Block())
    module = remat.rematerialize(blocks, (torch.randn(4, 4),), blocks="*", budget="100%")
    trained(module, (torch.randn(4, 4),), 3)
    blocks[1].scale.set(2)
    with pytest.raises(AuditError, match="plan Block as it is now"):
        trained(module, (torch.randn(4, 4),), 1)


class Block(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale.get()


def test_chunks_are_compared_to_their_tolerance() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 512)
    x, y = torch.randn(64, 16), torch.randint(512, (64,))
    options: Any = {"loss_fn": nn.CrossEntropyLoss(), "target": y, "split": "tolerance"}
    module = remat.rematerialize(model, (x,), budget="330KiB", **options)
    assert any(not one.exact for one in type(module)._remat_schedule.chunks)
    for _ in range(4):
        module(x, target=y).backward()
    assert type(module).audit.audited == 2, type(module).audit


CALLS: list[int] = []


@torch.library.custom_op("tests_of_audits::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    CALLS.append(1)
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, g: 2 * g)


def test_an_op_of_the_users_runs_only_in_the_step() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return doubled(self.linear(x)).sum()

    x = torch.randn(4, 4)
    module = planned(Own(), x)
    CALLS.clear()
    trained(module, (x,), 4)
    assert len(CALLS) == 4
    assert "runs tests_of_audits.doubled.default, which may count" in module.audit.why_not


def test_nor_does_one_whose_forward_runs_a_backward() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)
            return force.square().sum()

    x = torch.randn(4, 4)
    module = planned(Force(), x)
    trained(module, (x,), 4)
    assert "runs a backward of its own" in module.audit.why_not


def test_a_mode_of_the_users_does_not_see_two_forwards() -> None:
    x = torch.randn(4, 4)
    module = planned(nn.Linear(4, 4), x)
    flops: list[int] = []
    for one in (module, planned(nn.Linear(4, 4), x, audit=False)):
        trained(one, (x,), 1)
        with FlopCounterMode(display=False) as counter:
            one(x).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1]
    assert module.audit.audited == 0
    trained(module, (x,), 1)
    assert module.audit.audited == 1  # as soon as nobody looks


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_stream_from_which_another_thread_draws_is_not_put_back(rate: float) -> None:
    x, ends = torch.randn(4, 4), threading.Event()
    module = planned(nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)), x)
    beside = threading.Thread(target=lambda: ends.wait())
    beside.start()
    trained(module, (x,), 3)
    ends.set()
    beside.join()
    assert module.audit.audited == (0 if rate else 1)
    assert ("another thread may draw" in repr(module.audit)) is bool(rate)
    trained(module, (x,), 1)
    assert module.audit.audited == (1 if rate else 2)
    assert module.audit.why_not == ""


def test_a_pool_of_threads_may_draw_while_it_has_work() -> None:
    x, ends = torch.randn(4, 4), threading.Event()
    module = planned(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), x)
    with ThreadPoolExecutor(2) as pool:
        work = pool.submit(ends.wait)
        trained(module, (x,), 2)
        assert "another thread may draw" in module.audit.why_not
        ends.set()
        work.result()
        assert finds_idle(pool)
        trained(module, (x,), 1)
        assert module.audit.audited == 1


def finds_idle(pool: ThreadPoolExecutor) -> bool:
    """Whether its threads, which go on for a moment after a result is there, wait for more."""
    ends = time.monotonic() + LONG_S
    while others_may_draw() and time.monotonic() < ends:
        time.sleep(1e-3)
    return not others_may_draw()


def test_a_forward_that_fails_now_fails_as_eager_does() -> None:
    model, x = Scaled(), torch.randn(4, 4)
    module = planned(model, x)
    trained(module, (x,), 1)
    model.scale.base.close()
    with pytest.raises(sqlite3.ProgrammingError):
        module(x)


def test_no_step_is_raised_above_its_plan() -> None:
    sizes = Sizes(layers=3, width=64, heads=4, seq=64, batch=4, vocab=256, dropout=0.1)
    torch.manual_seed(0)
    tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1))
    model, args = GPT(sizes), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    module = remat.rematerialize(model, args, budget="60%", solver="cut", check=False)
    trained(module, args, 1)
    resident = resident_bytes(model, args, optimizer="none", accumulate=False)
    budget = type(module)._remat_schedule.budget_bytes
    peaks: list[int] = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        _, live = measure_live(lambda: module(*args).backward())
        peaks.append(max(live) + resident.total_bytes)
    assert type(module).audit.audited == 2
    assert max(peaks) <= 1.01 * budget


def test_where_there_is_no_room_it_says_so() -> None:
    model, _, _ = rewritten("plain")
    traced = trace(model, make("plain")[1])
    graph = measure_costs(traced)
    schedule = schedule_of(graph, "store_all")
    for is_block in (False, True):
        assert why_no_room(graph, schedule, None, 0, is_block=is_block) == ""
        said = why_no_room(graph, schedule, None, 1 << 30, is_block=is_block)
        assert said.startswith("the model's own forward takes 1.00 GiB, and there is room for")
    beside = why_no_room(graph, schedule, None, 0, is_block=False, results_bytes=1 << 20)
    assert beside == "its results take 1.00 MiB on top of the planned step"


def test_fingerprints_are_of_bits_in_any_layout() -> None:
    tensor = torch.randn(64, 3, 32, 32)
    assert tensor.nbytes > HASH_BLOCK_BYTES
    laid_out = tensor.to(memory_format=torch.channels_last)
    assert fingerprint(laid_out) == fingerprint(tensor) == fingerprint(tensor.mT.contiguous().mT)
    for other in (-tensor, tensor.double(), tensor.view(3, 64, 32, 32)):
        assert fingerprint(other) != fingerprint(tensor)
    assert fingerprint(torch.tensor(0.0)) != fingerprint(torch.tensor(-0.0))
    nan = torch.full((2,), float("nan"), dtype=torch.bfloat16)
    assert fingerprint(nan) == fingerprint(nan.clone())
    assert fingerprint(torch.randn(3, dtype=torch.complex64).conj()) != fingerprint(nan)


def test_a_tensor_that_only_eager_writes_is_a_difference() -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.flags = nn.Linear(4, 4), Number(0)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.flags.get():
                self.seen.add_(1)
            return self.linear(x).sum()

    model, x = Quiet(), torch.randn(4, 4)
    module = planned(model, x)
    trained(module, (x,), 1)
    model.flags.set(1)
    with pytest.raises(RewriteError, match="another"):
        trained(module, (x,), 1)
