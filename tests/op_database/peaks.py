"""Peaks of plans that keep everything beside eager's, of one step of each op that torch tests.

``python -m tests.op_database.peaks`` prints the worst ten. A model feeds an op of torch's database
with its parameters; its loss is the sum of what the op returns.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

import remat
from remat.graph_capture import measure_costs, trace
from remat.graph_capture.errors import CaptureError
from remat.rewriter.checking.measured_step import measured_step
from remat.schedules.simulate import simulate
from tests.fixed_costs import REPLACED, patched
from tests.steps import schedule_of

# Torch's own tests forbid to set flags of backends, which others that run in this process do.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

SAMPLES = 6
"""Of the largest samples of an op, so many are tried until one can be captured."""
SLACK_BYTES = 64
"""Samples are tiny, so that a few numbers of the loss count."""


class OpModel(nn.Module):
    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.op, self.leaves = op, leaves
        self.given = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        fed = [i for i in self.given if leaves[i].requires_grad]
        self.fed = {i: place for place, i in enumerate(fed)}
        self.own = nn.ParameterList(nn.Parameter(leaves[i].detach().clone()) for i in fed)
        self.given = [i for i in self.given if i not in self.fed]

    @property
    def batch(self) -> tuple[Tensor, ...]:
        return tuple(self.leaves[i].detach() for i in self.given)

    def forward(self, *batch: Tensor) -> Tensor:
        leaves = list(self.leaves)
        for i, place in self.fed.items():
            leaves[i] = self.own[place]
        for i, tensor in zip(self.given, batch, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        found = pytree.tree_leaves(self.op(*args, **kwargs))
        sums = [x.sum() for x in found if isinstance(x, Tensor) and x.requires_grad]
        return torch.stack([one.real if one.is_complex() else one for one in sums]).sum()


@dataclass(frozen=True)
class Peaks:
    """Of one op: eager's, measured; that of the plan which keeps all; the least within eager's.

    `least_bytes` is that of the plan which keeps all, if it fits.
    """

    name: str
    eager_bytes: int
    kept_bytes: int
    least_bytes: int


def differentiable_ops() -> list[Any]:
    return [op for op in op_db if op.supports_autograd and torch.float32 in op.dtypes]


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


def peaks_of(op: Any) -> Peaks | None:
    """None where no sample can be captured, or eager cannot differentiate any."""
    torch.manual_seed(0)
    samples = sorted(
        op.sample_inputs("cpu", torch.float32, requires_grad=True), key=_size_of, reverse=True
    )
    for sample in samples[:SAMPLES]:
        model = OpModel(op.op, sample)
        try:
            model(*model.batch).backward()
            model.zero_grad()
            traced = trace(model, model.batch)
        except (RuntimeError, TypeError, CaptureError):
            continue
        return _measured(name_of(op), model, traced)
    return None


def _measured(name: str, model: OpModel, traced: Any) -> Peaks:
    eager_bytes = measured_step(model, model, model.batch).peak_bytes
    graph = measure_costs(traced)
    kept_bytes = simulate(graph, schedule_of(graph, "store_all")).peak_bytes
    least_bytes = kept_bytes
    if kept_bytes > eager_bytes + SLACK_BYTES:
        solved = remat.solve(graph, eager_bytes + SLACK_BYTES, time_limit_s=5)
        least_bytes = solved.peak_bytes if solved.schedule else solved.least_feasible_bytes
    return Peaks(name, eager_bytes, kept_bytes, least_bytes)


def _size_of(sample: Any) -> int:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(x.numel() for x in leaves if isinstance(x, Tensor))


def all_peaks() -> Iterator[Peaks]:
    for op in differentiable_ops():
        found = peaks_of(op)
        if found is not None:
            yield found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with patched(REPLACED):
        found = sorted(all_peaks(), key=lambda one: -one.kept_bytes / one.eager_bytes)
    print(f"{len(found)} ops. Of a plan over eager's peak: all kept, and the least that fits")
    for one in found[:10]:
        kept, least = (n / one.eager_bytes for n in (one.kept_bytes, one.least_bytes))
        print(f"{one.name:40} {one.eager_bytes:8} bytes {kept:6.2f} {least:6.2f}")


if __name__ == "__main__":
    main()
