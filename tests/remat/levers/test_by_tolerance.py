"""Where chunks give other bits than eager, an error says what they would need by tolerance."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import remat
from remat.graph_capture.chunking.regions import RegionCandidate
from remat.graph_capture.errors import BudgetError, named_as_flags
from remat.schedules.simulate import simulate

WORDS, WIDTH, TOKENS = 4096, 16, 256
BUDGET = "2MiB"


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(self.body(x)), y)


def refused(budget: str = BUDGET, **options: str) -> str:
    batch = torch.randn(TOKENS, WIDTH), torch.randint(0, WORDS, (TOKENS,))
    with pytest.raises(BudgetError) as caught:
        remat.rematerialize(LanguageModel(), batch, budget=budget, time_limit_s=20, **options)
    return str(caught.value)


@pytest.fixture
def other_bits_on_two_threads(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """As kernels that share rows out to threads: chunks give eager's bits on one thread alone."""

    def has_them(_: RegionCandidate) -> bool:
        return torch.get_num_threads() == 1

    monkeypatch.setattr("remat.graph_capture.chunking.same_bits.matches_eager_bitwise", has_them)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("other_bits_on_two_threads")
def test_a_budget_that_chunks_would_fit_names_tolerance_and_one_thread() -> None:
    said = refused()
    assert "try split='tolerance' (the lowest known peak is then " in said
    assert "OMP_NUM_THREADS=1" in said
    assert torch.get_num_threads() == 2
    least = float(said.partition("peak is then ")[2].split(" ")[0])
    asked = said.partition("is below ")[2].split(" ")[0]
    assert 0 < least < float(asked)
    with named_as_flags():
        assert "try --split tolerance (the lowest known peak is then " in refused()


@pytest.mark.usefixtures("other_bits_on_two_threads")
def test_what_is_named_is_what_the_judge_finds() -> None:
    said = refused(split="exact")
    batch = torch.randn(TOKENS, WIDTH), torch.randint(0, WORDS, (TOKENS,))
    graph = remat.capture(LanguageModel(), batch, split="tolerance")
    found = remat.solve(graph, BUDGET, time_limit_s=20)
    least_bytes = found.least_feasible_bytes or found.peak_bytes
    if found.schedule is not None:
        assert simulate(graph, found.schedule).peak_bytes == least_bytes
    assert f"lowest known peak is then {least_bytes / 2**20:.2f} MiB" in said


def test_without_chunks_nothing_is_said_of_them() -> None:
    assert "tolerance" not in refused(split="none")
    assert "tolerance" not in refused("100KiB", split="tolerance")
