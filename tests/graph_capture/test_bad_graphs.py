"""Graphs and budgets that mean nothing: refused when they are made, in words that help."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from remat.graph_capture.errors import GraphError
from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value
from remat.solver import solve_within

A = Op("a", "t", "forward", (), ("va",), 1.0)
B = Op("b", "t", "backward", ("va",), ("vb",), 2.0)
VA, VB = Value("va", 4, "a"), Value("vb", 8, "b")
GOOD = TrainingGraph("good", (A, B), (VA, VB), outputs=("vb",))


def remade(**changes: object) -> TrainingGraph:
    return replace(GOOD, **changes)  # type: ignore[arg-type]  # any field, wrong or not


WRONG: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "cycle of two": (
        lambda: remade(ops=(replace(A, inputs=("vb",)), B)),
        ("op a reads vb before any op produces it", "cycle"),
    ),
    "cycle of one": (
        lambda: remade(ops=(replace(A, inputs=("va",)), B)),
        ("op a reads va before any op produces it", "cycle"),
    ),
    "order": (
        lambda: remade(ops=(replace(B, phase="forward"), A)),
        ("op b reads va before any op produces it", "the ops cannot run in this order"),
    ),
    "missing value": (
        lambda: remade(ops=(A, replace(B, inputs=("va", "vz")))),
        ("op b reads vz, which is not a value of the graph",),
    ),
    "missing result": (
        lambda: remade(ops=(A, replace(B, outputs=("vb", "vz")))),
        ("op b lists output vz, which does not name it as producer",),
    ),
    "result of another op": (
        lambda: remade(ops=(A, replace(B, outputs=("va",)))),
        ("op b lists output va, which does not name it as producer",),
    ),
    "missing output of the step": (
        lambda: remade(outputs=("vb", "vz")),
        ("output vz is produced by no op",),
    ),
    "missing output of forward": (
        lambda: remade(forward_outputs=("vz",)),
        ("output vz is produced by no op",),
    ),
    "two ops of a name": (
        lambda: remade(ops=(A, B, replace(A, outputs=()))),
        ("two ops have the same name",),
    ),
    "two values of a name": (
        lambda: remade(values=(VA, VB, VA)),
        ("two values have the same name",),
    ),
    "forward after backward": (
        lambda: remade(ops=(replace(A, phase="backward"), replace(B, phase="forward"))),
        ("forward op b comes after a backward op",),
    ),
    "negative size": (
        lambda: remade(values=(replace(VA, size_bytes=-4), VB)),
        ("value va has a negative size: -4 bytes",),
    ),
    "negative workspace": (
        lambda: remade(ops=(A, replace(B, workspace_bytes=-1))),
        ("op b has a negative", "-1 bytes of workspace"),
    ),
    "negative cost": (
        lambda: remade(ops=(A, replace(B, cost_us=-2.0))),
        ("op b has a negative", "-2.0 us"),
    ),
    "cost that is no number": (
        lambda: remade(ops=(A, replace(B, cost_us=math.nan))),
        ("op b has a negative or undefined cost: nan us",),
    ),
    "infinite cost": (
        lambda: remade(ops=(A, replace(B, cost_us=math.inf))),
        ("op b ", "inf us"),
    ),
    "negative resident bytes": (
        lambda: remade(resident=Resident(optimizer_bytes=-100)),
        ("optimizer_bytes", "-100"),
    ),
    "producer that is no op": (
        lambda: remade(values=(VA, VB, Value("vx", 4, "x"))),
        ("value vx ", "x, which is not an op"),
    ),
    "producer that does not make it": (
        lambda: remade(values=(VA, VB, Value("vx", 4, "a"))),
        ("vx", "op a"),
    ),
    "result listed twice": (
        lambda: remade(ops=(replace(A, outputs=("va", "va")), B)),
        ("op a ", "va"),
    ),
    "output of forward from backward": (
        lambda: remade(forward_outputs=("vb",)),
        ("vb", "forward"),
    ),
    "more bytes than can be counted": (
        lambda: remade(values=(VA, replace(VB, size_bytes=1 << 62))),
        ("add up to 4611686018427387908", "are the sizes in bytes?"),
    ),
    "costs that add up to too much": (
        lambda: remade(ops=(A, replace(B, cost_us=1e300))),
        ("add up to 1e+300 us", "are the costs in microseconds?"),
    ),
    "file of another release": (
        lambda: remade(schema_version=99),
        ("schema version 99", "remat show MODEL --as graph -o FILE"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_graphs_are_refused_when_they_are_made(case: str) -> None:
    make, words = WRONG[case]
    with pytest.raises(GraphError) as caught:
        make()
    for text in words:
        assert text in str(caught.value)


FILES = {
    "cycle": (b'"inputs":[]', b'"inputs":["vb"]', "op a reads vb before any op produces it"),
    "negative size": (b'"size_bytes":4', b'"size_bytes":-4', "value va has a negative size"),
    "half a byte": (b'"size_bytes":4', b'"size_bytes":4.5', "Expected `int`, got `float`"),
    "no number": (b'"cost_us":1.0', b'"cost_us":NaN', "not a graph of this release"),
    "too large": (b'"cost_us":1.0', b'"cost_us":1e999', "Number out of range"),
    "missing field": (b'"target":"t",', b"", "missing required field `target`"),
    "unknown phase": (b'"backward"', b'"sideways"', "Invalid enum value 'sideways'"),
    "schema": (
        b'"schema_version":2',
        b'"schema_version":99',
        "has schema version 99, and this release reads 2",
    ),
    "cut off": (b"}", b"", "not a graph of this release"),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_graph_files_are_refused(case: str) -> None:
    before, after, said = FILES[case]
    good = GOOD.to_json()
    assert TrainingGraph.from_json(good) == GOOD
    bad = good.replace(before, after, 1)
    assert bad != good
    with pytest.raises(GraphError, match=said):
        TrainingGraph.from_json(bad)


@pytest.mark.parametrize("solver", ["auto", "cut", "checkmate", "exhaustive", "dtr"])
def test_a_budget_of_nothing_is_a_result_and_no_error(solver: str) -> None:
    result = solve_within(GOOD, 0, solver)
    assert result.status == "infeasible"
    assert result.schedule is None
    assert result.least_feasible_bytes == 12
    assert solve_within(GOOD, 12, solver).status == "optimal"
