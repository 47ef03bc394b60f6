"""Plans of the solver `joint` for a GPT with dropout: eager's bits, and the simulator's peak."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import remat
from examples.gpt import GPT, Sizes
from remat.graph_capture.graph import TrainingGraph
from remat.rewriter.checking.check import check
from remat.rewriter.rewriting import rewrite
from remat.schedules.schedule import Offload
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.bounds.least_peak import floor_above
from remat.solver.problem import Problem
from tests.graphs import UNLIMITED_BYTES
from tests.limits import AMPLE_S
from tests.links import links, with_links

SIZES = Sizes(layers=3, width=64, heads=4, seq=32, batch=4, vocab=128, dropout=0.1)
FAST_GB_S, SLOW_GB_S = 1.0, 0.02
"""Over the second, part of what leaves the device is cheaper to compute again."""
GAPS = {FAST_GB_S: 1e-3, SLOW_GB_S: 0.02}
"""At the second, searches end soon: what is shown of a plan holds however good it is."""


@functools.cache
def gpt(gb_s: float) -> tuple[nn.Module, tuple[Tensor, ...], TrainingGraph]:
    torch.manual_seed(0)
    model, drawn = GPT(SIZES), torch.randint(SIZES.vocab, (SIZES.batch, SIZES.seq + 1))
    args = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    return model, args, with_links(remat.capture(model, args, split="none"), links(gb_s))


@pytest.mark.parametrize("gb_s", [FAST_GB_S, pytest.param(SLOW_GB_S, marks=pytest.mark.slow)])
@pytest.mark.parametrize("f", [0.5, 0.3, 0.15])
def test_exact_with_the_judges_peak_to_the_byte(f: float, gb_s: float) -> None:
    model, args, graph = gpt(gb_s)
    most = solve_within(graph, UNLIMITED_BYTES, "store_all").peak_bytes
    floor = floor_above(Problem.of(graph), 0)
    assert floor is not None
    budget_bytes = int(floor.size_bytes + f * (most - floor.size_bytes))
    options = {"time_limit_s": AMPLE_S, "gap": GAPS[gb_s]}
    schedule = solve_within(graph, budget_bytes, "joint", **options).schedule
    assert schedule is not None
    again = sum(count > 1 for count in schedule.computations().values())
    assert any(isinstance(step, Offload) for step in schedule.steps)
    assert gb_s == FAST_GB_S or again
    found = check(model, rewrite(model, schedule, args, costed=graph), args, steps=1)
    assert found.differences == ()
    assert found.gradients == found.gradients_total
    assert found.plan_peak_bytes == simulate(graph, schedule).peak_bytes <= budget_bytes
