"""Cuts a model into stages: its ends, which run as they stand, and the blocks between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remat.cluster.apply.asked import Applied
from remat.cluster.apply.context_ranks import (
    FirstCall,
    first_call,
    require_own_loss,
    tokens_of_rank,
)
from remat.cluster.apply.whole_chain import WholeChain
from remat.cluster.model_part import (
    Arrival,
    Before,
    Behind,
    ModelPart,
    StageRun,
    arrival_of,
    model_part,
)
from remat.cluster.plan_file import ClusterFile
from remat.graph_capture.distributed.dtensors import local_part
from remat.graph_capture.errors import CaptureError, PlanError


class Cutter:
    """The ends of a model, cut off before its modules are split or sharded."""

    def __init__(self, chain: WholeChain, asked: Applied, args: tuple[Any, ...]) -> None:
        self.chain, self.asked, self.args = chain, asked, args
        self.tokens = tokens_of_rank(asked)
        blocks = list(chain.blocks.values())
        self.before: Callable[..., Arrival] = Before(chain.model, blocks[0])
        own = self.tokens.of(args) if asked.shares_tokens else args
        self.behind = Behind(chain.model, blocks, list(chain.behind.values()), own)

    def arrival(self) -> FirstCall:
        """What the first block is called with; `PlanError` where its border is not as planned."""
        path = next(iter(self.chain.blocks))
        model, before = self.chain.model, self.before
        assert isinstance(before, Before)
        if self.asked.shares_tokens:
            found = first_call(before, model, self.args, self.tokens, path)
            self.before = found.before
        else:
            found = FirstCall(before, arrival_of(before, model, self.args, path))
        _require_border(found.given, self.asked.plan)
        return found

    def try_behind(self, given: Arrival) -> None:
        """Run once what follows the last block; `CaptureError` where it needs the batch."""
        if not self.asked.has_last:
            return
        run = StageRun(None, (), self.behind, given, self.asked.loss_fn)
        why = "reads what comes before the blocks, which the last stage does not have"
        try:
            with torch.no_grad():
                loss = run((torch.zeros_like(given.border),), self.asked.target)
        except (RuntimeError, NotImplementedError) as error:
            raise CaptureError(f"what follows the last block {why}, or fails: {error}") from error
        # What is read from before the blocks is on the meta device, and so is what is made of it.
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_meta:
            raise CaptureError(
                f"loss_fn returns {type(loss).__name__} and no loss of one number on the device: "
                f"or what follows the last block {why}"
            )
        if self.asked.shares_tokens:
            require_own_loss(self.behind, given, self.asked, self.tokens)

    def part(self, index: int, replaced: Mapping[str, nn.Module], given: Arrival) -> ModelPart:
        layers = self.asked.layers
        is_first, is_last = index == 0, index == len(layers) - 1
        ends = (self.chain.before if is_first else {}) | (self.chain.behind if is_last else {})
        blocks = {path: replaced[path] for path in layers[index]}
        run = StageRun(
            self.before if is_first else None, tuple(blocks.values()),
            self.behind if is_last else None, given, self.asked.loss_fn,
        )  # fmt: skip
        return model_part(self.chain.model, {**ends, **blocks}, run)


def _require_border(given: Arrival, plan: ClusterFile) -> None:
    border = local_part(given.border)
    graph = plan.graphs[0]
    # The first op of a planned block stands for the arrival of its border.
    planned = graph.value_by_name[graph.ops[0].outputs[0]]
    dtype = str(border.dtype).removeprefix("torch.")
    if (tuple(border.shape), dtype) == (planned.shape, planned.dtype):
        return
    raise PlanError(
        f"blocks read {dtype}{list(border.shape)} here, and the plan is for {planned.dtype}"
        f"{list(planned.shape)}: pass one microbatch of "
        f"{plan.parallelism.pipeline_parallel_microbatch_size} x {plan.seq} in args, compute in "
        f"{planned.dtype} (mp_policy, or the model's own dtype), and let tp_plan split borders "
        "along the sequence"
    )
