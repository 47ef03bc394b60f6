"""What each of several graphs may take, in numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from remat.graph_capture.errors import BudgetError
from remat.rewriter.inductor_replay import Replay
from remat.shared_budget import SharedBudget, forget_graphs, shared_budget


def noted(shared: SharedBudget, frame: tuple[int, int], static: int, saved: int, peak: int) -> None:
    step: Any = SimpleNamespace(static_bytes=static, dynamic_bytes=10)
    replay = Replay(peak, peak, saved, 0)
    shared.note(frame, step, replay, replay)


def test_a_later_graph_has_what_the_earlier_ones_leave() -> None:
    shared = SharedBudget()
    assert shared.held_bytes((0, 0), 100, 10) == 110
    noted(shared, (0, 0), static=100, saved=50, peak=70)
    assert shared.held_bytes((1, 0), 200, 10) == 210 + 160
    assert shared.base_bytes((1, 0), 370 + 5) == 375


def test_of_several_compilations_of_a_frame_the_largest_counts() -> None:
    shared = SharedBudget()
    noted(shared, (0, 0), static=100, saved=50, peak=70)
    noted(shared, (0, 1), static=100, saved=20, peak=70)
    assert shared.held_bytes((1, 0), 0, 0) == 160
    assert shared.held_bytes((0, 2), 100, 10) == 110


def test_parameters_of_later_graphs_are_there_while_earlier_ones_run() -> None:
    shared = SharedBudget()
    noted(shared, (0, 0), static=100, saved=50, peak=70)
    shared.require(180)
    noted(shared, (1, 0), static=200, saved=0, peak=1)
    shared.require(380)
    with pytest.raises(BudgetError, match="breaks into 2 graphs, and graph 0 needs"):
        shared.require(379)


def test_graphs_are_told_apart_by_their_options_until_dynamo_is_reset() -> None:
    options, others = {"budget": 1}, {"budget": 1}
    shared = shared_budget(options)
    assert shared_budget(options) is shared
    assert shared_budget(others) is not shared
    forget_graphs()
    assert shared_budget(options) is not shared


def test_dynamo_resets_the_backend() -> None:
    from remat.compile_backend import backend

    assert getattr(backend, "reset", None) is forget_graphs
