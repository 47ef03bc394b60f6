"""One budget for all subgraphs of a step: which plan each takes.

`fastest` is exact for known plans. In a round, every subgraph may save a share of what it saves as
torch compiles it. The share is halved and doubled, then `fastest` mixes the rounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from remat.compile.graph_context import CompileOptions
from remat.compile.plan_search import CHEAP, Candidate, PlanSearch, PlanWithCode, fastest_within
from remat.compile.subgraphs import Subgraph, Whole
from remat.graph_capture.graph import TANGENTS, TrainingGraph
from remat.schedules.schedule import Schedule

_TRIES = 3  # targets a share: the first's code may take some per cent more
_SHARES = (0.0, 1.0, 0.5, 0.75, 0.25)  # as long as it helps: what fits comes first
_LOWER = 0.99  # a lower room must lower the last by more than this factor
_BETWEEN = 2  # index of the first share that is no end
_MOST_STATES = 400  # of the table, a subgraph


class SubgraphOption(NamedTuple):
    """A plan of one subgraph; `candidate` is None where it has no gradients."""

    candidate: Candidate | None
    peak_bytes: int  # while it runs, with gradients, beside the model's inputs
    left_bytes: int  # from its forward to its backward, beside those inputs
    extra_us: float = 0.0


class _State(NamedTuple):
    left_bytes: int
    peak_bytes: int
    extra_us: float
    options: tuple[SubgraphOption, ...]


def fastest(
    options: Sequence[Sequence[SubgraphOption]], room_bytes: int, other_calls: int = 0
) -> tuple[SubgraphOption, ...] | None:
    """The fastest options that fit; `other_calls` more leave as much before the first backward."""
    states = [_State(0, 0, 0.0, ())]
    for of_subgraph in options:
        states = _pruned(
            state
            for before in states
            for option in of_subgraph
            for state in (_with(before, option),)
            # Neither falls as subgraphs are added, so what is over the room stays so.
            if state.peak_bytes + other_calls * state.left_bytes <= room_bytes
        )
    return min(states, key=lambda state: state.extra_us).options if states else None


def peak_of(chosen: Sequence[SubgraphOption], other_calls: int = 0) -> int:
    state = _State(0, 0, 0.0, ())
    for option in chosen:
        state = _with(state, option)
    return state.peak_bytes + other_calls * state.left_bytes


def least_room(options: Sequence[Sequence[SubgraphOption]], other_calls: int = 0) -> int:
    most = peak_of([of_subgraph[0] for of_subgraph in options], other_calls)
    rooms = range(most)  # where nothing less does, the most
    return bisect_left(rooms, True, key=lambda one: fastest(options, one, other_calls) is not None)


def _with(before: _State, option: SubgraphOption) -> _State:
    return _State(
        before.left_bytes + option.left_bytes,
        # While it runs, forward or backward, what those before it have saved is live.
        max(before.peak_bytes, before.left_bytes + option.peak_bytes),
        before.extra_us + option.extra_us,
        (*before.options, option),
    )


def _pruned(states: Iterable[_State]) -> list[_State]:
    kept: list[_State] = []
    for state in sorted(states, key=lambda s: (s.extra_us, s.left_bytes, s.peak_bytes)):
        left, peak = state.left_bytes, state.peak_bytes  # sorted by time
        if not any(one.left_bytes <= left and one.peak_bytes <= peak for one in kept):
            kept.append(state)
    if len(kept) <= _MOST_STATES:
        return kept
    kept.sort(key=lambda s: s.left_bytes)  # the ends stay: fastest, and least left
    step = (len(kept) - 1) / (_MOST_STATES - 1)
    return [kept[round(i * step)] for i in range(_MOST_STATES)]


class SubgraphSearch:
    """`options` are the known ones of each subgraph, the first of them torch's own."""

    def __init__(self, whole: Whole, asked: CompileOptions) -> None:
        self.whole, self.asked = whole, asked
        steps = [subgraph.step for subgraph in whole.subgraphs]
        self.searches = [None if step is None else PlanSearch(step, asked) for step in steps]
        pairs = zip(whole.subgraphs, self.searches, strict=True)
        self.stock = [option_of(subgraph, one and one.stock()) for subgraph, one in pairs]
        self.options = [[option] for option in self.stock]
        self._barred = [search and not search.may_take_stock for search in self.searches]

    def followed(
        self, chosen: Iterable[tuple[Schedule | None, float | None]]
    ) -> tuple[SubgraphOption, ...]:
        found = zip(self.whole.subgraphs, self.searches, chosen, strict=True)
        return tuple(option_of(subgraph, one and one.of(*taken)) for subgraph, one, taken in found)

    @property
    def stock_peak_bytes(self) -> int:
        return peak_of(self.stock, self.asked.calls - 1)

    def within(self, room_bytes: int) -> tuple[SubgraphOption, ...] | None:
        best = fastest(self._allowed(), room_bytes, self.asked.calls - 1)
        if best and _extra_us(best) <= CHEAP * self._time_us and not any(self._barred):
            return best
        for turn, share in enumerate(_SHARES):
            self._plan(share, room_bytes)
            found = fastest(self._allowed(), room_bytes, self.asked.calls - 1)
            gain_us = _extra_us(best) - _extra_us(found) if best and found else None
            best = found or best
            if best and _extra_us(best) <= CHEAP * self._time_us:
                break
            # The two ends alone say little of what lies between.
            if turn < _BETWEEN or best is None or gain_us is None:
                continue
            if gain_us <= CHEAP * max(1.0, _extra_us(best)):
                break
        return best

    def least(self) -> tuple[SubgraphOption, ...]:
        room_bytes = peak_of(self.stock, self.asked.calls - 1)
        for _ in range(self.asked.replays):
            self._plan(0.0, room_bytes)  # with less room single plans would save more
            least_bytes = self.least_room_bytes()
            if least_bytes > _LOWER * room_bytes:
                break
            room_bytes = least_bytes
        self._plan(0.0, 0)
        room_bytes = self.least_room_bytes()
        found = fastest(self._allowed(), room_bytes, self.asked.calls - 1)
        assert found is not None
        return found

    def least_room_bytes(self) -> int:
        return least_room(self._allowed(), self.asked.calls - 1)

    @property
    def tried(self) -> int:
        return sum(map(self.replays_of, range(len(self.searches))))

    def replays_of(self, k: int) -> int:
        search = self.searches[k]
        return 0 if search is None else 1 + len(search.tried)  # one more: torch's own cut

    @property
    def _time_us(self) -> float:
        steps = [subgraph.step for subgraph in self.whole.subgraphs]
        return sum(step.graph.time_us for step in steps if step is not None)

    def _allowed(self) -> list[list[SubgraphOption]]:
        # torch's own cut ignores the user's pins, so it is the last resort.
        pairs = zip(self.options, self._barred, strict=True)
        return [options[1:] if barred and options[1:] else options for options, barred in pairs]

    def _plan(self, share: float, room_bytes: int) -> None:
        before_bytes = 0
        for k, (subgraph, stock) in enumerate(zip(self.whole.subgraphs, self.stock, strict=True)):
            saved_bytes = stock.left_bytes - subgraph.outputs_bytes
            limit_bytes = max(0, room_bytes - before_bytes)
            fits = stock.peak_bytes <= limit_bytes and share == 1.0 and not self._barred[k]
            if not fits:
                self._add(k, limit_bytes, int(share * saved_bytes))
            before_bytes += int(share * saved_bytes) + subgraph.outputs_bytes

    def _add(self, k: int, limit_bytes: int, saved_bytes: int) -> None:
        search, subgraph = self.searches[k], self.whole.subgraphs[k]
        if search is None or len(search.tried) >= self.asked.replays:
            return

        def generated(target_bytes: int) -> PlanWithCode[Candidate] | None:
            graph = with_neighbours(search.step.graph, subgraph, target_bytes, saved_bytes)
            if (found := search.solved(target_bytes, graph) or search.solved(0, graph)) is None:
                return None
            peak = option_of(subgraph, found).peak_bytes  # with the gradients beside it
            own = found.schedule_peak_bytes
            return PlanWithCode(found, own, peak, found.time_us, found.is_least)

        fastest_within(limit_bytes, generated, tries=_TRIES, is_enough=lambda _: True)
        known = {id(option.candidate) for option in self.options[k]}  # targets may share one
        new = [found for found in search.tried.values() if id(found) not in known]
        self.options[k] += [option_of(subgraph, found) for found in new]


def with_neighbours(
    graph: TrainingGraph, subgraph: Subgraph, target_bytes: int, saved_bytes: int
) -> TrainingGraph:
    """`graph` with what is beside it in backward, and a limit on what it saves."""
    opening = next(op for op in graph.ops if op.target == TANGENTS)
    sizes = {value.name: value.size_bytes for value in graph.values}
    arriving_bytes = sum(sizes[name] for name in opening.outputs)
    spare_bytes = target_bytes - saved_bytes - subgraph.outputs_bytes - subgraph.beside_bytes
    # Solvers bound the peak, not what is saved: a workspace where backward opens takes that room.
    unsaved_bytes = max(0, spare_bytes - arriving_bytes)
    opened = msgspec.structs.replace(opening, workspace_bytes=unsaved_bytes)
    ops = tuple(opened if op is opening else op for op in graph.ops)
    values = list(graph.values)
    for i, value in enumerate(values):  # others' gradients live as long as the first tangent
        if value.name in opening.outputs[:1]:
            size_bytes = value.size_bytes + subgraph.beside_bytes
            values[i] = msgspec.structs.replace(value, size_bytes=size_bytes)
    return msgspec.structs.replace(graph, ops=ops, values=tuple(values))


def option_of(subgraph: Subgraph, found: Candidate | None) -> SubgraphOption:
    """None stands for a subgraph without gradients."""
    if found is None:
        return SubgraphOption(None, subgraph.outputs_bytes, subgraph.outputs_bytes)
    replay, step = found.replay, subgraph.step
    assert step is not None
    backward_bytes = replay.backward_peak_bytes + subgraph.beside_bytes
    peak_bytes = max(replay.forward_peak_bytes, backward_bytes, subgraph.after_bytes)
    extra_us = found.time_us - step.graph.time_us if found.schedule else 0.0
    return SubgraphOption(found, peak_bytes, replay.saved_bytes + subgraph.outputs_bytes, extra_us)


def _extra_us(chosen: tuple[SubgraphOption, ...]) -> float:
    return sum(option.extra_us for option in chosen)
