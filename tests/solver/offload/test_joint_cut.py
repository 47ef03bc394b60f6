"""The program of cuts with copies: its bound against exhaustive search, and its rows."""

from __future__ import annotations

import itertools
import random

import pytest

from remat.solver.backends.mip import Limits
from remat.solver.offload.joint_cut import JointCut
from remat.solver.problem import Problem
from tests.rows import rows
from tests.solver.offload.exhaustive_copies import Case, least_time_us, random_case

SLACK = 1 + 1e-6
TINY = Limits(time_limit_s=60.0)


def bounds_us(case: Case, rng: random.Random) -> list[float]:
    """The bounds of programs of one to three cuts."""
    problem = Problem.of(case.graph)
    places = [
        cuts
        for count in (1, 2, 3)
        for cuts in itertools.combinations(range(problem.n_ops), count)
        if count == 1 or rng.random() < 0.3
    ]
    made = [JointCut(problem, cuts, case.budget_bytes, links=case.links) for cuts in places]
    return [one.solve(TINY).bound_us for one in made]


@pytest.mark.parametrize("is_host_small", [False, True])
@pytest.mark.parametrize("seed", rows(range(10), lambda seed: seed == 0))
def test_no_bound_is_above_the_optimum(seed: int, is_host_small: bool) -> None:
    rng = random.Random(seed)
    found = tight = 0
    for _ in range(10 if seed else 4):
        case = random_case(rng, 5, is_host_small=is_host_small)
        optimum_us = least_time_us(case)
        if optimum_us is None or optimum_us == float("inf"):
            continue
        bounds = bounds_us(case, rng)
        assert max(bounds) <= optimum_us * SLACK
        found += 1
        tight += max(bounds) >= optimum_us / SLACK
    assert found >= 3
    assert tight >= found // 2
