"""A training graph as a chain of stages, each with its times and bytes.

A stage is what forward computes between two articulation points (`places`), with the
backward ops that read it. Its times and bytes are a model. The model counts backward values
exactly. It counts kept values as if all lived throughout, and the value that enters a stage as
if it lived to the end of the stage. So the model asks for more memory than a schedule needs,
and `simulate` judges each schedule that a solver makes.

Terms follow O. Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory", 2019, https://arxiv.org/abs/1911.13214.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.solver.local_search.repair import offer_filled
from remat.solver.problem import Problem, bytes_across
from remat.solver.search import MANY_OPS, Search
from remat.solver.segments import chen_sqrt
from remat.solver.state import schedule_of, state_of, store_all_state

_Kind = Literal["store", "forward", "save", "backward", "discard"]


class ChainRun(NamedTuple):
    """Forward ops of a stage, run in order; `peak_bytes` leaves out the value that enters it."""

    ops: tuple[int, ...]
    cost_us: float
    peak_bytes: int


class StageRuns(NamedTuple):
    """`drop` keeps the result alone, `save` also what backward reads, `leaf` the latter alone."""

    drop: ChainRun
    save: ChainRun
    leaf: ChainRun


class ChainStage(NamedTuple):
    entry: int  # the value that enters it, -1 if none does
    entry_bytes: int
    saved_bytes: int  # all that its backward reads of it, and its result (rotor's ``abar``)
    pending_bytes: int  # backward values live when its backward begins
    first: StageRuns
    again: StageRuns
    backward: tuple[int, ...]
    backward_us: float
    # The most live in its ops, with saved values and without the value that enters.
    backward_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages in forward order, none if the graph is no chain: `why_not` says so in words."""

    stages: tuple[ChainStage, ...]
    base_bytes: int  # resident, or kept throughout
    why_not: str = ""


def find_chain(problem: Problem, most_stages: int = 0) -> Chain:
    kept = chen_sqrt.kept_values(problem)
    kept_bytes = sum(size for size, stays in zip(problem.size_bytes, kept, strict=True) if stays)
    base_bytes = problem.resident_bytes + kept_bytes
    places = chen_sqrt.articulation_points(problem, kept)
    if not places:
        return Chain((), base_bytes, _no_place(problem))
    if most_stages:
        places = chen_sqrt.coarsened(problem, places, most_stages)
    split = chen_sqrt.split_by_backward(problem, kept, places)
    if not split.places:
        why_not = "the graph is not a chain: backward ops do not split by stages of forward"
        return Chain((), base_bytes, why_not)
    return Chain(_Model(problem, kept, split).stages(), base_bytes)


def _no_place(problem: Problem) -> str:
    if not problem.n_forward:
        return "the graph is not a chain: it has no forward ops"
    first, last = problem.graph.ops[0].name, problem.graph.ops[problem.n_forward - 1].name
    place = f"the forward graph has no articulation point between {first} and {last}"
    return f"the graph is not a chain: {place}"


@dataclass(frozen=True, slots=True)
class _Model:
    problem: Problem
    kept: bytearray
    split: chen_sqrt.StageSplit

    def stages(self) -> tuple[ChainStage, ...]:
        places, starts = self.split
        # Nothing enters the first stage, and nothing leaves the last one.
        ends = [*(place.end + 1 for place in places), self.problem.n_forward]
        entries = [-1, *(place.entry for place in places), -1]
        stops = [self.problem.n_ops, *starts]
        backward = range(self.problem.n_forward, self.problem.n_ops)
        waiting_bytes = bytes_across(self.problem, self.problem.last_need, backward)
        return tuple(
            self._stage(
                range(ends[i - 1] if i else 0, end),
                (entries[i], entries[i + 1]),
                (range(starts[i], stops[i]), range(stops[i], stops[i - 1] if i else 0)),
                waiting_bytes,
            )
            for i, end in enumerate(ends)
        )

    def _stage(
        self, forward: range, ports: tuple[int, int], backwards: tuple[range, range],
        waiting_bytes: Sequence[int],
    ) -> ChainStage:  # fmt: skip
        """The stage of ops `forward`; `backwards` are its own and those of the stage before."""
        problem, (backward, before) = self.problem, backwards
        last_read = {v: op for op in backward for v in problem.inputs[op]}
        saved = [v for v in last_read if problem.producer[v] in forward and not self.kept[v]]
        result = [ports[1]] if ports[1] >= 0 else []
        both = list(dict.fromkeys((*saved, *result)))
        first, size_bytes = tuple(forward), problem.size_bytes
        entry_bytes = size_bytes[ports[0]] if ports[0] >= 0 else 0
        # If the backward of the stage before reads the entry too, it outlives this stage.
        is_lasting = any(ports[0] in problem.inputs[op] for op in before)
        last_entry = problem.n_ops if is_lasting else last_read.get(ports[0], -1)
        # The entry is counted elsewhere, up to the end of the stage: subtract it once it is dead.
        peak_bytes = (
            waiting_bytes[op]
            + problem.own_bytes[op]
            + sum(size_bytes[v] for v in saved if last_read[v] >= op)
            - (entry_bytes if last_entry < op else 0)
            for op in backward
        )
        save = self._run(first, both, is_first=True)
        again = (self._run(self._makers(forward, kept), kept) for kept in (result, both, saved))
        return ChainStage(
            ports[0], entry_bytes, sum(size_bytes[v] for v in both), waiting_bytes[backward.start],
            StageRuns(self._run(first, result, is_first=True), save, save), StageRuns(*again),
            tuple(backward), sum(problem.cost_us[op] for op in backward),
            max(peak_bytes, default=0),
        )  # fmt: skip

    def _makers(self, forward: range, wanted: Iterable[int]) -> tuple[int, ...]:
        missing, found = set(wanted), list[int]()
        for op in reversed(forward):
            if not missing.isdisjoint(self.problem.outputs[op]):
                found.append(op)
                reads = self.problem.inputs[op]
                # Kept values need not be made again.
                missing.update(v for v in reads if not self.kept[v])
        return tuple(reversed(found))

    def _run(self, ops: tuple[int, ...], wanted: list[int], *, is_first: bool = False) -> ChainRun:
        problem, kept = self.problem, self.kept
        last = {v: op for op in ops for v in (*problem.outputs[op], *problem.inputs[op])}
        last.update(dict.fromkeys(wanted, problem.n_ops))  # never freed
        live, now, peak_bytes = set[int](), 0, 0
        for op in ops:
            made = [v for v in problem.outputs[op] if not kept[v]]
            # Kept values are in `base_bytes`, but a second run makes second copies of them.
            here = made if is_first else problem.outputs[op]
            running = sum(problem.size_bytes[v] for v in here) + problem.workspace_bytes[op]
            peak_bytes = max(peak_bytes, now + running)
            live.update(made)
            now += sum(problem.size_bytes[v] for v in made)
            for v in dict.fromkeys((*made, *problem.inputs[op])):
                if last[v] == op and v in live:
                    live.discard(v)
                    now -= problem.size_bytes[v]
        return ChainRun(ops, sum(problem.cost_us[op] for op in ops), peak_bytes)


class ChainAction(NamedTuple):
    """``forward`` runs a stage and keeps its result alone, ``save`` keeps what backward reads too.

    ``backward`` runs the stage's backward ops. ``store`` puts the value that enters the stage into
    a slot, ``discard`` empties the slot.
    """

    kind: _Kind
    stage: int


def ops_of_actions(chain: Chain, actions: Sequence[ChainAction]) -> list[tuple[int, ...]]:
    following = (*actions[1:], None)
    reached, runs = 0, list[tuple[int, ...]]()
    for (kind, i), after in zip(actions, following, strict=True):
        if kind in ("store", "discard"):
            runs.append(())
        elif kind == "backward":
            runs.append(chain.stages[i].backward)
        # First runs are whole stages; later ones only make what is asked for.
        elif i == reached:
            runs.append(chain.stages[i].first.save.ops)
            reached += 1
        elif kind == "forward":
            runs.append(chain.stages[i].again.drop.ops)
        else:
            # The backward of a leaf follows at once, so its result need not be made.
            is_leaf, again = after == ChainAction("backward", i), chain.stages[i].again
            runs.append((again.leaf if is_leaf else again.save).ops)
    return runs


_NEIGHBOURS = 3
"""Choices tried above the greatest that fits, since a peak may fall from one to the next."""
_FEW = 10000  # all choices are tried if choices times ops are at most this many; else bisection
_FILLED = 3
"""How many of the fastest schedules are filled, beside the slowest, which leaves most room."""


def solve_on_chain(
    search: Search, most_stages: int, solve: Callable[[Search, Chain], object]
) -> Result:
    """What `solve` finds on the chain of the graph, if it is one and keeping all does not fit."""
    with search.until_interrupted():
        if not search.offer_least(store_all_state(search.problem)):
            search.say("looking for a chain of stages")
            chain = find_chain(search.problem, most_stages)
            if chain.stages:
                solve(search, chain)
            else:
                search.message = chain.why_not
    return search.result()


_Change = Callable[[Schedule, Sequence[ChainAction]], Schedule]


class ChainSearch:
    """Tries chain schedules in one search; `change`, if any, makes of each the one to be judged."""

    def __init__(self, search: Search, chain: Chain, change: _Change | None = None) -> None:
        self.search, self.chain, self.change = search, chain, change
        self.found: dict[tuple[int, ...], float] = {}

    def fits(self, actions: Sequence[ChainAction]) -> bool:
        search = self.search
        sequence = tuple(op for run in ops_of_actions(self.chain, actions) for op in run)
        made = schedule_of(search.problem, sequence)
        if self.change is not None:
            made = self.change(made, actions)
        found = simulate(search.graph, made)
        if not search.offer_evaluated(made, found, or_least=True):
            return False
        # `fill_best` starts from these.
        self.found[sequence] = found.time_us
        return True

    def try_rising(self, actions_of: Callable[[int], Sequence[ChainAction]], count: int) -> None:
        """Find the greatest choice below `count` that fits; it takes most memory and least time."""
        # If there are few, try all: the peak need not rise from one to the next.
        if count * self.search.problem.n_ops <= _FEW:
            self._try_each(actions_of, range(count))
            return
        low, high = 1, count - 1 if self.fits(actions_of(0)) else 0
        while low <= high and not self.search.out_of_time():
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.fits(actions_of(middle)) else (low, middle - 1)
        self._try_each(actions_of, range(low, min(low + _NEIGHBOURS, count)))

    def _try_each(self, actions_of: Callable[[int], Sequence[ChainAction]], choices: range) -> None:
        for choice in choices:
            if self.search.out_of_time():
                return
            self.fits(actions_of(choice))

    def fill_best(self, many_ops: int = MANY_OPS) -> None:
        search = self.search
        search.say("carrying values that still fit")
        ranked = sorted(self.found, key=lambda sequence: self.found[sequence])
        chosen = [*ranked[:_FILLED], *ranked[_FILLED:][-1:]]
        # Where a fill takes seconds the fastest schedule alone is filled.
        for sequence in chosen[:1] if search.problem.n_ops > many_ops else chosen:
            if search.out_of_time():
                return
            offer_filled(search, state_of(search.problem, sequence))
