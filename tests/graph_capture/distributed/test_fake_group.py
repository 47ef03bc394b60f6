"""Steps of one rank of many, captured in one process: costs, and what a plan runs again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat.graph_capture.costs.cache import Profile
from remat.graph_capture.devices.links import RankLinks
from remat.graph_capture.devices.placement import meter_of
from remat.graph_capture.distributed.collectives import RETURNED, fake_ranks, is_collective_target
from remat.graph_capture.errors import AgreementError
from remat.graph_capture.graph import TrainingGraph
from tests.distributed.parallel_models import ROWS, parallelised, sequence_parallel, tensor_parallel

CHEAP = RankLinks(1e5, 1e5, 0.0, 0.0, 0.0, 1.0, "as fast as can be")
DEAR = RankLinks(1e-3, 1e-3, 1e5, 1e5, 0.0, 1.0, "a tenth of a second each")


def step(world_size: int, plan: Any = sequence_parallel) -> tuple[nn.Module, tuple[Tensor, ...]]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    return parallelised(mesh, plan)


def of_links(links: RankLinks) -> Profile:
    title = meter_of("cpu").title
    return Profile("cpu", title, str(torch.__version__), {}, ranks=links)


def collectives(graph: TrainingGraph) -> list[Any]:
    return [op for op in graph.ops if is_collective_target(op.target)]


@pytest.mark.parametrize("world_size", [2, 16])
def test_collectives_have_modelled_costs_and_what_is_waited_for_is_no_op(world_size: int) -> None:
    with fake_ranks(world_size):
        model, args = step(world_size)
        graph = remat.capture(model, args)
    found = collectives(graph)
    assert len(found) >= 6
    assert all(op.cost_origin == "modelled" and op.cost_us > 0 for op in found)
    assert not any("wait_tensor" in op.target for op in graph.ops)
    assert graph.cost_origin == "mixed"
    assert any("collectives are modelled" in note for note in graph.notes)


def test_a_rank_of_a_thousand_on_a_device_of_the_table() -> None:
    with fake_ranks(1024):
        mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("dp", "tp"))
        model, args = parallelised(mesh["tp"], tensor_parallel)
        graph = remat.capture(model, args, device="h100")
        assert remat.solve(graph, "75%", "cut").schedule is not None
    assert all(op.cost_origin == "modelled" for op in collectives(graph))
    assert any("356 GB/s in a node and 47.5 GB/s between" in note for note in graph.notes)


def test_parts_of_parameters_are_what_a_rank_holds() -> None:
    with fake_ranks(4):
        model, args = step(4)
        whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        resident = remat.capture(model, args, device="h100", optimizer="adamw").resident
    assert resident.parameters_bytes < 0.5 * whole_bytes
    assert resident.optimizer_bytes < 0.8 * whole_bytes


def test_a_gather_is_run_again_where_it_is_cheap_and_not_where_it_is_dear() -> None:
    again: dict[str, int] = {}
    with fake_ranks(4):
        model, args = step(4)
        for name, links in (("cheap", CHEAP), ("dear", DEAR)):
            graph = remat.capture(model, args, profile=of_links(links))
            schedule = remat.solve(graph, "70%", "cut").schedule
            assert schedule is not None
            runs = schedule.computations()
            again[name] = sum(runs[op.name] - 1 for op in collectives(graph))
    assert again["cheap"] > 0
    assert again["dear"] == 0


def test_a_collective_that_makes_an_output_runs_once_at_the_least_budget() -> None:
    with fake_ranks(4):
        args = (torch.randn(ROWS, 16),)
        graph = remat.capture(Returning(), args, profile=of_links(CHEAP))
        schedule = remat.solve(graph, "min", "cut").schedule
    returned = [op for op in collectives(graph) if set(op.outputs) & {*graph.outputs}]
    assert {op.phase for op in returned} == {"forward", "backward"}
    assert all(op.no_recompute == RETURNED for op in returned)
    assert any(not op.no_recompute for op in collectives(graph))
    assert schedule is not None
    assert all(schedule.computations()[op.name] == 1 for op in returned)


class Returning(nn.Module):
    """A sum over ranks is returned, one is used inside, and one is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        scale = functional.all_reduce(self.scale, "sum", dist.group.WORLD)
        inside = functional.all_reduce(torch.tanh(self.inner(x)), "sum", dist.group.WORLD)
        return functional.all_reduce(inside.sin() * scale, "sum", dist.group.WORLD)


class _Counted(TorchDispatchMode):
    """Counts the collectives that run on real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_traced = any("Fake" in kind.__name__ or "Functional" in kind.__name__ for kind in types)
        if is_collective_target(str(func)) and not is_traced:
            self.runs[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("clocked")
def test_no_collective_runs_while_a_rank_times_ops_by_itself() -> None:
    with fake_ranks(2):
        model, args = step(2)
        with _Counted() as counted:
            remat.capture(model, args, measure_again=True)
            remat.profile(model, args)
        assert counted.runs == Counter()
        with _Counted() as counted:
            model(*args).backward()
        assert counted.runs, "a step has them"


def test_nothing_trains_over_a_fake_group() -> None:
    with fake_ranks(2):
        model, args = step(2)
        with pytest.raises(AgreementError, match=r"torch's fake group"):
            remat.rematerialize(model, args, budget="75%", group=dist.group.WORLD)


class Reduced(nn.Module):
    """A linear map, and a sum over ranks in one of several ways."""

    def __init__(self, together: Any) -> None:
        super().__init__()
        self.inner, self.together = nn.Linear(16, 16), together

    def forward(self, x: Tensor) -> Tensor:
        return self.together(torch.tanh(self.inner(x))).square().mean()


def by_autograd_function(x: Tensor) -> Tensor:
    return torch.distributed.nn.functional.all_reduce(x)


def in_place(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def in_place_without_autograd(x: Tensor) -> Tensor:
    mean = x.detach().mean(0)
    dist.all_reduce(mean)
    return x - mean


def started_early(x: Tensor) -> Tensor:
    mean = x.detach().mean(0)
    work: Any = dist.all_reduce(mean, async_op=True)
    work.wait()
    return x - mean


def counted(x: Tensor) -> Tensor:
    """Over the number of all rows, which each rank knows of its own."""
    rows = torch.ones(()) * len(x)
    dist.all_reduce(rows)
    return x / rows


def spread(x: Tensor) -> Tensor:
    """A mean that comes from the first rank, gathered, and summed in parts."""
    mean = x.detach().mean(0)
    dist.broadcast(mean, 0)
    whole = mean.new_empty(2 * len(mean))
    dist.all_gather_into_tensor(whole, mean)
    part = torch.empty_like(mean)
    dist.reduce_scatter_tensor(part, whole)
    return x - part


def gathered_in_a_list(x: Tensor) -> Tensor:
    found = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(found, x.detach())
    return found[0] + found[1] + x


def functional_sum(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize(
    "together",
    [
        by_autograd_function,
        in_place_without_autograd,
        functional_sum,
        started_early,
        counted,
        spread,
    ],
)  # fmt: skip
def test_collectives_of_forward_are_ops(together: Any) -> None:
    with fake_ranks(2):
        graph = remat.capture(Reduced(together), (torch.randn(ROWS, 16),))
    assert collectives(graph)
    assert all("_c10d_functional" in op.target for op in collectives(graph))


@pytest.mark.parametrize(
    ("together", "name"), [(in_place, "all_reduce"), (gathered_in_a_list, "allgather")]
)
def test_a_collective_in_place_is_refused_with_a_way_out(together: Any, name: str) -> None:
    with fake_ranks(2), pytest.raises(remat.RematError) as raised:
        remat.capture(Reduced(together), (torch.randn(ROWS, 16),))
    said = str(raised.value)
    assert f"torch.distributed.{name} (" in said
    assert "test_fake_group.py:" in said
    assert "_functional_collectives.all_reduce(x, 'sum', group)" in said
