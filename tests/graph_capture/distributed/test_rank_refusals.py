"""What is refused of DTensors and of a rank alone, without other ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import remat
from remat.graph_capture.distributed.collectives import (
    NeedsOtherRanksError,
    fake_ranks,
    run_locally,
)
from remat.graph_capture.distributed.rank_refusals import refuse_draw
from remat.graph_capture.errors import CaptureError
from tests.distributed.parallel_models import parallelised, tensor_parallel
from tests.paths import ROOT


def test_a_rank_alone_fails_where_it_would_wait() -> None:
    with fake_ranks(2):
        with pytest.raises(NeedsOtherRanksError, match="waits for other ranks"):
            run_locally(lambda: dist.all_reduce(torch.ones(2)))
        assert run_locally(lambda: torch.ones(2).sum().item()) == 2


KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


@pytest.mark.parametrize("key", KEYS)
def test_an_op_of_somebodys_is_looked_into_wherever_its_kernel_is(key: str) -> None:
    with torch.library._scoped_library("remat_test", "FRAGMENT") as library, fake_ranks(2):
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: 2 * x, key)
        library.define("reduced(Tensor x) -> Tensor")
        library.impl("reduced", _reduced, key)
        ops = torch.ops.remat_test
        assert run_locally(lambda: ops.doubled(torch.ones(2))).tolist() == [2, 2]
        with pytest.raises(NeedsOtherRanksError):
            run_locally(lambda: ops.reduced(torch.ones(2)))


def test_an_op_of_custom_op_is_looked_into() -> None:
    made = torch.library.custom_op("remat_test::reduced_again", _reduced, mutates_args=())
    with fake_ranks(2), pytest.raises(NeedsOtherRanksError):
        run_locally(lambda: made(torch.ones(2)))


def _reduced(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def hides_a_collective() -> None:
    """Times a step with an op that waits for other ranks; prints where its cost is from."""
    with torch.library._scoped_library("remat_test", "FRAGMENT") as library:
        library.define("summed(Tensor x) -> Tensor")
        library.impl("summed", _reduced, "CPU")
        library.impl("summed", torch.empty_like, "Meta")

        class Hiding(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                hidden = torch.ops.remat_test.summed(x)
                return (self.inner(x) * hidden).square().mean()

        with fake_ranks(2):
            graph = remat.capture(Hiding(), (torch.randn(8, 8),))
    print(next(op for op in graph.ops if "summed" in op.target).cost_origin)


def test_a_custom_op_with_a_collective_inside_has_an_estimated_cost() -> None:
    """In a process of its own, in which nothing has run that the op's kernel may remember."""
    call = f"from {__name__} import hides_a_collective; hides_a_collective()"
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["estimated"]
    assert "waits for other ranks" in done.stderr


def test_dropout_of_a_dtensor_is_refused_on_another_device_than_a_cpu() -> None:
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        part = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        refuse_draw("Model", "aten.native_dropout.default", [part])
        mesh = init_device_mesh("meta", (2,))
        part = DTensor.from_local(torch.ones(2, device="meta"), mesh, [Shard(0)])
        with pytest.raises(
            CaptureError, match=r"dropout to 0.* draws random numbers for a DTensor"
        ):
            refuse_draw("Model", "aten.native_dropout.default", [part])


def test_dtensors_that_are_no_parameters_are_refused() -> None:
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        model, args = parallelised(mesh, tensor_parallel)
        part = DTensor.from_local(args[0], mesh, [Shard(0)])
        with pytest.raises(CaptureError, match=r"to_local.*args\[0\] is a DTensor"):
            remat.capture(model, (part,))
        returning = nn.Sequential(nn.Linear(8, 8))
        parallelize_module(returning, mesh, {"0": ColwiseParallel(use_local_output=False)})
        with pytest.raises(CaptureError, match=r"the result of Sequential is a DTensor"):
            remat.capture(returning, (torch.randn(4, 8),))
        with pytest.raises(CaptureError, match="leave out dynamic"):
            remat.capture(model, args, dynamic={"x": {0: ("n", 2, 256)}})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(CaptureError, match="cannot be updated during backward"):
            remat.rematerialize(model, args, optimizer_in_backward=optimizer, budget="75%")
