"""The chain of levers: who is asked in which order, what is judged, what is refused together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from remat.graph_capture.errors import GraphError, SolverError
from remat.schedules.levers import REDUCTIONS, attribute_at
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.solver.reductions import reduction
from remat.solver.reductions.reduction import (
    ASKED,
    LEVER_PAIRS,
    VARIABLE,
    Question,
    Reduction,
    fold,
    refuse_pairs,
)
from tests.links import links, with_links
from tests.solver.graphs.random_graphs import gpt_like


class Slower(Reduction[Question]):
    """Asks of a graph whose ops take twice their time, and proves half of what that proves."""

    def __init__(self, option: str, heard: list[str]) -> None:
        self.option, self.heard = option, heard

    def accepts(self, question: Question) -> bool:
        return self.option in question.options

    def apply(self, question: Question) -> tuple[Question, Question]:
        self.heard.append(self.option)
        ops = (msgspec.structs.replace(op, cost_us=2 * op.cost_us) for op in question.graph.ops)
        graph = msgspec.structs.replace(question.graph, ops=tuple(ops))
        options = {name: one for name, one in question.options.items() if name != self.option}
        return replace(question, graph=graph, options=options), question

    def invert(self, schedule: Schedule, inverse: Question) -> Schedule:
        return schedule

    def bound_us(self, found: Result, inverse: Question) -> float:
        return inverse.graph.time_us


def asked(solver: str = "store_all", **options: object) -> Question:
    return Question(gpt_like(1), 1 << 60, solver, options=options)


def test_levers_are_asked_in_their_order_and_each_takes_its_option_out() -> None:
    heard: list[str] = []
    levers = tuple(Slower(name, heard) for name in ("first", "unasked", "second"))
    found = fold(asked(first=1, second=1), levers)
    assert heard == ["first", "second"]
    assert found.schedule is not None
    assert found.schedule.options == {}


def test_an_answer_is_judged_on_the_graph_that_was_asked() -> None:
    question = asked(first=1)
    found = fold(question, (Slower("first", []),))
    assert found.schedule is not None
    judged = simulate(question.graph, found.schedule)
    assert (found.time_us, found.peak_bytes) == (judged.time_us, judged.peak_bytes)
    assert (found.status, found.lower_bound_us) == ("optimal", question.graph.time_us)


def test_an_option_that_no_lever_takes_is_the_solvers_to_refuse() -> None:
    with pytest.raises(SolverError, match="solver 'store_all' has no option 'first'"):
        fold(asked(first=1), ())


class Smaller(Slower):
    """Says that what ops make takes fewer bytes than it does."""

    def apply(self, question: Question) -> tuple[Question, Question]:
        changed, inverse = super().apply(question)
        values = tuple(
            msgspec.structs.replace(value, size_bytes=value.size_bytes // 2)
            for value in changed.graph.values
        )
        return replace(
            changed, graph=msgspec.structs.replace(changed.graph, values=values)
        ), inverse


class Boastful(Slower):
    """Gives an answer whose time is not that of its schedule."""

    def solve(self, question: Question, rest: Any) -> Result:
        found = super().solve(question, rest)
        return msgspec.structs.replace(found, time_us=found.time_us / 2, lower_bound_us=0.0)


def test_a_lever_that_breaks_a_rule_of_a_legal_step_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(GraphError, match=r"Smaller broke a rule .*: no value of the caller"):
        fold(asked(first=1), (Smaller("first", []),))
    with pytest.raises(SolverError, match=r"answer of Boastful breaks a rule: figures are"):
        fold(asked(first=1), (Boastful("first", []),))
    monkeypatch.setenv(VARIABLE, "0")
    assert fold(asked(first=1), (Boastful("first", []),)).schedule is not None


BOTH = {
    ("copies", "recompute"): (
        "auto",
        {"recompute": ("f3",)},
        "leave out recompute= or host=: pins to recompute are not planned with copies",
    ),
    ("copies", "free order"): (
        "auto",
        {"options": {"order": "free"}},
        "take order fixed, or leave out host=: order free is not planned with copies to the host",
    ),
}


@pytest.mark.parametrize("pair", LEVER_PAIRS, ids=" and ".join)
def test_a_pair_is_refused_before_anything_runs(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    solver, given, text = BOTH[pair]
    graph = with_links(gpt_like(1), links())
    question = replace(Question(graph, 1 << 60, solver), **given)
    monkeypatch.setattr(reduction, "fold", None)
    with pytest.raises(SolverError) as caught:
        reduction.solve_question(question)
    assert str(caught.value) == text
    refuse_pairs(replace(question, graph=gpt_like(1)))
    refuse_pairs(Question(graph, 1 << 60, solver))
    refuse_pairs(replace(question, solver="chen_sqrt"))


def test_pairs_name_what_can_be_asked_and_every_row_of_the_table_is_a_lever() -> None:
    assert {name for pair in LEVER_PAIRS for name in pair} == set(ASKED)
    for lever in REDUCTIONS.values():
        assert lever.change or issubclass(attribute_at(lever.reduction), Reduction)
        assert bool(lever.change) == bool(lever.option)
        assert all(callable(attribute_at(one)) for one in (lever.change, lever.emitter) if one)
