"""Explanations: figures that a hand or another solve comes to as well, and no other reasons."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest

import remat
from remat.analysis.explanation import Explanation, explain, sentences, why_text
from remat.analysis.plan_report import step_facts
from remat.analysis.why import against_greedy, simple_rules, why
from remat.graph_capture.errors import BudgetError, GlobError
from remat.graph_capture.graph import CUSTOM, Op, Resident, TrainingGraph, Value
from remat.schedules.outcome import Result
from remat.schedules.schedule import Compute, Free, Schedule
from remat.schedules.simulate import simulate
from remat.schedules.value_report.peak_holders import (
    DRAWS,
    RETURNED_TO_CALLER,
    counterfactual_schedule,
    forced_ops,
)
from remat.solver import solve_within
from remat.solver.result import evaluate_schedule
from tests.copying import copying_chain, copying_result
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.models import make
from tests.solver.graphs.traced_gpt import costed_gpt, traced_gpt

GAP = 0.01
"""At which the solves of a GPT end, and soon."""


def chain() -> TrainingGraph:
    """x -> a -> b -> c -> loss; backward reads c, b, a in turn and leaves 10 bytes."""
    sizes = {"a": 100, "b": 40, "c": 100, "gc": 10, "gb": 10, "ga": 10}
    costs = {"a": 5.0, "b": 20.0, "c": 7.0, "gc": 1.0, "gb": 1.0, "ga": 1.0}
    reads = {"a": ("x",), "b": ("a",), "c": ("b",), "gc": ("c",), "gb": ("gc", "b"),
             "ga": ("gb", "a")}  # fmt: skip
    ops = tuple(
        Op(name, f"aten.{name}.default", "forward" if name in "abc" else "backward",
           reads[name], (name,), costs[name], module=f"layers.{'abc'.find(name[-1])}")
        for name in sizes
    )  # fmt: skip
    values = (Value("x", 0), *(Value(name, size, name) for name, size in sizes.items()))
    return TrainingGraph("Chain", ops, values, (), ("ga",), Resident(parameters_bytes=1000))


@functools.cache
def explained_chain() -> tuple[TrainingGraph, Result, Explanation]:
    graph = chain()
    result = solve_within(graph, 1160, "exhaustive")
    return graph, result, explain(graph, result, why_of=["a", "b"], each_s=AMPLE_S)


def said_of(found: Explanation, question: str) -> list[str]:
    return [said for name, said in sentences(found) if name == question]


def test_by_hand_peak_overhead_and_worth_of_memory() -> None:
    """With 160 bytes: a is dropped once b is made, and made again for ga.

    All kept: a + b + c + gc = 250. Without a in between: b + c + gc = 150; a is made again beside
    gb, 100 + 10 + 10 = 120. While b first runs: a + b = 140. So 1,150 will do, for 5 us more of 35.
    """
    _, result, found = explained_chain()
    assert result.schedule is not None
    assert found.unmodified_bytes == 1250
    assert found.peak_bytes == 1150
    assert found.at_peak.op == "gc"
    assert found.time_us == 40.0
    assert found.overhead == pytest.approx(5 / 35)
    assert found.price.step_bytes == 1150 // 20
    assert not found.is_whole_gib
    assert found.price.saved_us == 0.0
    assert found.price.cost_us is None


def test_by_hand_the_least_budget_and_the_op_that_sets_it() -> None:
    """c + b + gc = 150 as above; without b there, a + b + gc = 150 to make it again for gb."""
    _, _, found = explained_chain()
    assert found.least.least_bytes == found.least.proved_bytes == 1150
    assert found.least.at_peak is not None
    assert found.least.at_peak.op == "gc"
    assert [row.first.value for row in found.least.at_peak.values] == ["c", "b", "gc"]


def test_by_hand_why_a_is_recomputed_and_b_is_kept() -> None:
    _, _, found = explained_chain()
    a, b = found.why
    assert (a.row.verdict_text, b.row.verdict_text) == ("recompute x1", "keep")
    assert a.runs_us == 5.0
    assert a.staying_bytes == 1250
    assert a.turned is not None
    assert a.turned.pin == "keep"
    assert not a.turned.fits
    assert b.turned is not None
    assert b.turned.pin == "recompute"
    assert b.turned.extra_us > 0 or not b.turned.fits
    said = said_of(found, "why")[0]
    assert "recompute x1, 5.0 us a step; if it stayed and nothing else changed, the peak" in said
    assert "Solved again with it kept: found no plan that fits" in said


def updating_late() -> tuple[TrainingGraph, Result]:
    """b has to run again for ga, so its parameter is updated behind that."""
    reads = {"a": ("x", "p"), "b": ("a", "q"), "c": ("b",), "gb": ("b",), "update_gb": ("gb", "q"),
             "w": ("gb",), "s": ("w",), "ga": ("a", "b", "c", "s"),
             "update_ga": ("ga", "p")}  # fmt: skip
    sizes = {"a": 100, "b": 100, "c": 10, "gb": 50, "w": 250, "s": 10, "ga": 60}
    ops = tuple(
        Op(name, "remat.update" if "update" in name else f"aten.{name}",
           "forward" if name in "abc" else "backward", given, (name,) if name in sizes else (), 1.0,
           no_recompute="it updates" if "update" in name else "")
        for name, given in reads.items()
    )  # fmt: skip
    resident = (Value("x", 0), *(Value(name, 10, kind="parameter") for name in "pq"))
    values = (*resident, *(Value(name, size, name) for name, size in sizes.items()))
    graph = TrainingGraph("Late", ops, values, resident=Resident(parameters_bytes=20))
    steps = [Compute("a"), Compute("b"), Free("a"), Compute("c"), Compute("gb"), Free("b"),
             Compute("w"), Compute("s"), Free("w"), Compute("a"), Compute("b"), Compute("ga"),
             *map(Free, "abcs"), Compute("update_gb"), Compute("update_ga")]  # fmt: skip
    schedule = Schedule.for_graph(graph, steps, solver="dtr")
    return graph, evaluate_schedule(graph, schedule, budget_bytes=350, lower_bound_us=0.0)


def test_solved_again_with_another_pin_no_parameter_is_read_after_its_update() -> None:
    graph, result = updating_late()
    (one,) = why(graph, result, ["c"], each_s=AMPLE_S)
    assert one.turned is not None
    assert one.turned.pin == "recompute"
    assert one.turned.fits


def test_a_plan_by_hand_names_the_solver_that_was_asked() -> None:
    graph = chain()
    result = solve_within(graph, 1160, "exhaustive")
    assert result.schedule is not None
    for name, by in (("", "hand"), ("mine", "mine")):
        schedule = msgspec.structs.replace(result.schedule, solver=name, options={})
        plan = remat.Plan.of(graph, schedule)
        said = " ".join(str(plan.explain(each_s=AMPLE_S)).split())
        assert f", by {by} The peak is reached" in said
        assert "the lowest peak that auto knows" in said
        assert dict(step_facts(graph, plan).details)["found by"] == by


def test_a_custom_op_that_recompute_names_is_forced_by_that_alone() -> None:
    graph = chain()
    own = msgspec.structs.replace(graph.ops[0], no_recompute=f"{CUSTOM} may draw", module="own")
    graph = msgspec.structs.replace(graph, ops=(own, *graph.ops[1:]))
    result = solve_within(graph, 1160, "exhaustive", recompute="own")
    assert result.schedule is not None
    a, b = why(graph, result, ["a", "b"], each_s=AMPLE_S)
    assert a.forced == "pinned by recompute='own'"
    assert b.turned is not None
    assert not any(CUSTOM in one.reason for one in forced_ops(graph, result.schedule))


@functools.cache
def planned() -> tuple[TrainingGraph, Result]:
    graph = costed_gpt()
    return graph, solve_within(graph, peak_bytes_of(graph) * 3 // 4, "cut", gap=GAP)


@functools.cache
def explained() -> Explanation:
    return explain(*planned(), why_of="blocks.1.mlp", each_s=AMPLE_S)


@pytest.mark.slow
def test_what_memory_is_worth_is_what_two_real_solves_find() -> None:
    graph, result = planned()
    found = explained()
    step = found.price.step_bytes
    assert step == result.peak_bytes // 20
    more = solve_within(graph, result.budget_bytes + step, "cut", gap=GAP)
    less = solve_within(graph, result.budget_bytes - step, "cut", gap=GAP)
    assert found.price.saved_us == pytest.approx(result.time_us - more.time_us, rel=0.01)
    assert found.price.cost_us is not None
    assert found.price.cost_us == pytest.approx(less.time_us - result.time_us, rel=0.01)
    assert (
        "more (5 % of the peak; 1 GiB would be more than that) saves" in said_of(found, "memory")[0]
    )


@pytest.mark.slow
def test_everything_said_of_the_plan_is_what_the_simulator_says() -> None:
    graph, result = planned()
    assert result.schedule is not None
    found, simulated = explained(), simulate(graph, result.schedule)
    assert found.peak_bytes == found.at_peak.peak_bytes == simulated.peak_bytes
    assert found.time_us == simulated.time_us
    assert found.overhead == simulated.overhead
    assert found.budget_bytes == result.budget_bytes
    assert found.least.at_peak is not None
    assert found.least.proved_bytes <= found.least.least_bytes < found.peak_bytes
    said = found.as_json()
    assert said["price"]["saved_us"] == found.price.saved_us
    assert {"why", "price", "least", "rules", "greedy", "levers"} == set(said["seconds"])
    assert "The peak is reached in" in str(found)


def test_values_that_stay_are_made_once_and_the_schedule_stays_valid() -> None:
    graph, result = planned()
    assert result.schedule is not None
    runs = result.schedule.computations()
    again = [op.name for op in graph.ops if runs[op.name] > 1]
    assert again
    for name in again:
        stayed = counterfactual_schedule(graph, result.schedule, name)
        found = simulate(graph, stayed)
        assert stayed.computations()[name] == 1
        cost_us = graph.ops[graph.op_index[name]].cost_us
        assert found.time_us == pytest.approx(result.time_us - cost_us * (runs[name] - 1))


def test_a_question_is_answered_by_a_real_solve_with_a_pin() -> None:
    graph, result = planned()
    for one in explained().why:
        assert one.row.module.startswith("blocks.1.mlp")
        if one.turned is None or not one.turned.fits:
            continue
        assert one.turned.overhead == pytest.approx(
            (result.time_us + one.turned.extra_us) / graph.time_us - 1
        )
        assert one.row.value not in {
            name for row in (*one.turned.dropped, *one.turned.spared) for name in row.values
        }


def test_what_leaves_no_choice_is_said_and_not_solved() -> None:
    graph, result = planned()
    (state,) = why(graph, result, ["remat.save_rng_state"])[:1]
    assert state.turned is None
    assert "it saves the random stream where it stands" in state.forced
    assert "there is no choice" in why_text(state, result.budget_bytes)
    ample_bytes = peak_bytes_of(graph) * 19 // 20
    kept = solve_within(graph, ample_bytes, "cut", keep=["blocks.0.mlp"], time_limit_s=AMPLE_S)
    (pinned, *_) = why(graph, kept, ["blocks.0.mlp.1"])
    assert pinned.forced == "pinned by keep='blocks.0.mlp'"
    with pytest.raises(GlobError, match=r"'blocks\.7' matches no module"):
        why(graph, result, ["blocks.7"])


def test_what_was_forced_names_draws_returned_values_and_pins() -> None:
    graph, result = planned()
    assert result.schedule is not None
    reasons = {one.reason: one for one in forced_ops(graph, result.schedule)}
    assert reasons["it saves the random stream where it stands"].ops == 1 + 3 * 3
    assert reasons[RETURNED_TO_CALLER].ops == 1
    drawn = [op for op in graph.ops if op.target == "remat.dropout.default"]
    again = sum(result.schedule.computations()[op.name] > 1 for op in drawn)
    assert (DRAWS in reasons) == (again > 0)
    ample_bytes = peak_bytes_of(graph) * 19 // 20
    pinned = solve_within(
        graph, ample_bytes, "cut", keep=["*.attn"], recompute=["*.mlp.1"], time_limit_s=AMPLE_S
    )
    assert pinned.schedule is not None
    said = [one.reason for one in forced_ops(graph, pinned.schedule)]
    assert "pinned by keep='*.attn'" in said
    assert "pinned by recompute='*.mlp.1'" in said


def test_what_a_batch_norm_forces_is_told_once_for_all_of_them() -> None:
    model, args, kwargs, loss_fn, target = make("batch_norm_in_place_relu")
    graph = remat.capture(model, args, kwargs, loss_fn=loss_fn, target=target)
    schedule = remat.solve(graph, "100%", solver="cut").schedule
    assert schedule is not None
    reasons = [one.reason for one in forced_ops(graph, schedule)]
    assert "it updates running statistics" in reasons
    assert "it reads num_batches_tracked, which the step overwrites" in reasons
    assert len(set(reasons)) == len(reasons)


def test_a_rule_within_one_percent_is_named_and_others_are_not() -> None:
    graph = traced_gpt("fused")
    result = solve_within(graph, peak_bytes_of(graph) * 19 // 20, "cut")
    full = solve_within(graph, result.budget_bytes, "full")
    assert full.schedule is not None
    found = explain(graph, full, each_s=AMPLE_S)
    assert found.simple is not None
    assert found.simple.slower <= 0.01
    (said,) = said_of(found, "rule")
    assert "within 1 % of this plan" in said
    assert "Take that: it is simpler" in said
    rules = simple_rules(graph, result)
    assert [rule.fits for rule in rules] == sorted((rule.fits for rule in rules), reverse=True)
    for rule in rules:
        assert not rule.fits or rule.peak_bytes <= result.budget_bytes
        assert rule.is_close == (rule.fits and rule.slower <= 0.01)


def test_a_step_that_fits_needs_no_rule() -> None:
    graph = chain()
    found = explain(graph, solve_within(graph, 2000, "cut"), each_s=AMPLE_S)
    assert found.simple is None
    assert said_of(found, "rule")[0].startswith("nothing is recomputed: the step fits as it is")


def test_cut_is_set_against_greedy_solvers_by_real_solves() -> None:
    graph, result = planned()
    found = against_greedy(graph, result.budget_bytes, each_s=AMPLE_S)
    assert found.cut.overhead == pytest.approx(result.overhead)
    times = [one.overhead for one in found.tried if one.fits]
    assert times == sorted(times)
    best = solve_within(graph, result.budget_bytes, found.tried[0].solver)
    assert found.slower == pytest.approx(best.time_us / result.time_us - 1)


def test_nothing_is_explained_where_nothing_fits() -> None:
    graph = chain()
    with pytest.raises(BudgetError, match="is below"):
        explain(graph, solve_within(graph, 10, "cut"))


def test_a_whole_gib_is_said_as_such() -> None:
    graph = chain()
    big: Any = {name: size * 2**30 for name, size in (("a", 20), ("b", 8), ("c", 20))}
    values = tuple(
        Value(value.name, big.get(value.name, value.size_bytes), value.producer)
        for value in graph.values
    )
    large = TrainingGraph("Large", graph.ops, values, (), ("ga",))
    steps = [Compute("a"), Compute("b"), Free("a"), Compute("c"), Compute("gc"), Free("c")]
    steps += [Compute("gb"), Free("b"), Compute("a"), Compute("ga")]
    made = Schedule.for_graph(large, steps, budget_bytes=32 * 2**30, solver="cut")
    result = evaluate_schedule(large, made, budget_bytes=32 * 2**30, lower_bound_us=0.0)
    found = explain(large, result, each_s=AMPLE_S)
    assert found.is_whole_gib
    assert said_of(found, "memory")[0].startswith("1 GiB more saves")


def test_by_hand_why_a_value_goes_to_the_host() -> None:
    """a comes back 9 us late; made again it would take 5. With all kept the peak is 1,250."""
    graph = copying_chain()
    (one,) = why(graph, copying_result(graph), ["a"], each_s=AMPLE_S)
    assert one.row.verdict == "offload"
    assert (one.copying_us, one.staying_bytes) == (9.0, 1250)
    assert one.turned
    assert one.turned.extra_us == -4.0
    said = why_text(one, 1160)
    assert "goes to the host, since copying costs 9.0 us a step here and recomputing 5.0 us" in said
    assert "if it stayed and nothing else changed, the peak would be 1.2 KiB, 0.1 KiB over" in said
    assert said.endswith("so this plan is not the best")


def test_a_value_of_an_op_that_must_not_run_again_still_goes_to_the_host() -> None:
    graph = copying_chain()
    ops = tuple(msgspec.structs.replace(op, no_recompute="it draws") for op in graph.ops[:1])
    graph = msgspec.structs.replace(graph, ops=(*ops, *graph.ops[1:]))
    (one,) = why(graph, copying_result(graph), ["a"], each_s=AMPLE_S)
    assert one.turned is None
    assert "It must not run again: " in why_text(one, 1160)


def test_an_explanation_of_copies_has_their_lever_and_all_its_parts() -> None:
    graph = copying_chain()
    found = explain(graph, copying_result(graph), each_s=AMPLE_S)
    (lever,) = said_of(found, "levers")
    assert lever.startswith("copies to the host and back: -0.1 KiB for 25.7 % of a step")
    assert lever.endswith("Without it, the overhead is 14.3 %")
    assert found.moves
    assert found.least.least_bytes <= found.peak_bytes


def test_a_step_that_is_copied_for_nothing_needs_no_rule_and_does_not_fit_as_it_is() -> None:
    graph = copying_chain(gb_s=1.0)
    found = explain(graph, copying_result(graph), each_s=AMPLE_S)
    assert said_of(found, "rule") == [
        "nothing is recomputed: what does not fit is offloaded to the host"
    ]
