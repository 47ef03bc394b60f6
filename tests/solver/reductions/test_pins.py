"""Pins: kept ops run once, recomputed values do not cross, bounds hold, errors help."""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Collection

import msgspec
import pytest

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Free, Schedule
from remat.schedules.simulate import simulate
from remat.schedules.value_report.globs import Pins
from remat.solver import Result, solve_within
from remat.solver.problem import Problem
from remat.solver.reductions.pins import CLONE, kept_graph, with_clones
from tests.graphs import with_modules
from tests.limits import AMPLE_S
from tests.rows import rows
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.random_graphs import LARGE_BYTES, branches, chain, gpt_like, random_graph

UNLIMITED_BYTES = 1 << 60


@functools.cache
def gpt() -> TrainingGraph:
    return with_modules(gpt_like(1), 3)


def peak_bytes(graph: TrainingGraph) -> int:
    return solve_within(graph, UNLIMITED_BYTES, "store_all").peak_bytes


def live_when_backward_opens(graph: TrainingGraph, schedule: Schedule) -> set[str]:
    """Values live after forward has ended and the frees that follow at once."""
    live: set[str] = set()
    waiting = {op.name for op in graph.ops if op.phase == "forward"}
    for step in schedule.steps:
        if isinstance(step, Free):
            live.discard(step.value)
        elif isinstance(step, Compute):
            if not waiting:
                break
            live.update(graph.ops[graph.op_index[step.op]].outputs)
            waiting.discard(step.op)
    return live


def check_pins(graph: TrainingGraph, result: Result, keep: str = "", recompute: str = "") -> None:
    """The schedule is valid, within the budget, and keeps the pins."""
    if result.schedule is None:
        return
    found = simulate(graph, result.schedule)
    assert found.peak_bytes == result.peak_bytes <= result.budget_bytes
    assert found.time_us == result.time_us >= result.lower_bound_us * (1 - 1e-9)
    assert result.schedule.budget_bytes == result.budget_bytes
    assert (result.status == "optimal") == (result.gap <= 1e-9)
    pins = Pins.of(graph, (keep,) if keep else (), (recompute,) if recompute else ())
    runs = result.schedule.computations()
    assert all(runs[name] == 1 for name in pins.kept)
    lost = {v for name in pins.again for v in graph.ops[graph.op_index[name]].outputs}
    if 0 < graph.n_forward < len(graph.ops):
        assert not lost & live_when_backward_opens(graph, result.schedule)


def least_time_with_loss(graph: TrainingGraph, budget_bytes: int, lost: Collection[str]) -> float:
    """Time of the fastest schedule that drops `lost` when forward ends; infinite if none is."""
    problem = Problem.of(graph)
    masks = [
        (sum(1 << v for v in problem.inputs[op]), sum(1 << v for v in problem.outputs[op]))
        for op in range(problem.n_ops)
    ]
    index = {name: i for i, name in enumerate(problem.names)}
    lost_mask = sum(1 << index[name] for name in lost)
    returned = sum(1 << v for v in problem.forward_outputs)
    held = sum(1 << v for v in problem.held)
    wanted = sum(1 << v for v in problem.needs[problem.n_ops])
    room = budget_bytes - problem.resident_bytes

    @functools.cache
    def size_of(live: int) -> int:
        return sum(size for v, size in enumerate(problem.size_bytes) if live >> v & 1)

    best = {(0, 0): 0.0}
    queue = [(0.0, 0, 0)]
    while queue:
        time_us, following, live = heapq.heappop(queue)
        if following == problem.n_ops and live & wanted == wanted:
            return time_us
        if best[following, live] < time_us:
            continue
        free = [v for v in range(problem.n_values) if live >> v & 1]
        if following >= problem.n_forward:
            free = [v for v in free if not held >> v & 1]
        moves = [(time_us, following, live & ~(1 << v)) for v in free]
        for op in range(min(following + 1, problem.n_ops)):
            reads, makes = masks[op]
            own = problem.output_bytes[op] + problem.workspace_bytes[op]
            is_first = op == following
            may_run = is_first or (not problem.no_recompute[op] and makes & ~live)
            if reads & ~live or not may_run or size_of(live) + own > room:
                continue
            after = live | makes
            if is_first and op == problem.n_forward - 1:
                if returned & ~after:
                    continue
                after &= ~lost_mask
            moves.append((time_us + problem.cost_us[op], following + is_first, after))
        for move in moves:
            if move[0] < best.get(move[1:], float("inf")):
                best[move[1:]] = move[0]
                heapq.heappush(queue, move)
    return float("inf")


@pytest.mark.parametrize("percent", rows([100, 75, 60], lambda percent: percent > 60))
@pytest.mark.parametrize("solver", ["auto", "chen_sqrt"])
@pytest.mark.parametrize(
    ("keep", "recompute"),
    [("*.attn", ""), ("", "*.norm"), ("blocks.1", "blocks.0.norm"), ("head", "blocks.*.attn")],
)
def test_pins_hold_on_a_transformer(solver: str, percent: int, keep: str, recompute: str) -> None:
    graph = gpt()
    budget_bytes = peak_bytes(graph) * percent // 100
    result = solve_within(
        graph, budget_bytes, solver, time_limit_s=AMPLE_S, keep=keep, recompute=recompute
    )  # fmt: skip
    check_pins(graph, result, keep, recompute)
    if percent == 100 and solver == "auto":
        assert result.schedule is not None
        assert result.schedule.options["keep" if keep else "recompute"] == (keep or recompute)


@pytest.mark.parametrize("seed", range(40))
def test_pins_against_exhaustive_search(seed: int) -> None:
    source = random.Random(seed)
    n_ops = source.randint(5, 8)
    graph = with_modules(random_graph(source, n_ops, source.randint(3, n_ops - 2)))
    budget_bytes = int(peak_bytes(graph) * source.choice([0.6, 0.8, 1.0]))
    try:
        pins = Pins.of(graph, ("*.attn",), ("*.norm",))
    except SolverError:
        return
    result = solve_within(
        graph, budget_bytes, keep=["*.attn"], recompute=["*.norm"], time_limit_s=AMPLE_S
    )
    check_pins(graph, result, "*.attn", "*.norm")
    lost = [v for name in pins.again for v in graph.ops[graph.op_index[name]].outputs]
    least_us = least_time_with_loss(kept_graph(graph, pins.kept), budget_bytes, lost)
    assert result.lower_bound_us <= least_us * (1 + 1e-9)
    if result.schedule is not None:
        assert result.time_us >= least_us * (1 - 1e-9)
    only_kept = solve_within(graph, budget_bytes, keep="*.attn", time_limit_s=AMPLE_S)
    least_us = least_time_us(kept_graph(graph, pins.kept), budget_bytes) or float("inf")
    assert only_kept.lower_bound_us <= least_us * (1 + 1e-9)
    if only_kept.status == "optimal":
        assert only_kept.time_us == pytest.approx(least_us)


def test_what_is_kept_may_come_in_another_order() -> None:
    graph = branches(16)
    placed = msgspec.structs.replace(
        graph, ops=tuple(msgspec.structs.replace(op, module="wide") for op in graph.ops)
    )
    budget_bytes = LARGE_BYTES + 17
    fixed = solve_within(placed, budget_bytes, keep="wide", time_limit_s=AMPLE_S)
    free = solve_within(placed, budget_bytes, keep="wide", order="free", time_limit_s=AMPLE_S)
    assert fixed.schedule is None
    assert (free.status, free.overhead) == ("optimal", 0.0)
    assert free.schedule is not None
    assert simulate(placed, free.schedule).peak_bytes <= budget_bytes


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_of_a_free_order_with_pins_is_below_every_schedule(seed: int) -> None:
    source = random.Random(seed)
    n_ops = source.randint(5, 8)
    graph = with_modules(random_graph(source, n_ops, source.randint(3, n_ops - 2)))
    budget_bytes = int(peak_bytes(graph) * 0.8)
    for keep, recompute in (("*.attn", ""), ("", "*.norm")):
        globs = {"keep": keep or (), "recompute": recompute or (), "time_limit_s": AMPLE_S}
        free = solve_within(graph, budget_bytes, order="free", **globs)
        check_pins(graph, free, keep, recompute)
        fixed = solve_within(graph, budget_bytes, **globs)
        if fixed.schedule is not None:
            assert free.lower_bound_us <= fixed.time_us * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("pinned", ["keep", "recompute"])
@pytest.mark.parametrize("graph", [chain(10), gpt_like(1)], ids=lambda g: g.name)
def test_the_budget_that_an_infeasible_result_names_is_feasible(
    graph: TrainingGraph, pinned: str
) -> None:
    placed = with_modules(graph, 2)
    lost = solve_within(placed, 1, "cut", **{pinned: "blocks.0"})
    assert lost.status == "infeasible"
    assert "@" not in lost.message
    assert all(item.name in placed.value_by_name for item in lost.held_at_peak)
    found = solve_within(placed, lost.least_feasible_bytes, "cut", **{pinned: "blocks.0"})
    assert found.schedule is not None
    check_pins(placed, found, **{pinned: "blocks.0"})


def test_the_least_schedule_under_kept_pins_is_of_the_real_graph() -> None:
    result = solve_within(gpt(), 1, "cut", keep=["*"])
    assert result.schedule is None
    assert result.least_schedule is not None
    assert result.least_schedule.graph_hash == gpt().hash
    assert simulate(gpt(), result.least_schedule).peak_bytes == result.least_feasible_bytes


def test_without_a_budget_only_what_must_run_again_does() -> None:
    graph = gpt()
    pins = Pins.of(graph, (), ("*.norm",))
    cloned_graph = with_clones(graph, frozenset(graph.op_index[name] for name in pins.again))
    clones = {op.name.removesuffix(CLONE): op for op in cloned_graph.ops if op.name.endswith(CLONE)}
    assert clones
    assert clones.keys() <= pins.again.keys()
    result = solve_within(graph, UNLIMITED_BYTES, recompute="*.norm")
    assert result.schedule is not None
    runs = result.schedule.computations()
    assert {name for name in runs if runs[name] > 1} == clones.keys()
    assert result.time_us == pytest.approx(cloned_graph.time_us)
    assert result.status == "optimal"


def test_recomputing_all_that_may_be_lowers_the_peak() -> None:
    graph = with_modules(chain(12))
    result = solve_within(graph, UNLIMITED_BYTES, recompute="*")
    check_pins(graph, result, recompute="*")
    assert result.overhead > 0
    assert solve_within(graph, UNLIMITED_BYTES, keep="*").overhead == 0


def test_globs_match_modules_and_all_below() -> None:
    graph = gpt()
    of_block = [op.name for op in graph.ops if op.module.startswith("blocks.0.")]
    assert list(Pins.of(graph, "blocks.0", ()).kept) == of_block
    assert list(Pins.of(graph, ["blocks.0.*"], ()).kept) == of_block
    assert Pins.of(graph, ("*.norm", "*.attn"), ()).kept["f0"] == "*.norm"


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        ({"keep": "*.atn"}, r"keep '\*.atn' matches no module .*did you mean blocks.0.attn\?"),
        ({"recompute": "blocks.7"}, "recompute 'blocks.7' .* did you mean .*blocks"),
        ({"keep": ["zzz"]}, "Modules are blocks.0.norm, blocks.0.attn"),
        (
            {"keep": "blocks.0", "recompute": "*.norm"},
            r"narrow keep 'blocks.0' or recompute '\*.norm': op f0 \(blocks.0.norm\) is pinned",
        ),
    ],
)
def test_errors_name_what_was_near(pins: dict[str, str], text: str) -> None:
    with pytest.raises(SolverError, match=text):
        solve_within(gpt(), UNLIMITED_BYTES, **pins)  # type: ignore[arg-type]


def test_what_cannot_run_again_is_left_alone_or_refused() -> None:
    graph = with_modules(chain(4))
    last = graph.ops[graph.n_forward - 1]
    assert last.module == "head"
    with pytest.raises(SolverError, match=f"{last.name}: the step returns its value"):
        solve_within(graph, UNLIMITED_BYTES, recompute="head")
    kept = kept_graph(graph, dict.fromkeys(["f0"], "test"))
    with pytest.raises(SolverError, match="f0: it must not run twice: kept by keep='test'"):
        solve_within(kept, UNLIMITED_BYTES, recompute="blocks.0.norm")
    assert last.name not in Pins.of(graph, (), "*").again


def test_a_graph_without_modules_says_so() -> None:
    with pytest.raises(SolverError, match="no op of this graph names its module"):
        solve_within(chain(4), UNLIMITED_BYTES, keep="blocks.0")
