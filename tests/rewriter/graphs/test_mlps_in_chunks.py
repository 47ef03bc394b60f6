"""Steps whose MLPs run in chunks: eager's bits, the predicted peak, plans in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import remat
from remat.graph_capture.graph import TrainingGraph
from remat.ranks.same_order import agreed_load, agreed_rewrite
from remat.rewriter.plans.loading import plan_of, save_plan
from remat.schedules.derived import in_chunks
from remat.schedules.schedule import ChunkedRegion
from remat.solver import solve_within
from remat.solver.reductions.chunked_regions import named
from tests.graph_capture.chunking.mlp_models import MLPS, WIDTH, Block, Blocks, made
from tests.rewriter.graphs.least_in_chunks import require_lower_peak
from tests.rows import each_nth

DTYPES = (torch.float32, torch.bfloat16)


def require_each_choice_exact(
    model: Any, args: tuple[torch.Tensor, ...], graph: TrainingGraph
) -> None:
    """Each number of chunks that is offered gives eager's bits, in a step of its own."""
    for region in graph.regions:
        for choice in region.choices:
            chosen = (ChunkedRegion(region.name, choice.chunks, exact=True),)
            found = solve_within(in_chunks(graph, chosen), 1 << 60, "store_all").schedule
            assert found is not None
            module = agreed_rewrite(model, named(found, chosen, graph))
            assert remat.check(model, module, args, steps=1).differences == ()


@pytest.mark.parametrize("name", each_nth(8, MLPS))
def test_the_least_peak_falls_to_eagers_bits_and_as_predicted(name: str) -> None:
    model, args = made(name)
    require_lower_peak(model, args, 0.75)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", each_nth(5, MLPS))
def test_each_number_of_chunks_is_exact(name: str, dtype: torch.dtype) -> None:
    model, args = made(name, n_blocks=1, dtype=dtype)
    graph = remat.capture(model, args, split="exact")
    assert graph.regions
    require_each_choice_exact(model, args, graph)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MLPS)
@pytest.mark.parametrize(("rows", "hidden"), [(5, 130), (61, 200), (64, 256), (128, 512)])
def test_any_shape_is_exact_or_left_whole(
    name: str, rows: int, hidden: int, dtype: torch.dtype
) -> None:
    model, args = made(name, n_blocks=1, rows=rows, hidden=hidden, dtype=dtype)
    require_each_choice_exact(model, args, remat.capture(model, args, split="exact"))


def test_a_step_that_fits_stays_as_captured_at_the_same_cost() -> None:
    model, args = made("gelu", n_blocks=1, rows=256)
    with_mlps, without = remat.capture(model, args), remat.capture(model, args, split="none")
    assert with_mlps.regions
    found, expected = remat.solve(with_mlps, "100%"), remat.solve(without, "100%")
    assert found.schedule == expected.schedule
    assert found.lower_bound_us == expected.lower_bound_us
    assert found.status == expected.status


def test_a_kept_plan_runs_its_mlps_in_chunks_too(tmp_path: Path) -> None:
    model, args = made("swiglu", n_blocks=2)
    module = remat.rematerialize(model, args, budget="min", split="exact", check=False)
    assert module.schedule.chunks
    save_plan(plan_of(module), tmp_path / "plan.json")
    loaded = agreed_load(tmp_path / "plan.json", model, args)
    assert loaded.schedule == module.schedule
    assert remat.check(model, loaded, args, steps=1).differences == ()


def test_parameters_are_updated_during_a_backward_whose_mlps_run_in_chunks() -> None:
    import copy

    model, args = made("gelu", n_blocks=2)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fast = remat.rematerialize(
        model, args, optimizer_in_backward=optimizer, budget="min", split="exact"
    )
    assert fast.schedule.chunks
    assert fast.schedule.updates
    of_eager = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    torch.manual_seed(1)
    for _ in range(3):
        fast(*args).backward()
        optimizer.step()
    torch.manual_seed(1)
    for _ in range(3):
        of_eager.zero_grad()
        eager(*args).backward()
        of_eager.step()
    for mine, eagers in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, eagers)


def test_heads_and_mlps_run_in_chunks_together() -> None:
    torch.manual_seed(0)
    model = Blocks([Block(torch.nn.GELU()) for _ in range(2)], classes=500)
    args = torch.randn(4, 64, WIDTH), torch.randint(500, (256,))
    module = remat.rematerialize(model, args, budget="min", split="exact", check=True)
    (chunks,) = module.schedule.chunks
    assert chunks.region.startswith("_log_softmax, ")
