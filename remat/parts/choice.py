"""Which modules run again: the step as a coarse graph, and the choice that costs least.

An op of the graph is what a step does between two moments that were watched. What a module saves
is a value, made by an op of the module's own that may run again; all else that is live is in values
that no schedule changes. A module that runs again does so right before backward comes to it. Which
do is found by an integer program, whose bound is that of all such choices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from msgspec.structs import replace
from ortools.sat.python import cp_model  # pyright: ignore[reportMissingTypeStubs]

from remat.graph_capture.devices.memory_events import Moment
from remat.graph_capture.graph import Op, Phase, Resident, TrainingGraph, Value
from remat.graph_capture.joint.build import rng_state_bytes
from remat.parts.watched import BACKWARD, CallKey, ModuleCall, WatchedStep
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.solver.problem import Problem
from remat.solver.result import evaluate_schedule
from remat.solver.state import schedule_of
from remat.solver.stopping import DEFAULT_GAP

_LEAST_SHARE = 1e-3  # of what forward saves: a module that saves less is left alone
_EFFORT = 5.0  # of the integer program, in CP-SAT's deterministic time
_cp = cast(Any, cp_model)
_RUN = "remat.module"  # the target of ops that run a module
_NS = 1000  # in a us: the program counts in whole numbers


@dataclass
class _RerunCall:
    """A call of a module that may run again; `begins`, `ends` and `back` are moments' numbers."""

    call: ModuleCall
    saved_bytes: int  # what is freed if it runs again
    rise_bytes: int  # the most that a run takes beyond what was live, and `saved_bytes`
    begins: int
    ends: int
    back: int  # when backward comes to it
    own_bytes: int = 0  # without parts within
    own_us: float = 0.0
    # Itself, and parts in it, in the order of calls.
    within: list[CallKey] = field(default_factory=list[CallKey])

    @property
    def path(self) -> str:
        return self.call.key[0]

    @property
    def name(self) -> str:
        return "{} {}".format(*self.call.key)

    @property
    def saved(self) -> str:
        return f"saved by {self.name}"

    @property
    def ended(self) -> str:
        return f"end of {self.name}"


def _saved_in_forward(watched: WatchedStep) -> int:
    return next(one.live_bytes for one in watched.moments if one.name == BACKWARD)


def parts_of(watched: WatchedStep, device: str) -> dict[CallKey, _RerunCall]:
    """By key, in the order of calls. Of a module all calls in a step are parts, or none."""
    stream_bytes = rng_state_bytes(torch.device(device))  # which a call that runs again keeps
    least_bytes = _LEAST_SHARE * _saved_in_forward(watched)
    at = {moment.name: i for i, moment in enumerate(watched.moments)}
    found: dict[CallKey, _RerunCall] = {}
    refused = set[str]()
    for key, call in watched.calls.items():
        if at.get(call.moment("in"), 0) > at[BACKWARD]:
            continue  # in backward, by a checkpoint of the user's own
        part = None if call.why_not else _part(call, watched, at, stream_bytes)
        if part is None or part.saved_bytes < least_bytes:
            refused.add(key[0])
        else:
            found[key] = part
    found = {key: part for key, part in found.items() if key[0] not in refused}
    _condense(watched, found.values())
    for key, part in reversed([*found.items()]):  # from the inside out
        inside = list(_directly_within(key, found, watched.calls))
        if any(found[one].back <= part.back for one in inside):
            del found[key]  # backward comes to what is in it by another way
            continue
        part.own_bytes, part.own_us = part.saved_bytes, part.call.us
        for inner in inside:
            part.within += found[inner].within
            part.own_us -= found[inner].call.us
        part.own_bytes = max(0, part.own_bytes - sum(found[one].own_bytes for one in part.within))
        part.own_us = max(0.0, part.own_us)
        part.within.insert(0, key)
    return found


def _condense(watched: WatchedStep, parts: Collection[_RerunCall]) -> None:
    """Leave only the moments of parts, each with the most since the one before."""
    kept = {BACKWARD, watched.moments[-1].name}
    kept |= {part.call.moment(which) for part in parts for which in ("in", "out", "back")}
    moments, most_bytes = list[Moment](), 0
    for one in watched.moments:
        most_bytes = max(most_bytes, one.peak_bytes)
        if one.name in kept:
            moments.append(one._replace(peak_bytes=most_bytes))
            most_bytes = 0
    watched.moments = moments
    at = {moment.name: i for i, moment in enumerate(moments)}
    for part in parts:
        names = (part.call.moment(which) for which in ("in", "out", "back"))
        part.begins, part.ends, part.back = (at[name] for name in names)


def _part(
    call: ModuleCall, watched: WatchedStep, at: Mapping[str, int], stream_bytes: int
) -> _RerunCall | None:
    names = [call.moment(which) for which in ("in", "out", "back")]
    if any(name not in at for name in names):
        return None
    begins, ends, back = (at[name] for name in names)
    live_bytes = watched.moments[begins].live_bytes
    saved_bytes = watched.moments[ends].live_bytes - live_bytes - call.results_bytes
    saved_bytes -= stream_bytes + call.held_bytes
    most_bytes = max(one.peak_bytes for one in watched.moments[begins + 1 : ends + 1])
    rise_bytes = max(0, most_bytes - live_bytes - saved_bytes) + stream_bytes
    return _RerunCall(call, saved_bytes, rise_bytes, begins, ends, back) if back > ends else None


def _directly_within(
    key: CallKey, parts: Collection[CallKey], calls: Mapping[CallKey, ModuleCall]
) -> Iterator[CallKey]:
    for one in parts:
        around = calls[one].inside
        while around is not None and around not in parts:
            around = calls[around].inside
        if around == key:
            yield one


@dataclass
class Choices:
    """The step, and the parts of it that may run again."""

    watched: WatchedStep
    parts: dict[CallKey, _RerunCall]
    title: str
    device: str
    resident: Resident

    @cached_property
    def background(self) -> list[int]:
        """By moment: bytes live beside what parts save."""
        of_parts = [0] * len(self.watched.moments)
        for part in self.parts.values():
            for i in range(part.ends, part.back + 1):
                of_parts[i] += part.own_bytes
        pairs = zip(self.watched.moments, of_parts, strict=True)
        return [max(0, moment.live_bytes - saved) for moment, saved in pairs]

    @cached_property
    def graph(self) -> TrainingGraph:
        moments, ops, values = self.watched.moments, list[Op](), list[Value]()
        begin, end, back = ({i: list[_RerunCall]() for i in range(len(moments))} for _ in range(3))
        for part in self.parts.values():
            begin[part.begins + 1].append(part)
            end[part.ends].append(part)
            back[part.back + 1].append(part)
        phase: Phase = "forward"
        for i, moment in enumerate(moments):
            # The first time, what is live within a call is in the background.
            ops += (_end_of(part) for part in begin[i])
            read = [_others(moments[i - 1])] if i else []
            read += [name for part in back[i] for name in (part.saved, part.ended)]
            ops.append(_between(moment.name, phase, read, [], self.workspace_bytes(i)))
            # What backward has left of what a part saved is background once the part's is let go.
            ops.append(_between(f"{moment.name} left", phase, [], [_others(moment)], 0))
            values.append(Value(_others(moment), self.background[i], ops[-1].name))
            for part in end[i]:
                made = (part.saved,)
                ops.append(Op(part.name, _RUN, "forward", (), made, part.own_us, module=part.path))
                values.append(Value(part.saved, part.own_bytes, part.name))
                # Of no bytes: as the op makes something, it can run again.
                values.append(Value(part.ended, 0, _end_of(part).name))
            phase = "backward" if moment.name == BACKWARD else phase
        of_parts_us = sum(part.own_us for part in self.parts.values())
        ops[-1] = replace(ops[-1], cost_us=max(0.0, self.watched.step_us - of_parts_us))
        return TrainingGraph(
            name=self.title, ops=tuple(ops), values=tuple(values), forward_outputs=(), outputs=(),
            resident=self.resident, inputs=(), device=self.device, cost_origin="measured",
        )  # fmt: skip

    def workspace_bytes(self, i: int) -> int:
        moments, beside = self.watched.moments, self.background
        parts = self.parts.values()
        saved_bytes = sum(p.own_bytes for p in parts if p.ends < i <= p.back + 1)
        return max(0, moments[i].peak_bytes - saved_bytes - (beside[i - 1] if i else 0))

    def _run(self, part: _RerunCall) -> Iterator[str]:
        """The ops of a run of a part, each part within ending as the next begins."""
        opened = list[_RerunCall]()
        for one in (self.parts[key] for key in part.within):
            while opened and opened[-1].ends < one.begins:
                yield _end_of(opened.pop()).name
            yield one.name
            opened.append(one)
        yield from (_end_of(one).name for one in reversed(opened))

    def schedule(self, again: Collection[str]) -> Schedule:
        """The schedule in which modules at these paths run again."""
        graph, back = self.graph, dict[str, list[int]]()
        for part in self.parts.values():
            if part.path in again:
                name = self.watched.moments[part.back + 1].name
                back.setdefault(name, []).extend(map(graph.op_index.__getitem__, self._run(part)))
        order = list[int]()
        for i, op in enumerate(graph.ops):
            order += [*back.get(op.name, ()), i]
        return schedule_of(Problem.of(graph), order, solver="parts")

    @property
    def share(self) -> float:
        """Of what forward saves, that of modules that may run again."""
        inner = {key for part in self.parts.values() for key in part.within[1:]}
        outer_bytes = sum(p.saved_bytes for key, p in self.parts.items() if key not in inner)
        return outer_bytes / max(1, _saved_in_forward(self.watched))

    def within(self, budget_bytes: int) -> tuple[Result, set[str]]:
        """The cheapest choice that keeps to the budget, or the one of the least peak; with the
        paths of the modules that run again."""
        program, room_bytes = _Program(self), budget_bytes - self.resident.total_bytes
        while True:
            found = program.cheapest(room_bytes)
            again, bound_us = found or (program.least(), 0.0)
            result = evaluate_schedule(
                self.graph, replace(self.schedule(again), budget_bytes=budget_bytes),
                budget_bytes=budget_bytes, lower_bound_us=self.graph.time_us + bound_us,
            )  # fmt: skip
            if found is None or result.schedule is not None:
                return result, again
            room_bytes -= result.least_feasible_bytes - budget_bytes  # the simulator has the word

    def least(self) -> tuple[Result, set[str]]:
        """The cheapest of the choices of the lowest peak."""
        return self.within(self.within(0)[0].least_feasible_bytes)


def _others(moment: Moment) -> str:
    return f"other tensors at {moment.name}"


def _between(name: str, phase: Phase, reads: list[str], makes: list[str], work_bytes: int) -> Op:
    return Op(
        name, "remat.between", phase, tuple(reads), tuple(makes),
        workspace_bytes=work_bytes, no_recompute="eager runs it",
    )  # fmt: skip


def _end_of(part: _RerunCall) -> Op:
    # The most that a run takes is there as it ends, with all that it saves.
    return Op(
        f"{part.name} ends", _RUN, "forward", (), (part.ended,),
        workspace_bytes=part.rise_bytes, module=part.path,
    )  # fmt: skip


@dataclass(frozen=True)
class _Row:
    """What is live at one time if nothing runs again. Calls to which backward comes at moment
    `until` or later, and that run again, have not by then. `running` is there in any case."""

    until: int
    beside_bytes: int
    saved: tuple[CallKey, ...]
    running: CallKey | None = None
    only_if: str = ""  # it is so only if the module at this path runs again


class _Program:
    """A variable for each module: whether its calls run again. One that does so within another
    that does runs three times, and what it saves is never there beside what the other saves."""

    def __init__(self, choices: Choices) -> None:
        self._parts, self._beside = choices.parts, choices.background
        self._step_us = choices.watched.step_us
        # Of each call, itself included.
        self._around = {key: list[CallKey]() for key in self._parts}
        for key, part in self._parts.items():
            for inner in part.within:
                self._around[inner].append(key)
        self._rows = [*self._rows_between(choices), *self._rows_of_runs()]

    def _rows_between(self, choices: Choices) -> Iterator[_Row]:
        for i in range(len(choices.watched.moments)):
            saved = tuple(k for k, p in self._parts.items() if p.ends < i <= p.back + 1)
            before_bytes = self._beside[i - 1] if i else 0
            yield _Row(i, before_bytes + choices.workspace_bytes(i), saved)
            saved = tuple(k for k, p in self._parts.items() if p.ends <= i <= p.back)
            yield _Row(i, self._beside[i], saved)
        for key, part in self._parts.items():  # as it ends, what it has saved is still there
            saved = tuple(k for k, p in self._parts.items() if p.ends <= part.ends <= p.back)
            yield _Row(part.ends, self._beside[part.ends], saved, key)

    def _rows_of_runs(self) -> Iterator[_Row]:
        """One for each run of a call, by itself and within another that runs again."""
        for key, part in self._parts.items():
            for around in self._around[key]:
                back, path = self._parts[around].back, self._parts[around].path
                saved = tuple(k for k, p in self._parts.items() if p.ends < back <= p.back)
                yield _Row(back + 1, self._beside[back] + part.rise_bytes, saved, key, path)

    def cheapest(self, room_bytes: int) -> tuple[set[str], float] | None:
        """The modules that run again, and a bound on the time that takes; None if none fits."""
        model = _cp.CpModel()
        again, ns = self._variables(model), Counter[str]()
        for part in self._parts.values():
            ns[part.path] += round(_NS * sum(self._parts[one].own_us for one in part.within))
        self._keep_to(room_bytes, model, again)
        model.minimize(sum(ns[path] * one for path, one in again.items()))
        return _optimum(model, again, DEFAULT_GAP * _NS * self._step_us)

    def least(self) -> set[str]:
        """The modules that run again for the lowest peak."""
        model = _cp.CpModel()
        again = self._variables(model)
        room_bytes = model.new_int_var(0, max(map(self._most_bytes, self._rows)), "peak")
        self._keep_to(room_bytes, model, again)
        model.minimize(room_bytes)
        found = _optimum(model, again, 0.0)
        assert found is not None, "nothing need run again"
        return found[0]

    def _variables(self, model: Any) -> dict[str, Any]:
        paths = dict.fromkeys(part.path for part in self._parts.values())
        return {path: model.new_bool_var(path) for path in paths}

    def _most_bytes(self, row: _Row) -> int:
        return row.beside_bytes + sum(self._parts[key].own_bytes for key in row.saved)

    def _keep_to(self, room_bytes: Any, model: Any, again: Mapping[str, Any]) -> None:
        one_of = dict[tuple[str, ...], Any]()  # by paths: whether a module at one of them does

        def is_freed(paths: tuple[str, ...]) -> Any:
            if len(paths) < 2:
                return again[paths[0]] if paths else 0
            if paths not in one_of:
                one_of[paths] = model.new_bool_var(" or ".join(paths))
                model.add(one_of[paths] <= sum(again[path] for path in paths))
            return one_of[paths]

        for row in self._rows:
            most_bytes = self._most_bytes(row)
            if isinstance(room_bytes, int) and most_bytes <= room_bytes:
                continue
            freed = sum(
                self._parts[key].own_bytes * is_freed(self._waiting(key, row.until))
                for key in row.saved
                if key != row.running
            )
            kept = model.add(most_bytes - freed <= room_bytes)
            if row.only_if:
                kept.only_enforce_if(again[row.only_if])

    def _waiting(self, key: CallKey, until: int) -> tuple[str, ...]:
        around = (self._parts[one] for one in self._around[key])
        return tuple(dict.fromkeys(part.path for part in around if part.back >= until))


def _optimum(model: Any, again: Mapping[str, Any], enough: float) -> tuple[set[str], float] | None:
    solver = _cp.CpSolver()
    solver.parameters.num_workers = 1  # several would race, and a seed not fix the outcome
    solver.parameters.max_deterministic_time = _EFFORT
    solver.parameters.linearization_level = 2
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.absolute_gap_limit = enough
    solver.parameters.catch_sigint_signal = False  # Ctrl-C is Python's to hear
    if solver.solve(model) not in (_cp.OPTIMAL, _cp.FEASIBLE):
        return None
    chosen = {path for path, one in again.items() if solver.boolean_value(one)}
    return chosen, solver.best_objective_bound / _NS
