"""Trains a combination of levers beside eager, and says what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.blocks.rematerialized import planned_blocks
from remat.graph_capture.devices.memory_events import measure_peak, measure_rank_peak
from remat.graph_capture.distributed.dtensors import local_part
from remat.graph_capture.errors import BudgetError, CheckError, RematError
from remat.graph_capture.tracing.resident import storage_bytes
from remat.schedules.family import resized_schedule
from remat.schedules.simulate import simulate
from tests.together.levers import (
    LENGTHS,
    LEVERS,
    OF_TEXT,
    RANKS,
    Convolutional,
    Language,
    Trained,
    batch,
    mesh_of,
    tensor_parallel,
)

STEPS = 5
BUDGETS = ("65%", "50%", "40%", "85%", "min")
"""Tried in this order until each lever of a combination does its part."""
ROUNDS = 25  # of four steps, until one whose frees were all seen
GAP = 0.1  # at which searches end soon
OFF = 0.01  # of a peak from its prediction
FAR = 0.01  # of the norm of a result, where Inductor's code rounds otherwise


class Outcome(msgspec.Struct, frozen=True):
    """What came of a combination.

    Attributes
    ----------
    verdict : ``exact`` or ``within`` a tolerance, ``refused`` with `text`; or a fault: ``ignored``,
        ``differs``, ``peak`` or ``fails``, which `text` tells.
    """

    verdict: str
    text: str = ""
    budget: str = ""
    predicted_bytes: int = 0
    measured_bytes: int = 0
    plan_s: float = 0.0

    @property
    def works(self) -> bool:
        return self.verdict in ("exact", "within")


def outcome(letters: str, *, is_autocast: bool = False) -> Outcome:
    """Of the first budget at which each of `letters` does its part."""
    found = Outcome("ignored")
    for budget in BUDGETS:
        try:
            tried = _at(letters, budget, is_autocast)
        except BudgetError as error:
            found = found if found.text else Outcome("refused", _line(error))
            continue
        except CheckError as error:
            return Outcome("differs", _line(error))
        except RematError as error:
            return Outcome("refused" if "\n" not in str(error) else "fails", _line(error))
        except Exception as error:  # noqa: BLE001  whatever it is, it is a fault to be listed
            return Outcome("fails", f"{type(error).__name__}: {_line(error)}")
        if tried.verdict != "ignored":
            return tried
        found = tried
    return found


def _line(error: Exception) -> str:
    return " / ".join(str(error).splitlines())


def _at(letters: str, budget: str, is_autocast: bool) -> Outcome:
    torch.manual_seed(0)
    eager, model = made(letters), made(letters)
    model.load_state_dict(eager.state_dict())
    began = time.perf_counter()
    given = {k: v for one in letters for k, v in LEVERS[one].given(model).items()}
    pair = _Pair(letters, eager, model, given, is_autocast)
    pair.plan(budget)
    plan_s = time.perf_counter() - began
    differing = pair.train()
    if differing:
        return Outcome("differs", differing, budget)
    idle = [LEVERS[one].name for one in letters if not LEVERS[one].took_part(pair.trained)]
    if idle:
        return Outcome("ignored", ", ".join(idle), budget)
    predicted, limit, measured = pair.peaks()
    verdict = "within" if "C" in letters else "exact"
    if measured > (1 + OFF) * limit or (predicted and abs(measured / predicted - 1) > OFF):
        verdict = "peak"
    return Outcome(verdict, "", budget, predicted, measured, plan_s)


def made(letters: str) -> nn.Module:
    """The model for a combination, on this rank."""
    if not set(letters) & OF_TEXT:
        model = Convolutional()
        return model.to(memory_format=torch.channels_last) if letters == "AC" else model  # pyright: ignore
    model = Language(returns_logits="B" in letters)
    if "T" in letters:
        mesh = mesh_of(letters)
        tensor_parallel(model, mesh["tp"] if mesh.ndim > 1 else mesh)
    return model


class _Pair:
    """The planned module beside eager, both wrapped as the letters say."""

    def __init__(
        self, letters: str, eager: nn.Module, model: nn.Module, given: dict[str, Any],
        is_autocast: bool,
    ) -> None:  # fmt: skip
        self.letters, self.eager, self.model = letters, eager, model
        self.plain = eager
        self.given, self.is_autocast = given, is_autocast
        self.batches: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        if "T" in letters and "sharding" in given:
            own = given["sharding"]
            given["sharding"] = dataclasses.replace(own, world_size=own.world_size // 2)

    def batch(self, number: int, length: int = LENGTHS[0]) -> tuple[Tensor, Tensor]:
        shares = bool(set("GZ") & set(self.letters))
        rank = dist.get_rank() // (2 if "T" in self.letters else 1) if shares else 0
        asked = number + 100 * rank, length
        if asked not in self.batches:  # once each, so that none is made within what is measured
            is_text = isinstance(self.model, Language)
            self.batches[asked] = batch(asked[0], is_text=is_text, length=length)
        return self.batches[asked]

    def plan(self, budget: str) -> None:
        quick = {} if "blocks" in self.given else {"gap": GAP}
        with self.cast():
            fast = remat.rematerialize(
                self.model, self.batch(0), budget=budget, verbose=False, **self.given, **quick
            )
        plan, blocks = remat.plans(fast)[0], planned_blocks(fast)
        step = plan.step.top if plan.family and plan.step else plan.step
        modules = {op.name: op.module for op in step.ops} if step else {}
        members = [one.schedule for one in plan.family.members] if plan.family else [plan.schedule]
        schedules = {"": tuple(members)}
        if blocks is not None:
            of_sizes = blocks.members or (blocks.schedules,)
            schedules = {path: tuple(one[path] for one in of_sizes) for path in of_sizes[0]}
        self.trained = Trained(self.model, fast, modules, schedules)
        is_head_cut = blocks is not None and blocks.head is not None
        self.trained.in_chunks = is_head_cut or any(one.chunks for one in members)
        self.found = plan
        if "X" in self.letters:
            self.trained.arena = plan.use_arena(self.batch(0))
        self.trained.wrapped, self.eager = self.wrap(fast), self.wrap(self.eager)
        own = self.given.get("optimizer_in_backward")
        parameters = self.trained.wrapped.parameters()
        self.optimizer = own if own is not None else torch.optim.AdamW(parameters)

    def wrap(self, module: nn.Module) -> nn.Module:
        if "G" in self.letters:
            if "T" not in self.letters:
                return DistributedDataParallel(module)
            mesh = mesh_of(self.letters)["dp"]
            return DistributedDataParallel(module, device_mesh=mesh)
        if "Z" not in self.letters:
            return module
        mesh = mesh_of(self.letters)["dp"]
        for block in module.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    def cast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.is_autocast:
            return contextlib.nullcontext()
        return torch.autocast("cpu", torch.bfloat16)

    def train(self) -> str:
        """What differs from eager after `STEPS` steps over three batches; "" if nothing does."""
        theirs = torch.optim.AdamW(self.eager.parameters())
        for number in range(STEPS):
            length = LENGTHS[number % 3] if "D" in self.letters else LENGTHS[0]
            if "F" in self.letters:
                for one in (self.plain, self.model, self.trained.fast):
                    one.scale = 1.5 + number / 8  # pyright: ignore
                self.trained.scales.add(1.5 + number / 8)
            expected, found = (
                self.step(one, number, length) for one in (self.eager, self.trained.wrapped)
            )
            for optimizer in (theirs, self.optimizer):
                optimizer.step()
                optimizer.zero_grad()
            if not all(map(self.same, expected, found)):
                return f"the loss of step {number}"
            self.trained.lengths.add(length)
        kept = [module.state_dict() for module in (self.eager, self.trained.wrapped)]
        if "C" in self.letters:  # a bias before a norm has gradients of rounding alone
            kept = [{"": torch.cat([t.double().flatten() for t in one.values()])} for one in kept]
        differing = [name for name, one in kept[0].items() if not self.same(one, kept[1][name])]
        return f"{differing[0]} after {STEPS} steps" if differing else ""

    def step(self, module: nn.Module, number: int, length: int = LENGTHS[0]) -> list[Tensor]:
        """Losses of one step, and the random state after it."""
        losses: list[Tensor] = []
        torch.manual_seed(number)
        n_parts = 2 if "A" in self.letters else 1
        for part in range(n_parts):
            with self.held(module) if part < n_parts - 1 else contextlib.nullcontext():
                with self.cast():
                    loss = module(*self.batch(number % 3 + part, length))
                loss = self.loss_of(loss, module)
                loss.backward()
            losses.append(loss.detach())
        if module is not self.eager:
            self.trained.left_gradients |= any(p.grad is not None for p in module.parameters())
        return [*losses, torch.get_rng_state()]

    def loss_of(self, output: Any, module: nn.Module) -> Tensor:
        if "B" not in self.letters:
            return output
        if module is not self.eager and not self.trained.left_out:
            try:
                output["logits"].sum()
            except RematError as error:
                self.trained.left_out = str(error)
        return output["loss"]

    @contextlib.contextmanager
    def held(self, module: nn.Module) -> Iterator[None]:
        """All batches of a step but the last."""
        with contextlib.ExitStack() as stack:
            if "G" in self.letters:
                stack.enter_context(module.no_sync())  # pyright: ignore
            if "U" in self.letters and module is not self.eager:
                stack.enter_context(self.trained.fast.no_update())  # pyright: ignore
            yield
        self.trained.held_back += 1

    def same(self, one: Tensor, other: Tensor) -> bool:
        one, other = local_part(one.detach()), local_part(other.detach())
        if "C" not in self.letters:
            return torch.equal(one, other)
        return bool((one.double() - other.double()).norm() <= FAR * one.double().norm())

    def peaks(self) -> tuple[int, int, int]:
        """The predicted peak, the budget, and the measured peak."""
        fast, given = self.trained.wrapped, self.batch(0)
        held = storage_bytes([*fast.parameters(), *fast.buffers(), *given])
        if "U" in self.letters:
            state = self.optimizer.state.values()
            held += storage_bytes([tensor for one in state for tensor in one.values()])
        if "G" in self.letters:
            held += sum(p.nbytes for p in self.model.parameters())
        predicted = 0 if "C" in self.letters else self.predicted()
        most = (predicted or self.found.budget_bytes) - held
        return predicted, self.found.budget_bytes, held + self.measured(most)

    def predicted(self) -> int:
        """The peak for batches of the measured length."""
        plan = self.found
        if plan.family is None:
            return plan.peak_bytes
        graph = plan.step.at(length=LENGTHS[0])  # pyright: ignore
        member = plan.family.members[plan.family.number_at(length=LENGTHS[0])]
        return simulate(graph, resized_schedule(member.schedule, graph)).peak_bytes

    def measured(self, most_bytes: int) -> int:
        """The peak of a step beyond what is held before it; on ranks the lowest of a few steps."""

        def run() -> None:
            self.step(self.trained.wrapped, 0)

        if not RANKS & set(self.letters):
            return measure_peak(run)
        found: list[int] = []
        for _ in range(ROUNDS):  # gloo's threads free what the profiler does not see
            found.append(measure_rank_peak(run, self.optimizer.zero_grad, 4))
            is_settled = torch.tensor(min(found) <= (1 + OFF) * most_bytes, dtype=torch.int32)
            dist.all_reduce(is_settled, dist.ReduceOp.MIN)
            if is_settled.item():
                break
        return min(found)
