"""A small GPT traced once a test run, and what tests of templates ask of a schedule."""

from __future__ import annotations

import functools

import msgspec

from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.schedule import Compute, Free, Schedule
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.policies.template import unavoidable
from remat.solver.problem import Problem
from tests.graphs import peak_bytes_of

LAYERS = 3
ATTENTION = ("fused", "written out")


@functools.cache
def traced_gpt(attention: str) -> TrainingGraph:
    """With dropout, attention on a CPU is traced as products and a softmax."""
    import torch

    import remat
    from examples.gpt import GPT, Sizes

    dropout = {"fused": 0.0, "written out": 0.1}[attention]
    sizes = Sizes(layers=LAYERS, width=64, heads=4, seq=32, batch=4, vocab=128, dropout=dropout)
    tokens = torch.randint(128, (4, 32))
    return remat.capture(GPT(sizes), args=(tokens, tokens))


@functools.cache
def costed_gpt() -> TrainingGraph:
    """A GPT whose ops cost what they move, so that a busy machine changes no plan."""
    graph = traced_gpt("written out")
    sizes = {value.name: value.size_bytes for value in graph.values}

    def costed(op: Op) -> Op:
        moved_bytes = sum(sizes[name] for name in (*op.inputs, *op.outputs))
        per_byte = 0.01 if "mm" in op.target else 0.001
        return msgspec.structs.replace(op, cost_us=1.0 + per_byte * moved_bytes)

    return msgspec.structs.replace(graph, ops=tuple(map(costed, graph.ops)))


def by_template(graph: TrainingGraph, solver: str, **options: object) -> Schedule:
    """The template's schedule, at one byte less than the unmodified step needs."""
    result = solve_within(graph, peak_bytes_of(graph) - 1, solver, **options)
    assert result.schedule is not None, result.message
    assert result.lower_bound_us == graph.time_us
    return result.schedule


def recomputed(graph: TrainingGraph, schedule: Schedule) -> list[Op]:
    """Ops that run again, none more than once and all of forward."""
    simulate(graph, schedule)
    counts = schedule.computations()
    again = [op for op in graph.ops if counts[op.name] > 1]
    assert all(counts[op.name] == 2 and op.phase == "forward" for op in again)
    return again


def saved_bytes(graph: TrainingGraph, schedule: Schedule) -> int:
    """Bytes live when forward ends and read later, but for what no plan can avoid."""
    problem = Problem.of(graph)
    fixed = unavoidable(problem)
    size = {name: problem.size_bytes[v] for v, name in enumerate(problem.names) if not fixed[v]}
    live: set[str] = set()
    first_runs = 0
    for step in schedule.steps:
        if isinstance(step, Compute):
            if first_runs == graph.n_forward:
                break
            first_runs += 1
            live.update(graph.ops[graph.op_index[step.op]].outputs)
        elif isinstance(step, Free):
            live.discard(step.value)
    return sum(size.get(name, 0) for name in live)


def graph_of_modules(*modules: str, targets: tuple[str, ...] = ()) -> TrainingGraph:
    """A chain of forward ops in these modules, each read by a backward op."""
    ops: list[Op] = []
    values = [Value(f"v{i}", 8, f"op{i}") for i in range(2 * len(modules))]
    for i, module in enumerate(modules):
        target = targets[i] if targets else "aten.mm.default"
        reads = (f"v{i - 1}",) if i else ()
        ops.append(Op(f"op{i}", target, "forward", reads, (f"v{i}",), 1.0, module=module))
    for i in range(len(modules), 2 * len(modules)):
        reads = (f"v{i - 1}", f"v{2 * len(modules) - 1 - i}")
        ops.append(Op(f"op{i}", "t", "backward", tuple(dict.fromkeys(reads)), (f"v{i}",), 1.0))
    return TrainingGraph(name="chain", ops=tuple(ops), values=tuple(values))
