"""torch's knapsack on saved bytes: its cases, its bytes, and the minimum cut behind it."""

from __future__ import annotations

import functools
import itertools
import json
import random

import pytest

from remat.baselines.torch_budget import (
    KnapsackTable,
    Partition,
    banned_ops,
    cheapest_saved,
    greedy_knapsack,
    ilp_knapsack,
    store_all_saved_bytes,
)
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.policies.template import Template, read_in_backward, template_sequence
from remat.solver.problem import Problem
from remat.solver.recompute_summary import op_kind
from remat.solver.state import schedule_of
from tests.graphs import peak_bytes_of
from tests.paths import ROOT
from tests.solver.graphs.random_graphs import random_graph
from tests.solver.graphs.traced_gpt import (
    ATTENTION,
    by_template,
    recomputed,
    saved_bytes,
    traced_gpt,
)

CASES = ROOT.parent / "shared" / "bench" / "pytorch_knapsack.json"


@pytest.fixture(params=ATTENTION)
def gpt(request: pytest.FixtureRequest) -> TrainingGraph:
    return traced_gpt(request.param)


@pytest.mark.parametrize("method", ["dp", "greedy", "ilp"])
@pytest.mark.parametrize("fraction", [0.0, 0.125, 0.25, 0.5, 0.8])
def test_torch_knapsack_saves_its_fraction(
    gpt: TrainingGraph, method: str, fraction: float
) -> None:
    """Each item may be off by half of one part in 10,000, in the dynamic program."""
    problem = Problem.of(gpt)
    partition = Partition(problem, method)
    kept = partition.kept(fraction)
    sequence = template_sequence(problem, Template(kept, just_in_time=True))
    schedule = schedule_of(problem, sequence)
    recomputed(gpt, schedule)
    allowed = fraction + (len(partition.items) / 20_000 if method == "dp" else 1e-9)
    states = sum(v.size_bytes for v in gpt.values if v.kind == "rng_state")
    assert saved_bytes(gpt, schedule) <= allowed * store_all_saved_bytes(problem) + states


def test_torch_knapsack_keeps_the_dear_ops_where_it_can(gpt: TrainingGraph) -> None:
    problem = Problem.of(gpt)
    kinds = {op_kind(gpt.ops[op].target) for op in banned_ops(problem)}
    assert "addmm" in kinds
    assert "gelu" not in kinds
    schedule = by_template(gpt, "torch_knapsack")
    assert not {op_kind(op.target) for op in recomputed(gpt, schedule)} & {"addmm", "mm"}
    saving = [
        solve_within(gpt, peak_bytes_of(gpt) * part // 100, "torch_knapsack") for part in (90, 75)
    ]
    assert saving[0].time_us <= saving[1].time_us


def mm_and_cos(parts: list[tuple[str, int, int]]) -> TrainingGraph:
    """Forward of ``(kind, what it reads, bytes)``; backward, last first, reads each input.

    A kind is ``mm``, whose time is its bytes, or ``cos``, which takes none; -1 is resident.
    """
    ops: list[Op] = []
    for i, (kind, read, size_bytes) in enumerate(parts):
        reads = (f"v{read}",) if read >= 0 else ()
        cost_us = float(size_bytes) if kind == "mm" else 0.0
        ops.append(Op(f"v{i}", f"aten.{kind}.default", "forward", reads, (f"v{i}",), cost_us))
    values = [Value(f"v{i}", size_bytes, f"v{i}") for i, (_, _, size_bytes) in enumerate(parts)]
    last = ""
    for op in reversed(ops[:]):
        reads = tuple(name for name in (last, *op.inputs) if name)
        last = f"b_{op.name}"
        ops.append(Op(last, "aten.backward.default", "backward", reads, (last,), 1.0))
        values.append(Value(last, 0, last))
    return TrainingGraph(name="mm and cos", ops=tuple(ops), values=tuple(values))


def saved_and_extra(graph: TrainingGraph, fraction: float) -> tuple[int, float]:
    """Bytes saved and extra time of torch's choice for that fraction."""
    problem = Problem.of(graph)
    kept = Partition(problem).kept(fraction)
    schedule = schedule_of(problem, template_sequence(problem, Template(kept, just_in_time=True)))
    return saved_bytes(graph, schedule), simulate(graph, schedule).time_us - graph.time_us


@pytest.mark.parametrize("tenths", range(10))
def test_chain_of_products_as_torch_asserts_it(tenths: int) -> None:
    """cos, then five times mm and cos: a tenth more saved is one product fewer, up to five."""
    parts = [("cos", -1, 100)]
    for i in range(5):
        parts += [("mm", 2 * i, 100), ("cos", 2 * i + 1, 100)]
    graph = mm_and_cos(parts)
    assert store_all_saved_bytes(Problem.of(graph)) == 1000
    units = min(tenths, 5)
    assert saved_and_extra(graph, tenths / 10) == (100 * units, 100.0 * (5 - units))


@pytest.mark.parametrize(
    ("sizes", "achievable"),
    [
        ([11, 3, 4, 2], [18, 17, 16, 15, 14, 13, 11, 7, 6, 5]),
        ([3, 5, 11, 17, 14], [42, 30, 19, 8, 3]),
    ],
)
def test_parallel_products_as_torch_asserts_them(sizes: list[int], achievable: list[int]) -> None:
    """Products beside each other: each sum of sizes is hit to the byte."""
    parts = [part for i, d in enumerate(sizes) for part in (("mm", -1, d), ("cos", 2 * i, d))]
    graph = mm_and_cos(parts)
    for total in achievable:
        found = saved_and_extra(graph, total / sum(sizes))
        assert found == (total, float(sum(sizes) - total))


def test_min_cut_is_the_least_by_enumeration() -> None:
    source = random.Random(3)
    for _ in range(60):
        graph = random_graph(source, 9, 5)
        problem = Problem.of(graph)
        banned = [op for op in range(problem.n_forward) if source.random() < 0.3]
        saved = cheapest_saved(problem, banned)
        cost = functools.partial(saving_bytes, problem)
        forward = [v for v, op in enumerate(problem.producer) if op < problem.n_forward]
        choices = itertools.chain.from_iterable(
            itertools.combinations(forward, count) for count in range(len(forward) + 1)
        )
        least = min(cost(c) for c in choices if is_enough(problem, banned, c))
        assert is_enough(problem, banned, saved)
        assert cost(saved) == least


def saving_bytes(problem: Problem, saved: tuple[int, ...] | list[int]) -> int:
    return sum(0 if v in problem.held else problem.size_bytes[v] for v in saved)


def is_enough(problem: Problem, banned: list[int], saved: tuple[int, ...] | list[int]) -> bool:
    """Whether ops that may run again make all that backward reads from `saved`."""
    at_hand = set(saved)
    for op in range(problem.n_forward):
        free = not problem.no_recompute[op] and op not in banned
        if free and at_hand.issuperset(problem.inputs[op]):
            at_hand.update(problem.outputs[op])
    return at_hand.issuperset(read_in_backward(problem))


def reference_cases() -> list[dict[str, list[float]]]:
    return json.loads(CASES.read_text())["cases"]


@pytest.mark.skipif(not CASES.exists(), reason="the reference instances are not here")
def test_knapsacks_equal_torchs() -> None:
    cases = reference_cases()
    assert len(cases) == 13
    for case in cases:
        memory, runtime, limit = case["memory"], case["runtime"], case["max_memory"]
        dynamic = KnapsackTable(memory, runtime, limit).choose(limit)
        assert dynamic == sorted(case["expected_saved"])
        assert {*range(len(memory))}.difference(dynamic) == {*case["expected_recomputable"]}
        exact, greedy = (find(memory, runtime, limit) for find in (ilp_knapsack, greedy_knapsack))
        took = [sum(runtime[i] for i in saved) for saved in (dynamic, exact, greedy)]
        assert took[:2] == pytest.approx([case["expected_saved_runtime"]] * 2, rel=1e-4)
        assert took[2] <= took[0] * (1 + 1e-6)  # which torch adds up in single precision
        assert sum(memory[i] for i in greedy) <= limit


def test_knapsacks_equal_torchs_own_functions() -> None:
    theirs = pytest.importorskip("torch._functorch._activation_checkpointing.knapsack")
    source = random.Random(5)
    for _ in range(20):
        count = source.randint(1, 12)
        memory = [source.randint(1, 400) / 1000 for _ in range(count)]
        runtime = [float(source.randint(0, 50)) for _ in range(count)]
        for limit in (0.0, 0.3, 1.0):
            found = KnapsackTable(memory, runtime, limit).choose(limit)
            assert found == theirs.dp_knapsack(memory, runtime, limit)[1]
            greedy = greedy_knapsack(memory, runtime, limit)
            assert greedy == theirs.greedy_knapsack(memory, runtime, limit)[1]
