"""Ways of training a part that `remat.cluster.parallelize` made, beside one rank of plain torch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import remat
from remat.cluster.mesh import ClusterRequest, MeshSpec
from remat.cluster.planning import plan_cluster
from tests.distributed.pipeline.models import VOCAB, Decoder, token_loss
from tests.distributed.ways.outcome import Outcome

_PLANS = {  # by column: sequences of a step, and the mesh
    "P": (64, MeshSpec(1, 1, 1, 4, 1, 2)),
    "Q": (32, MeshSpec(1, 1, 2, 4, 1, 1)),
}
_FACTORY = "tests/distributed/pipeline/models.py:decoder"
_MICRO, _SEQUENCES, _SEQ = 4, 32, 64  # of a microbatch, of a rank's batch, tokens of each
_FAR = 0.03  # of a gradient's norm: bfloat16's rounding


def make_plan(folder: Path, column: str) -> None:
    """In a process without ranks."""
    batch, asked = _PLANS[column]
    request = ClusterRequest(2, batch, _SEQ, "h100", 8, "64MiB", asked=asked)
    found = plan_cluster(_FACTORY, request, 0).file
    assert found is not None
    (folder / f"{column}.json").write_bytes(found.to_json())


class Trained:
    """A part, the whole model of one rank, and what both have been given."""

    def __init__(self, column: str, loss: Callable[..., Tensor] = token_loss) -> None:
        self.is_sharded, self.loss = column == "P", loss
        torch.manual_seed(0)
        self.whole = Decoder().to(torch.bfloat16)
        file = Path(sys.argv[1], f"{column}.json")  # beside what the worker finds
        one, mesh = self.batches(0)[0][:_MICRO], remat.cluster.cluster_mesh(file, "cpu")
        self.part: Any = remat.cluster.parallelize(
            copy.deepcopy(self.whole), file, mesh, (one,), loss_fn=loss, target=one
        )

    def batches(self, seed: int) -> list[Tensor]:
        """Of all ranks whose batches differ."""
        n = 2 if self.is_sharded else 1
        makers = (torch.Generator().manual_seed(10 * seed + i) for i in range(n))
        return [torch.randint(VOCAB, (_SEQUENCES, _SEQ), generator=one) for one in makers]

    def step(self, seed: int) -> None:
        each = self.batches(seed)
        own = each[dist.get_rank() if self.is_sharded else 0]
        self.part.schedule.step(own, target=own)
        pieces = [piece for batch in each for piece in batch.split(_MICRO)]
        for piece in pieces:
            (self.loss(self.whole(piece), piece) / len(pieces)).backward()

    def off(self) -> float:
        """By how much gradients differ from those of one rank, as a part of their norms."""
        expected = dict(self.whole.named_parameters())
        if isinstance(self.loss, nn.Module):
            of_loss = self.loss.named_parameters()
            expected |= {f"loss_fn.{name}": p for name, p in of_loss}
        most = 0.0
        for name, p in self.part.named_parameters():
            own, whole = p.grad, expected[name].grad
            assert own is not None
            assert whole is not None
            own = own.full_tensor() if hasattr(own, "full_tensor") else own
            off = (own.float() - whole.float()).norm() / whole.float().norm()
            most = max(most, float(off))
        return most

    def outcome(self) -> Outcome:
        off = self.off()
        return Outcome("within") if off <= _FAR else Outcome("differs", f"off by {off:.1g}")


def one_step(column: str) -> Outcome:
    it = Trained(column)
    it.step(1)
    return it.outcome()


def two_steps_summed(column: str) -> Outcome:
    it = Trained(column)
    it.step(1)
    it.step(2)
    return it.outcome()


def clipped(column: str) -> Outcome:
    it = Trained(column)
    it.step(1)
    most = 0.1
    for model in (it.part, it.whole):
        if column == "P":  # over stages the caller adds up the norms
            nn.utils.clip_grad_norm_(model.parameters(), most)
    return it.outcome()


def smaller(column: str) -> Outcome:
    it = Trained(column)
    it.step(1)
    own = it.batches(5)[0][:12]
    it.part.schedule.step(own, target=own)
    return Outcome("exact")


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, ids: Tensor) -> Tensor:
        return token_loss(logits.float() * self.temperature, ids)


def loss_with_a_parameter(column: str) -> Outcome:
    it = Trained(column, Tempered())
    it.loss = Tempered()
    it.step(1)
    return it.outcome()
