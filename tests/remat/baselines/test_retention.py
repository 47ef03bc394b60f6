"""Retention intervals: against exhaustive search, reference data and the simulator."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.baselines import retention
from remat.baselines.retention import (
    Retention,
    RetentionModel,
    Stages,
    event_of,
    sequence_of_stages,
    stage_of,
    stages_of_runs,
    start_of,
)
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import Progress, solve_within
from remat.solver.cuts.cut import Cut
from remat.solver.search import Search
from tests.graphs import graph_from_nodes, peak_bytes_of, tiny_cases
from tests.limits import AMPLE_S
from tests.paths import BENCH
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.random_graphs import (
    chain,
    gpt_like,
    random_graph,
    resnet_like,
    training_graphs,
)

LIMIT = "computations a value, in captured order inside a stage"


def reference(name: str) -> tuple[TrainingGraph, dict[str, Any]]:
    path = BENCH / f"{name}.json"
    if not path.exists():
        pytest.skip(f"the reference instances are not at {BENCH}")
    data = json.loads(path.read_text())
    return graph_from_nodes(data), data["reference"]


def cold(graph: TrainingGraph, budget_bytes: int, computations: int) -> float | None:
    """The program alone, solved to its end without a start; its schedule is judged."""
    search = Search(graph, budget_bytes, "retention")
    nothing: Stages = [[op] for op in range(len(graph.ops))]
    room_bytes = budget_bytes - search.problem.resident_bytes
    model = RetentionModel(search.problem, room_bytes, computations, nothing, is_feasible=False)
    assert model.solve(AMPLE_S)
    if model.best is None:
        return None
    assert search.offer_sequence(sequence_of_stages(model.best))
    return search.best_key[0]


def test_event_numbers() -> None:
    events = [event_of(stage, op) for stage in range(40) for op in range(stage + 1)]
    assert events == list(range(len(events)))
    assert all(stage_of(event_of(stage, op), op) == stage for stage in range(40) for op in range(9))


@pytest.mark.parametrize("data", tiny_cases())
def test_four_computations_reach_the_published_optimum(data: dict[str, Any]) -> None:
    graph = graph_from_nodes(data)
    for row in data["reference"]["rows"][::4]:
        assert cold(graph, row["budget"], 4) == row["optimal_cost_fixed_order"]


@pytest.mark.parametrize("computations", [2, 4])
def test_never_better_than_exhaustive_search_and_mostly_equal(computations: int) -> None:
    """With every feature of a graph: holds, pins, workspace, several outputs."""
    source, equal, cases = random.Random(3), 0, 0
    for _ in range(25):
        n_ops = source.randint(3, 7)
        graph = random_graph(source, n_ops, source.randint(0, n_ops))
        peak_bytes = peak_bytes_of(graph)
        for budget_bytes in (peak_bytes - 1, peak_bytes - 4):
            optimum = least_time_us(graph, budget_bytes)
            found = cold(graph, budget_bytes, computations)
            assert found is None or (optimum is not None and found >= optimum)
            equal += found == optimum
            cases += 1
    assert equal >= cases - 2


@settings(max_examples=25, deadline=None)
@given(training_graphs(max_ops=7), st.integers(0, 9), st.sampled_from([0, 1, 2]))
def test_results_are_valid_and_claim_no_more_than_cut(
    graph: TrainingGraph, less_bytes: int, computations: int
) -> None:
    budget_bytes = max(0, peak_bytes_of(graph) - less_bytes)  # some need less than 9 bytes
    result = Retention(computations=computations).solve(graph, budget_bytes)
    optimum = least_time_us(graph, budget_bytes)
    if optimum is None:
        assert result.schedule is None
    if result.schedule is not None:
        assert simulate(graph, result.schedule).peak_bytes <= budget_bytes
        assert result.lower_bound_us <= optimum * (1 + 1e-9) <= result.time_us * (1 + 2e-9)
    known = Cut(gap=0.0).solve(graph, budget_bytes)
    if known.schedule is not None:  # a result without one claims no bound on the time
        assert result.lower_bound_us <= known.lower_bound_us * (1 + 1e-9)
    assert known.schedule is None or 0 < result.time_us <= known.time_us or graph.time_us == 0


def test_linear4_needs_three_computations() -> None:
    graph, data = reference("checkmate_linear4")
    budget_bytes = data["no_remat_peak"] * 75 // 100
    assert cold(graph, budget_bytes, 2) is None
    assert cold(graph, budget_bytes, 3) == least_time_us(graph, budget_bytes)


@pytest.mark.parametrize("name", ["checkmate_test", "checkmate_linear4"])
def test_exact_rows_are_reached(name: str) -> None:
    graph, data = reference(name)
    for row in data["exact"]["rows"]:
        result = solve_within(graph, row["budget"], "retention", computations=0)
        optimum = row["optimal_cost_fixed_order"]
        assert (None if result.schedule is None else result.time_us) == optimum


@pytest.mark.parametrize("name", ["moccasin_fcn8", "moccasin_vgg16"])
def test_published_results_are_reached(name: str) -> None:
    """They are optimal for two computations a value; `cut` may know of a third."""
    graph, data = reference(name)
    for row in data["peer_runs"]["rows"]:
        result = solve_within(graph, row["budget"], "retention", time_limit_s=AMPLE_S)
        assert result.time_us <= row["cost"]
        assert result.peak_bytes <= row["budget"]


def test_two_computations_of_a_published_graph_cold() -> None:
    graph, data = reference("moccasin_vgg16")
    for row in data["peer_runs"]["rows"]:
        assert cold(graph, row["budget"], 2) == row["cost"]


def stopped_by_the_first(patch: pytest.MonkeyPatch) -> None:
    """Programs are searched until they have a solution."""
    watcher = retention._watcher

    def stopping(made: RetentionModel) -> Any:
        class First(type(watcher(made))):
            def on_solution_callback(self) -> None:
                super().on_solution_callback()
                self.stop_search()

        return First()

    patch.setattr(retention, "_watcher", stopping)


def test_a_schedule_as_a_hint_is_feasible_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program bounded by the start's own cost, ended by its first solution."""
    graph = resnet_like(4)
    search = Search(graph, 52 << 20, "retention", AMPLE_S)
    Cut(gap=0.02).run(search)
    assert search.best is not None
    stages = start_of(search)
    assert stages == stages_of_runs(search.problem, sequence_of_stages(stages))
    room_bytes = search.budget_bytes - search.problem.resident_bytes
    model = RetentionModel(search.problem, room_bytes, 2, stages, is_wide=True)
    stopped_by_the_first(monkeypatch)
    model.solve(AMPLE_S)
    assert model.best is not None
    assert search.offer_sequence(sequence_of_stages(model.best))


def test_the_message_says_what_was_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(random.Random(16), 8, 4)
    budget_bytes = peak_bytes_of(graph) - 1
    monkeypatch.setattr(Cut, "run", lambda self, search: None)
    result = Retention().solve(graph, budget_bytes)
    optimum = least_time_us(graph, budget_bytes)
    assert result.time_us == optimum != graph.time_us
    assert result.message == f"optimal among schedules with at most 2 {LIMIT}"
    assert result.status == "feasible"
    assert result.lower_bound_us == graph.time_us


def test_computations_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, data = reference("checkmate_linear4")
    budget_bytes = data["no_remat_peak"] * 75 // 100
    monkeypatch.setattr(Cut, "run", lambda self, search: None)
    assert Retention(computations=2).solve(graph, budget_bytes).schedule is None
    found = Retention(computations=0).solve(graph, budget_bytes)
    assert found.time_us == least_time_us(graph, budget_bytes)
    assert found.message.startswith("optimal among schedules with at most 3 computations")


@pytest.mark.slow
def test_the_same_schedule_twice() -> None:
    graph = gpt_like(1)
    budget_bytes = peak_bytes_of(graph) * 60 // 100
    first, second = (Retention().solve(graph, budget_bytes) for _ in range(2))
    assert first.schedule == second.schedule


def test_a_large_graph_is_left_to_cut() -> None:
    graph = chain(24)
    result = Retention(most_ops=20).solve(graph, peak_bytes_of(graph) * 30 // 100)
    assert result.schedule is not None
    assert result.status == "optimal" or "more than most_ops = 20" in result.message


def test_an_interrupt_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(random.Random(16), 8, 4)
    budget_bytes = peak_bytes_of(graph) - 1
    whole = RetentionModel.solve

    def solve_then_stop(self: RetentionModel, *effort: float) -> bool:
        whole(self, effort[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(Cut, "run", lambda self, search: None)
    monkeypatch.setattr(RetentionModel, "solve", solve_then_stop)
    result = Retention().solve(graph, budget_bytes)
    assert result.schedule is not None
    assert "interrupted" in result.message
    assert result.status == "time limit"


def test_progress_names_the_limit() -> None:
    graph = random_graph(random.Random(16), 8, 4)
    heard: list[Progress] = []
    Retention(progress=heard.append).solve(graph, peak_bytes_of(graph) - 1)
    assert heard


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"computations": -1}, "computations must be 0 (2, then 3) or more, not -1"),
        ({"workers": 0}, "workers must be 1 or more, not 0"),
        ({"seed": -2}, "seed must be 0 or more, not -2"),
        ({"most_ops": -5}, "most_ops must be 0 or more, not -5"),
    ],
)
def test_bad_options_are_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(SolverError) as caught:
        Retention(**options)  # type: ignore[arg-type]
    assert text in str(caught.value)
