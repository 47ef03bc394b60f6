"""Plans of caches on disk: taken by the next process, judged, and never in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import remat
from remat.budgets import parse_budget
from remat.caches import known_plans
from remat.caches.known_plans import FILES, KeptSolve, keep_solve, kept_solve
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.solver import solve_within
from tests.paths import ROOT
from tests.remat.caches.counted import ROWS, counted, net, require_eagers_step, rows
from tests.solver.graphs.random_graphs import chain
from tests.steps import schedules_of

ASKED = "options"
WORDS = 4096


def found_for(graph: TrainingGraph, share: float = 0.75) -> Result:
    everything = solve_within(graph, 2**62, "store_all").peak_bytes
    result = solve_within(graph, int(share * everything), "cut")
    assert result.schedule is not None
    return result


def kept(graph: TrainingGraph, result: Result, asked: str = ASKED) -> Result | None:
    found = kept_solve(graph, parse_budget(result.budget_bytes), asked, lambda same: same)
    return found and found.result


def keep(graph: TrainingGraph, result: Result) -> Path:
    keep_solve(graph, parse_budget(result.budget_bytes), ASKED, result)
    (path,) = FILES.path("").iterdir()
    return path


def test_what_was_solved_comes_back_judged(planned: Path) -> None:
    graph = chain(12)
    result = found_for(graph)
    assert kept(graph, result) is None
    assert keep(graph, result).parent == planned
    again = kept(graph, result)
    assert again is not None
    assert again.schedule == result.schedule
    assert (again.peak_bytes, again.overhead) == (result.peak_bytes, result.overhead)
    assert again.gap == pytest.approx(result.gap)


def test_another_question_has_no_answer(planned: Path) -> None:
    graph = chain(12)
    result = found_for(graph)
    keep(graph, result)
    dearer = msgspec.structs.replace(graph.ops[3], cost_us=graph.ops[3].cost_us + 1)
    others = (*graph.ops[:3], dearer, *graph.ops[4:])
    assert kept(msgspec.structs.replace(graph, ops=others), result) is None
    assert kept(graph, result, "other options") is None
    assert kept(graph, found_for(graph, 0.9)) is None
    assert kept(chain(13), result) is None
    moved = tuple(msgspec.structs.replace(op, source="file:9") for op in graph.ops)
    assert kept(msgspec.structs.replace(graph, ops=moved), result) is not None


def test_another_release_does_not_take_it(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(12)
    result = found_for(graph)
    keep(graph, result)
    monkeypatch.setattr(known_plans, "sources_key", lambda: "another release")
    assert kept(graph, result) is None


def test_options_without_a_lasting_text_keep_nothing(planned: Path) -> None:
    graph = chain(12)
    result = found_for(graph)
    keep_solve(graph, parse_budget(result.budget_bytes), repr(object()), result)
    assert not planned.exists()


@pytest.mark.parametrize("data", [b"", b"cut short", b"0" * 64 + b"\n{}"])
def test_a_damaged_file_is_told_of(data: bytes, planned: Path) -> None:
    graph = chain(12)
    result = found_for(graph)
    keep(graph, result).write_bytes(data)
    with pytest.warns(UserWarning, match="which is made anew: it is damaged"):
        assert kept(graph, result) is None


@pytest.mark.parametrize("what", ["schedule", "bound", "budget"])
def test_what_cannot_be_is_told_of(what: str, planned: Path) -> None:
    graph = chain(12)
    result = found_for(graph)
    path = keep(graph, result)
    whole = FILES.read(path.name, lambda data: msgspec.json.decode(data, type=KeptSolve))
    assert whole is not None
    changed: dict[str, Any] = {
        "schedule": {"schedule": found_for(chain(9)).schedule},
        "bound": {"lower_bound_us": 1e12},
        "budget": {"budget_bytes": result.peak_bytes - 1},
    }[what]
    FILES.write(path.name, msgspec.json.encode(msgspec.structs.replace(whole, **changed)))
    with pytest.warns(UserWarning, match="which is made anew"):
        assert kept(graph, result) is None


def test_what_is_free_may_be_a_little_more_or_less(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, auto = chain(12), parse_budget("auto")
    result = found_for(graph)
    keep_solve(graph, auto, ASKED, result)
    for factor, is_taken in ((1.0, True), (1.02, True), (1.3, False), (0.2, False)):
        free_bytes = int(factor * result.budget_bytes)
        monkeypatch.setattr("remat.budgets._auto_bytes_for", lambda _, free=free_bytes: free)
        assert (kept_solve(graph, auto, ASKED, lambda same: same) is not None) == is_taken


def test_a_second_cache_takes_the_plan_and_compares_its_first_step(planned: Path) -> None:
    made: list[Any] = []
    for _ in range(2):
        model = net()
        made.append(remat.rematerialize(model, budget="60%", solver="cut"))
        with counted() as counts:
            require_eagers_step(made[-1], model, rows(ROWS))
        assert counts.solves == (1 if len(made) == 1 else 0)
    assert made[0].audit.audited == 0
    assert made[1].audit.audited == 1
    first, second = (schedules_of(one)[0] for one in made)
    assert first == second
    assert len(list(planned.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_told_of_once(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned.write_text("no folder")
    model = net()
    fast = remat.rematerialize(model, budget="60%", solver="cut", check=False)
    with pytest.warns(UserWarning, match="plans are not kept .*REMAT_CACHE") as told:
        require_eagers_step(fast, model, rows(ROWS))
    assert sum("are not kept" in str(one.message) for one in told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = remat.rematerialize(model, budget="60%", solver="cut", check=False)
        require_eagers_step(again, model, rows(ROWS))


def test_a_plan_in_chunks_is_taken_with_the_costs_of_its_chunks(planned: Path) -> None:
    tokens = torch.randint(WORDS, (64, 32), generator=torch.Generator().manual_seed(1))
    made: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        head = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS))
        fast = remat.rematerialize(head, budget="50%", loss_fn=loss_of_tokens)
        with counted() as counts:
            fast(tokens, target=tokens).backward()
        (schedule,) = schedules_of(fast)
        made.append((counts.solves > 0, schedule))
    assert made[0][1].chunks
    assert made == [(True, made[0][1]), (False, made[0][1])]


def loss_of_tokens(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


@pytest.mark.slow
def test_the_next_process_solves_nothing(tmp_path: Path) -> None:
    def said() -> Any:
        kept = {"REMAT_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
        text = subprocess.run(
            [sys.executable, "-m", "tests.remat.caches.one_process"], cwd=ROOT,
            env={**os.environ, **kept}, stdout=subprocess.PIPE, text=True, check=True,
        ).stdout  # fmt: skip
        return json.loads(text.splitlines()[-1])

    first, second = said(), said()
    assert (first[0] > 0, second[0]) == (True, 0)
    assert first[1:] == second[1:]
