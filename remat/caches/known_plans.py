"""What a cache of plans knows before it plans a batch: a schedule of other sizes may serve."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

import remat.graph_capture
import remat.rewriter
import remat.schedules
import remat.solver
from remat.budgets import Budget
from remat.graph_capture.costs.op_costs import Sized
from remat.graph_capture.errors import PlanError, ScheduleError
from remat.graph_capture.files import CacheFiles, decode_json
from remat.graph_capture.graph import Links, TrainingGraph
from remat.graph_capture.tracing.traced_step import Trace
from remat.rewriter.checking.audit import of_steps
from remat.rewriter.compiled import compile_step
from remat.rewriter.rewriting import trace_of_schedule
from remat.rewriter.user_module.module import RematModule, make_module
from remat.schedules.family import resized_schedule
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.solved import Solved
from remat.solver.policies.template import StoreAll
from remat.solver.result import INTERRUPTED, evaluate_schedule

_MOST_SCHEDULES = 16  # that are tried on a batch of other sizes; the first ones go first


class _Reusable(NamedTuple):
    overhead: float  # at the sizes that it was solved for
    schedule: Schedule
    links: Links | None = None


class AtHand(NamedTuple):
    schedule: Schedule
    graph: TrainingGraph  # with the bytes that ops take, and no times
    peak_bytes: int  # of `simulate` on that graph
    links: Links | None
    reserved_bytes: int  # as a `Result` has it


class KnownPlans:
    def __init__(self) -> None:
        # The highest peak of its plans, and whether a whole step was compared with eager's.
        self.most_bytes, self.is_checked = 0, False
        self._solved: list[_Reusable] = []

    def note(self, found: Solved) -> None:
        schedule = found.result.schedule
        assert schedule is not None
        self.took(found.result.peak_bytes)
        self._solved.append(_Reusable(found.result.overhead, schedule, found.graph.links))
        del self._solved[:-_MOST_SCHEDULES]

    def forget(self) -> None:
        self.is_checked = False
        self._solved.clear()

    def took(self, peak_bytes: int) -> None:
        self.most_bytes = max(self.most_bytes, peak_bytes)

    def at_hand(self, traced: Trace, budget: Budget, *, may_keep_all: bool) -> AtHand | None:
        """A schedule that fits the trace, of those the one with least overhead; or None."""
        plain = [_Reusable(0.0, StoreAll().schedule(traced.graph))] if may_keep_all else []
        # Peaks without workspaces are too low: most end here.
        limit_bytes = self._budget_bytes(traced.graph, budget)
        tried = [
            one
            for one in (*plain, *sorted(self._solved, key=lambda one: one.overhead))
            # The trace has no chunks to judge by, so those wait for the sizes below.
            if one.schedule.chunks or _fitting(traced.graph, one, limit_bytes, budget)
        ]
        if not tried:
            return None
        sized = Sized(traced)  # runs ops of unknown cost, so only where one may fit
        limit_bytes = self._budget_bytes(sized.graph, budget)
        found = (
            _fitting(_graph_for(sized, one.schedule), one, limit_bytes, budget) for one in tried
        )
        return next((one for one in found if one), None)

    def _budget_bytes(self, graph: TrainingGraph, budget: Budget) -> int:
        if not budget.is_of_the_step:
            return budget.bytes_for(graph)
        # A part of a small batch's peak is little, but the run has room for the plans it has made.
        return max(budget.bytes_for(graph) if budget.kind == "share" else 0, self.most_bytes)


def _graph_for(sized: Sized, schedule: Schedule) -> TrainingGraph:
    if not schedule.chunks:  # judged with its region in chunks, as it runs so
        return sized.graph
    one = schedule.chunks[0]
    return sized.with_region(one.region, one.chunks, is_exact=one.exact)


def _fitting(
    graph: TrainingGraph, one: _Reusable, budget_bytes: int, budget: Budget
) -> AtHand | None:
    """A candidate for a graph, if its step has the same ops and its peak is within the budget."""
    try:
        schedule = resized_schedule(one.schedule, graph)
        peak_bytes = simulate(graph, schedule, one.links).peak_bytes
    except ScheduleError:  # of another structure
        return None
    if peak_bytes > budget_bytes:
        return None
    if (reserved_bytes := budget.reserved_bytes(graph, schedule)) > budget_bytes:
        return None
    schedule = msgspec.structs.replace(schedule, budget_bytes=budget_bytes)
    return AtHand(schedule, graph, peak_bytes, one.links, reserved_bytes)


def adopted(
    model: nn.Module, traced: Trace, schedule: Schedule, links: Links | None, *, audit: bool,
    is_compared: bool, **known: Any,
) -> RematModule:  # fmt: skip
    """The module of a schedule that was not solved for here; `known` are facts for `rewrite`."""
    if schedule.captured_hash:
        traced = trace_of_schedule(model, traced.recipe, schedule, traced)
    step = compile_step(traced, schedule, links=links)
    # Where the user leaves audits out, the first step of a schedule from elsewhere is still one.
    audits = "first" if is_compared and not audit else of_steps(audit)
    module = make_module(
        model, schedule, traced.recipe, step, traced.python_state, **known, audit=audits
    )
    own_audit = type(module)._remat_audit
    if is_compared and own_audit is not None:
        own_audit.compare_next()
    return module


@functools.cache
def sources_key() -> str:
    digest = hashlib.sha256()  # another release may plan otherwise, and so may an edited checkout
    for package in (remat, remat.graph_capture, remat.rewriter, remat.schedules, remat.solver):
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            facts = path.stat()
            digest.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


# Schedules on disk, a file for each question: a graph with sizes and costs, a budget and options.

_SCHEMA_VERSION = 1
FILES = CacheFiles(
    "plans", "each process plans anew", "planned", most_files=256, most_bytes=1 << 24
)  # fmt: skip
ADDRESS = " at 0x"  # in the text of an option that says no more than where it lies
_NEAR, _CHEAP = 0.97, 0.005  # a plan this near to what is free is taken, or this cheap


class KeptSolve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    schedule: Schedule
    lower_bound_us: float
    budget_bytes: int  # what the budget was when it was solved
    schema_version: int = _SCHEMA_VERSION


def keeps_solves() -> bool:
    return not torch.compiler.config.force_disable_caches  # then every run is to start anew


def kept_solve(
    graph: TrainingGraph, budget: Budget, asked: str,
    in_chunks: Callable[[TrainingGraph], TrainingGraph],
) -> Solved | None:  # fmt: skip
    """What was kept, judged; None where it is to be solved. `in_chunks` adds costs of chunks."""
    if not (key := _question_key(graph, budget, asked)):
        return None
    found: list[Solved] = []

    def take(data: bytes) -> KeptSolve:
        kept = decode_json(data, KeptSolve)
        # The name of the file is only the beginning of the key.
        if (kept.key, kept.schema_version) == (key, _SCHEMA_VERSION):
            of_kept = in_chunks(graph) if kept.schedule.chunks and not graph.regions else graph
            # Judged inside of the read, so that an edited file is warned of as a damaged one is.
            found.append(Solved(of_kept, _judged(of_kept, kept, budget)))
        return kept

    if FILES.read(file_of(key), take) is None or not found:
        return None
    return found[0] if _suits(found[0].result, budget, graph) else None


def keep_solve(graph: TrainingGraph, budget: Budget, asked: str, result: Result) -> None:
    key = _question_key(graph, budget, asked)
    # What Ctrl-C has ended is not the best that a later process can have.
    if key and result.schedule is not None and not result.message.startswith(INTERRUPTED):
        kept = KeptSolve(key, result.schedule, result.lower_bound_us, result.budget_bytes)
        FILES.write(file_of(key), msgspec.json.encode(kept))


def _judged(graph: TrainingGraph, kept: KeptSolve, budget: Budget) -> Result:
    # A file is not believed: `simulate` says what its schedule takes on the graph at hand.
    facts: Any = {"budget_bytes": kept.budget_bytes, "lower_bound_us": kept.lower_bound_us}
    result = evaluate_schedule(graph, kept.schedule, **facts)
    if result.schedule is None:
        raise PlanError("its peak is above its budget")
    if not 0 <= kept.lower_bound_us <= (1 + 1e-9) * result.time_us:  # slack: sums in another order
        raise PlanError("its bound is above its time")
    reserved_bytes = budget.reserved_bytes(graph, kept.schedule)
    return msgspec.structs.replace(result, reserved_bytes=reserved_bytes)


def _suits(found: Result, budget: Budget, graph: TrainingGraph) -> bool:
    if budget.kind == "min":  # the least peak answers the same question
        return True
    now_bytes = budget.bytes_for(graph)
    if budget.kind != "auto":
        return found.budget_bytes == now_bytes
    is_enough = found.overhead <= _CHEAP or found.budget_bytes >= _NEAR * now_bytes
    return max(found.peak_bytes, found.reserved_bytes) <= now_bytes and is_enough


def _question_key(graph: TrainingGraph, budget: Budget, asked: str) -> str:
    """SHA-256 of all that a plan depends on; empty where that has no lasting text."""
    if ADDRESS in asked or not keeps_solves():
        return ""
    digest = hashlib.sha256(msgspec.json.encode(without_lines(graph)))
    around = (
        repr((budget, budget.settings(graph))),
        asked,
        str(torch.version.git_version),
        sources_key(),
    )
    digest.update(msgspec.json.encode(around))
    return digest.hexdigest()


def without_lines(graph: TrainingGraph) -> TrainingGraph:
    """Without the lines of the user's files, which move while the step stays the same."""
    ops = (msgspec.structs.replace(op, source="") for op in graph.ops)
    return msgspec.structs.replace(graph, ops=tuple(ops))


def file_of(key: str) -> str:
    return f"{key[:32]}.json"
