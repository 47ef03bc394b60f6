"""What a schedule does with each value: verdicts, folding, sums, and who holds the peak."""

from __future__ import annotations

import functools
import itertools

import pytest

import remat
from remat.analysis.inspect import inspect
from remat.graph_capture.errors import GlobError
from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value
from remat.schedules.outcome import Result
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule
from remat.schedules.simulate import simulate
from remat.schedules.value_report.peak_holders import peak_holders
from remat.schedules.value_report.rows import (
    GroupBy,
    boxes,
    fold_rows,
    group_rows,
    matching,
    ranges_text,
    split_indices,
    value_rows,
    written,
)
from tests.links import with_links
from tests.solver.graphs.traced_gpt import traced_gpt


def small_graph() -> TrainingGraph:
    """Two layers, `a` and `b`; backward reads both. `a` has 3 bytes, `b` 5, `g` 2."""
    ops = (
        Op("a", "aten.mm.default", "forward", ("x",), ("a",), 7.0, 1, module="layers.0"),
        Op("b", "aten.mm.default", "forward", ("a",), ("b",), 11.0, 0, module="layers.1"),
        Op("g", "aten.sum.default", "backward", ("a", "b"), ("g",), 13.0, 4, module="layers.1"),
    )
    sizes = {"a": 3, "b": 5, "g": 2}
    made = tuple(Value(name, size, name) for name, size in sizes.items())
    resident = Resident(parameters_bytes=100)
    return TrainingGraph("Small", ops, (Value("x", 0), *made), (), ("g",), resident)


def steps_of(graph: TrainingGraph, *steps: object) -> Schedule:
    return Schedule.for_graph(graph, steps)  # type: ignore[arg-type]


def test_a_value_is_recomputed_as_often_as_it_comes_to_be_again() -> None:
    graph = small_graph()
    plan = steps_of(
        graph, Compute("a"), Compute("b"), Free("a"), Compute("a"), Compute("g"), Free("a")
    )
    rows = {row.value: row for row in value_rows(graph, plan)}
    assert [rows[name].verdict_text for name in "abg"] == ["recompute x1", "keep", "run"]
    assert rows["a"].cost_us == 7.0
    free = steps_of(graph, Compute("a"), Compute("b"), Compute("g"))
    assert [row.verdict_text for row in value_rows(graph, free)] == ["keep", "keep", "run"]
    moved = steps_of(
        graph, Compute("a"), Compute("b"), Offload("a"), Free("a"), Fetch("a"), Compute("g"),
        Free("b"),
    )  # fmt: skip
    assert next(iter(value_rows(with_links(graph), moved))).verdict == "offload"
    assert {row.verdict for row in value_rows(graph)} == {""}


def test_the_peak_is_the_sum_of_who_holds_it() -> None:
    graph = small_graph()
    held = peak_holders(graph, steps_of(graph, Compute("a"), Compute("b"), Compute("g")))
    assert held.op == "g"
    assert held.peak_bytes == 100 + 3 + 5 + 2 + 4
    assert held.resident == {"parameters": 100}
    assert held.workspace_bytes == 4
    found = [(row.module, row.size_bytes) for row in held.values]
    assert found == [("layers.1", 5), ("layers.0", 3), ("layers.1", 2)]
    assert {row.first.kind for row in held.values} == {"activation"}


@functools.cache
def solved() -> tuple[TrainingGraph, Result]:
    graph = traced_gpt("written out")
    return graph, remat.solve(graph, "60%", solver="cut", gap=0.02)


def test_a_second_copy_at_the_peak_is_counted() -> None:
    """An op that makes two values of which one is live makes another copy of it."""
    two = Op("p", "aten.var_mean.default", "forward", (), ("p", "q"), 1.0)
    ops = (
        two,
        Op("r", "aten.add.Tensor", "forward", ("p", "q"), ("r",), 1.0),
        Op("g", "aten.sum.default", "backward", ("p", "q"), ("g",), 1.0),
    )
    values = (Value("p", 10, "p"), Value("q", 20, "p"), Value("r", 1, "r"), Value("g", 1, "g"))
    graph = TrainingGraph("Twice", ops, values, (), ("g",))
    plan = steps_of(graph, Compute("p"), Compute("r"), Free("q"), Compute("p"), Compute("g"))
    held = peak_holders(graph, plan)
    assert (held.op, held.run, held.copies_bytes) == ("p", 2, 10)
    assert held.peak_bytes == 10 + 20 + 1 + held.copies_bytes
    assert [row.verdict_text for row in value_rows(graph, plan)][:2] == ["keep", "recompute x1"]


def test_of_a_real_plan_everything_sums_to_what_the_simulator_says() -> None:
    graph, result = solved()
    assert result.schedule is not None
    found = inspect(graph, result)
    held = found.at_peak
    assert held is not None
    assert found.peak_bytes == result.peak_bytes == simulate(graph, result.schedule).peak_bytes
    sizes = sum(held.resident.values()) + sum(row.size_bytes for row in held.values)
    assert sizes + held.workspace_bytes + held.copies_bytes == result.peak_bytes
    assert sum(row.count for row in found.rows) == len(found.values)
    assert sum(row.size_bytes for row in found.rows) == sum(r.size_bytes for r in found.values)


@pytest.mark.parametrize("by", ["module", "op", "line"])
def test_groups_hold_all_values_and_the_time_of_all_that_runs_again(by: GroupBy) -> None:
    graph, result = solved()
    assert result.schedule is not None
    groups = group_rows(graph, result.schedule, value_rows(graph, result.schedule), by)
    with_values = [op for op in graph.ops if op.outputs]
    assert sum(group.cost_us for group in groups) == pytest.approx(
        sum(op.cost_us for op in with_values)
    )
    again_us = sum(group.recomputed_us for group in groups)
    assert again_us == pytest.approx(result.time_us - graph.time_us)
    assert again_us > 0
    held = peak_holders(graph, result.schedule)
    assert sum(group.at_peak_bytes for group in groups) == sum(
        row.size_bytes for row in held.values
    )


def test_identical_layers_fold_and_others_do_not() -> None:
    graph, _ = solved()
    rows = fold_rows(value_rows(graph))
    gelu = [row for row in rows if row.first.target == "aten.gelu.default"]
    assert [(row.module, row.count) for row in gelu] == [("blocks.0\u20132.mlp.1", 3)]
    assert gelu[0].size_bytes == 3 * gelu[0].first.size_bytes
    assert len(set(gelu[0].values)) == 3
    once = [row for row in rows if row.first.target == "aten.embedding.default"]
    assert [row.count for row in once] == [1]
    _, result = solved()
    by_verdict = fold_rows(value_rows(graph, result.schedule))
    for row in by_verdict:
        alike = [one for one in value_rows(graph, result.schedule) if one.value in row.values]
        assert {one.verdict_text for one in alike} == {row.first.verdict_text}
        assert {one.at_peak for one in alike} == {row.first.at_peak}


@pytest.mark.parametrize(
    ("indices", "texts"),
    [
        ([(0,), (1,), (2,)], ["l.0-2.x"]),
        ([(0,), (2,), (3,), (7,)], ["l.0,2-3,7.x"]),
    ],
)
def test_indices_are_written_as_ranges(indices: list[tuple[int, ...]], texts: list[str]) -> None:
    found = [written("l.#.x", box).replace("\u2013", "-") for box in boxes(indices)]
    assert found == texts


def test_nested_indices_are_parted_into_products_that_cover_each_once() -> None:
    whole = list(itertools.product(range(4), range(2)))
    assert [written("s.#.#.c", box) for box in boxes(whole)] == ["s.0\u20133.0\u20131.c"]
    ragged = [one for one in whole if one != (2, 1)]
    found = list(boxes(ragged))
    covered = [one for box in found for one in itertools.product(*box)]
    assert sorted(covered) == sorted(ragged)
    assert len(found) == 2
    assert split_indices("s.3.0.conv1") == ("s.#.#.conv1", (3, 0))
    assert split_indices("") == ("", ())
    assert ranges_text((1,)) == "1"


def test_globs_name_modules_and_what_is_below_them_ops_values_and_lines() -> None:
    graph, _ = solved()
    rows = value_rows(graph)
    below = matching(rows, ["blocks.1"])
    assert {row.module.split(".")[1] for row in below} == {"1"}
    assert any(row.module == "blocks.1.attn" for row in below)
    assert {row.target for row in matching(rows, ["*gelu*"])} >= {"aten.gelu.default"}
    assert [row.value for row in matching(rows, [rows[3].value])] == [rows[3].value]
    assert matching(rows, []) == rows
    with pytest.raises(GlobError, match=r"'blocks\.9' matches no module, value.*Modules are token"):
        matching(rows, ["blocks.1", "blocks.9"])


def test_without_a_plan_there_is_no_peak() -> None:
    graph, _ = solved()
    with pytest.raises(GlobError, match="without a plan there is no peak"):
        inspect(graph, at_peak=True)
    assert "with nothing recomputed" in str(inspect(graph))
