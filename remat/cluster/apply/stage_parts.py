"""The stages of this rank: cut out of the model, their blocks rewritten, their bytes counted.

Blocks run as planned; what lies before and behind them runs as eager runs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from remat.cluster.apply.cluster_mesh import (
    CP,
    TP,
    Applied,
    require_split_blocks,
    shard_over_data_ranks,
    split_over_tensor_ranks,
)
from remat.cluster.apply.context_ranks import (
    FirstCall,
    blocks_over_ranks,
    first_call,
    require_own_loss,
    tokens_of_rank,
    with_own_loss,
)
from remat.cluster.apply.loss_over_ranks import LossOverRanks
from remat.cluster.apply.stage_blocks import (
    StageBlocks,
    choose,
    figures_of,
    traced_blocks,
    with_own_sizes,
)
from remat.cluster.apply.whole_chain import WholeChain, materialize_modules, state_by_path
from remat.cluster.capture.rank_graph import border_value, planned_graph
from remat.cluster.capture.tokens_over_ranks import OwnLoss
from remat.cluster.model_part import (
    Arrival,
    Before,
    Behind,
    Beside,
    ModelPart,
    Numbers,
    StageRun,
    WholeRun,
    arrival_of,
    call_like,
    is_number,
    model_part,
)
from remat.cluster.plan_file import ClusterFile
from remat.graph_capture.distributed.dtensors import inputs_cast, local_part, parameters_cast
from remat.graph_capture.eager_step import with_eager_sizes
from remat.graph_capture.errors import CaptureError, PlanError
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.trace import trace
from remat.ranks.collective_call import values_digest
from remat.rewriter.graphs.backward_parts import SplitBytes
from remat.solver.policies.template import StoreAll


class _Cutter:
    """The ends of a model, cut off before its modules are split or sharded."""

    def __init__(self, chain: WholeChain, asked: Applied, args: tuple[Any, ...]) -> None:
        self.chain, self.asked, self.args = chain, asked, args
        self.tokens = tokens_of_rank(asked)
        blocks = list(chain.blocks.values())
        self.before = Before(chain.model, blocks[0])
        if not asked.is_whole:
            own = self.tokens.of(args) if asked.shares_tokens else args
            self.behind = Behind(
                chain.model, blocks, list(chain.behind.values()), own,
                looks_at_data=chain.looks_at_data,
            )  # fmt: skip

    def arrival(self) -> FirstCall:
        """What the first block is called with; `PlanError` where its border is not as planned."""
        path, before = next(iter(self.chain.blocks)), self.before
        if self.asked.shares_tokens:
            found = first_call(before, self.args, self.tokens, path)
        elif self.asked.is_whole:
            given = call_like(before, self.args)
            found = FirstCall(before, given, given)
        else:
            given = arrival_of(before, self.args)
            found = FirstCall(before, given, given)
        _require_border(found.given, self.asked.plan)
        given = found.given
        # `fully_shard` casts what each block is given, too.
        beside = inputs_cast(given.args_, given.kwargs, self.asked.cast_of_blocks)
        pairs = zip(*map(pytree.tree_leaves, ((given.args_, given.kwargs), beside)), strict=True)
        cut = {id(now): found.cut[id(was)] for was, now in pairs if id(was) in found.cut}
        return replace(found, given=Arrival(given.border, *beside), cut=cut)

    def try_behind(self, given: Arrival) -> None:
        """Run once what follows the last block; `CaptureError` where it needs the batch."""
        if self.asked.is_whole or not self.asked.has_last:
            return
        run = StageRun(None, (), self.behind, Beside(given, given, None), self.asked.loss_fn)
        why = "reads modules before the blocks, which the last stage does not have"
        try:
            with torch.no_grad():
                loss = run(self.chain.model, (torch.zeros_like(given.border),), self.asked.target)
        except (RuntimeError, NotImplementedError) as error:
            raise CaptureError(f"what follows the last block {why}, or fails: {error}") from error
        # What is read from before the blocks is on the meta device, and so is what is made of it.
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_meta:
            raise CaptureError(
                f"return one number on the device from loss_fn, not a {type(loss).__name__}; or "
                f"what follows the last block {why}"
            )
        if self.asked.shares_tokens:
            require_own_loss(self.behind, given, self.asked, self.tokens)

    def part(self, index: int, replaced: Mapping[str, nn.Module], call: FirstCall) -> ModelPart:
        layers = self.asked.layers
        is_first, is_last = index == 0, index == len(layers) - 1
        ends = (self.chain.before if is_first else {}) | (self.chain.behind if is_last else {})
        blocks = {path: replaced[path] for path in layers[index]}
        kept = {**ends, **blocks}
        in_turn = tuple(blocks.values())
        if self.asked.is_whole:
            run = WholeRun(in_turn, self.asked.loss_fn)
        else:
            numbers = None if is_first else self._numbers(call)
            behind = self.behind if is_last else None
            copied = (self.before if is_first else numbers, behind)
            run = StageRun(
                call.before if is_first else None, in_turn, behind,
                Beside(call.given, call.made, numbers), self._loss(),
                tuple(one.follow for one in copied if one is not None),
            )  # fmt: skip
        return model_part(self.chain.model, kept, run)

    def _loss(self) -> Callable[..., Any]:
        own, ranks = self.asked.loss_fn, self.asked.mesh[CP]
        return LossOverRanks(own, ranks.get_group()) if isinstance(own, OwnLoss) else own

    def _numbers(self, call: FirstCall) -> Numbers | None:
        """Where blocks are given more than tensors; `CaptureError` if this stage cannot make it."""
        given = [call.given.args_, call.given.kwargs]
        if not any(map(is_number, pytree.tree_leaves(given))):
            return None
        path, block = next(iter(self.chain.blocks.items()))
        own = self.tokens.of(self.args) if self.asked.shares_tokens else self.args
        looks = self.chain.looks_at_data
        numbers = Numbers(self.chain.model, block, own, looks_at_data=looks)
        try:
            found = numbers()
        except (RuntimeError, NotImplementedError) as error:
            raise CaptureError(f"{_OWN_NUMBERS}{path} gets some: {error}") from error
        pairs = zip(*map(pytree.tree_leaves, (given, [found.args_, found.kwargs])), strict=True)
        if any(was != now for was, now in pairs if is_number(was)):
            raise CaptureError(f"{_OWN_NUMBERS}{path} gets others at each call")
        return numbers


_OWN_NUMBERS = (
    "compute numbers in the blocks, or plan with --pp 1: later stages of a pipeline have neither "
    "the batch nor the modules before the blocks to compute them from, and block "
)


def _require_border(given: Arrival, plan: ClusterFile) -> None:
    border = local_part(given.border)
    graph = plan.graphs[0]
    # The first op of a planned block stands for the arrival of its border.
    planned = graph.value_by_name[graph.ops[0].outputs[0]]
    dtype = str(border.dtype).removeprefix("torch.")
    if (tuple(border.shape), dtype) == (planned.shape, planned.dtype):
        return
    raise PlanError(
        f"pass one microbatch of {plan.parallelism.pipeline_parallel_microbatch_size} x "
        f"{plan.seq} in args, compute in {planned.dtype} (mp_policy, or the model's own dtype), "
        "and let tp_plan split borders along the sequence: blocks read "
        f"{dtype}{list(border.shape)} here, and the plan is for "
        f"{planned.dtype}{list(planned.shape)}"
    )


@dataclass(frozen=True)
class BlockBytes:
    """Of one block: saved for each open microbatch, needed beside that, and gradients.

    `split` : where gradients of weights are made apart, what the parts of backward have live.
    `unsummed` : gradients of one microbatch that wait for the end of its backward, beside the sum
    of those before it.
    """

    saved: int
    need: int
    gradients: int
    split: SplitBytes | None = None
    unsummed: int = 0

    @property
    def held(self) -> int:
        """Of one microbatch, until the gradients of weights."""
        return 0 if self.split is None else self.split.held


NO_BYTES = BlockBytes(0, 0, 0)
BEFORE = "before the blocks"


class _Head(nn.Module):
    """The modules behind the blocks, under their own names."""

    def __init__(self, modules: Mapping[str, nn.Module], run: Behind) -> None:
        super().__init__()
        for path, module in modules.items():
            # `add_module` takes no dots.
            self.add_module(path.replace(".", "_"), module)
        self.run = run

    def forward(self, border: Tensor) -> Any:
        return self.run(border)


def _head_bytes(
    modules: Mapping[str, nn.Module], run: Behind, given: Arrival,
    loss_fn: Callable[..., Any], target: Any,
) -> BlockBytes:  # fmt: skip
    """Of one microbatch, loss included."""
    border = torch.zeros_like(given.border).requires_grad_()
    if isinstance(loss_fn, OwnLoss):  # a module's parameters are then seen
        loss_fn, target = loss_fn.loss_fn, loss_fn.part.of(target)
    head = _Head(modules, run)
    # Errors name the model's class.
    head.__class__ = type(run.name, (_Head,), {})
    traced = trace(head, (border,), loss_fn=loss_fn, target=target, optimizer="none", split="none")
    sized = with_eager_sizes(with_own_sizes(traced.graph, traced))
    graph = planned_graph(sized, border_value(traced))
    # It is not rewritten, so it runs once and keeps all.
    found = figures_of(graph, StoreAll().schedule(graph))
    gradients = sum(value.size_bytes for value in graph.values if value.kind == "gradient")
    own = sum(p.numel() * p.element_size() for p in head.parameters() if p.requires_grad)
    return BlockBytes(found.saved_bytes, found.need_bytes, min(own, gradients))


@dataclass(frozen=True)
class _RankBytes:
    """Of this rank's modules: `gradients` whole, by block, and before the blocks.

    `gathered` : of the parameters that `fully_shard` gathers; 0 where they are whole anyway.
    `arriving` : of the border, before it is cut to the rank's tokens.
    """

    gradients: dict[str, int]
    behind: BlockBytes
    gathered: int
    arriving: int


_UNCOUNTED = _RankBytes({}, NO_BYTES, 0, 0)


@dataclass(frozen=True)
class RankParts:
    """The stages of this rank; `values` is a digest of the weights before they were split."""

    asked: Applied
    modules: tuple[ModelPart, ...]
    chosen: StageBlocks
    given: Arrival
    args: tuple[Any, ...]
    bytes: _RankBytes
    values: str
    of_loss: dict[str, Tensor]

    @property
    def digest(self) -> str:
        """The same on ranks whose blocks follow the same schedules."""
        steps = [f"{path} {one.steps}" for path, one in self.chosen.schedules.items()]
        return hashlib.sha256("\n".join(steps).encode()).hexdigest()

    @property
    def overhead(self) -> dict[str, float]:
        """Recomputation over the work of each block, by path."""
        chosen = self.chosen
        times = {path: one.graph.time_us for path, one in chosen.traced.items()}
        return {path: chosen.options[path].extra_us / time for path, time in times.items()}

    @property
    def checks(self) -> tuple[str, ...]:
        schedules = {one.steps for one in self.chosen.schedules.values()}
        said = f"{len(schedules)} distinct schedules of {len(self.chosen.traced)} blocks have"
        return "plan and model are the same on all ranks", f"{said} eager's bits"

    def shard(self) -> None:
        asked = self.asked
        for part in self.modules if asked.is_sharded else ():
            blocks = part._remat_run.blocks
            shard_over_data_ranks(part, blocks, asked.plan, asked.mesh, asked.mp_policy)


def rank_parts(chain: WholeChain, asked: Applied, *, eager: bool = False) -> RankParts:
    """The stages of this rank, each block rewritten; with `eager`, as it is, to compare with."""
    asked = with_own_loss(asked) if asked.shares_tokens else asked
    own = {path: chain.blocks[path] for i in asked.stages for path in asked.layers[i]}
    # As `fully_shard` casts what a module is given.
    args, _ = inputs_cast(asked.args, {}, asked.cast)
    ends = chain.before | (chain.behind if asked.has_last else {})
    materialize_modules(ends | own, asked.materialize)
    # Before they are split: tensor parallel ranks have different parts of them.
    values = values_digest(state_by_path(ends | own))
    cutter = _Cutter(chain, asked, args)
    ranks = asked.mesh[TP]
    if ranks.size() > 1:
        split_over_tensor_ranks({**chain.before, **chain.behind, **own}, ranks, asked.tp_plan)
        require_split_blocks(own, ranks.size())
    # Blocks are traced in the dtype that `fully_shard` will cast their parameters to.
    with parameters_cast(chain.model, asked.cast):
        arrival = cutter.arrival()
        given = arrival.given
        own = blocks_over_ranks(own, arrival, asked) if asked.shares_tokens else own
        first = next(iter(chain.blocks))
        has_gradient = any(p.requires_grad for m in chain.before.values() for p in m.parameters())
        chosen = traced_blocks(own, asked.plan, given, first, has_input_gradient=has_gradient)
        choose(chosen, asked.plan, asked.rank, asked.in_flight)
        replaced = own if eager else chosen.rewritten()
        cutter.try_behind(given)
        # Without a pipeline nobody asks for them.
        has_stages = len(asked.layers) > 1
        sizes = _bytes_of(chain, asked, cutter, arrival, own) if has_stages else _UNCOUNTED
    modules = tuple(cutter.part(i, replaced, arrival) for i in asked.stages)
    of_loss = chain.of_loss if asked.has_last else {}
    return RankParts(asked, modules, chosen, given, args, sizes, values, of_loss)


def _bytes_of(
    chain: WholeChain, asked: Applied, cutter: _Cutter, call: FirstCall,
    own: Mapping[str, nn.Module],
) -> _RankBytes:  # fmt: skip
    given, border = call.given, local_part(call.given.border)
    behind = NO_BYTES
    if asked.has_last:
        behind = _head_bytes(chain.behind, cutter.behind, given, asked.loss_fn, asked.target)
    held = {path: _parameter_bytes({path: block}) for path, block in own.items()}
    before = _parameter_bytes(chain.before)
    # Inside a pipeline, FSDP2 keeps what it gathers whole through all microbatches.
    gathered = sum(held.values()) + behind.gradients + before * (0 in asked.stages)
    gradients = {path: size * asked.widening for path, size in (held | {BEFORE: before}).items()}
    # `fully_shard` sums them in a wider dtype when all of a stage's backward is done.
    unsummed = behind.gradients if asked.widening > 1 else 0
    behind = replace(behind, gradients=behind.gradients * asked.widening, unsummed=unsummed)
    arriving = call.times_border * border.numel() * border.element_size()
    return _RankBytes(gradients, behind, gathered * asked.is_sharded, arriving)


def _parameter_bytes(modules: Mapping[str, nn.Module]) -> int:
    """As they are computed with: on tensor parallel ranks of the local parts."""
    trained = [p for m in modules.values() for p in m.parameters() if p.requires_grad]
    return sum(local_part(p).numel() * p.element_size() for p in trained)
