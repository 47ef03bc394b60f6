"""The graph of one rank's block, or of what follows all blocks, as a planner of clusters takes it.

It is traced over a fake group, with costs of a device of the table, and of its collectives by
the links between ranks. What is resident does not count: states are held apart. The border that
a block reads is made by an op of its own, so that it counts as saved where backward reads it.

Each collective may be computed again here: all ranks of a group follow one schedule of a block.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx, nn

from remat.cluster.capture.model_chain import BlockShape, ChainModel, ChainShape, SplitRole
from remat.cluster.capture.tokens_over_ranks import SEQUENCE, HeadsOverRanks
from remat.cluster.mesh import ring_ranks
from remat.graph_capture.costs.roofline import model_costs
from remat.graph_capture.devices.links import RankLinks
from remat.graph_capture.distributed.collectives import (
    ALL_RANKS_RUN,
    RETURNED,
    FakeGroups,
    groups_of,
    is_collective,
    is_collective_target,
)
from remat.graph_capture.distributed.sharding import is_ring
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Op, Resident, TrainingGraph
from remat.graph_capture.torch_private.core import (
    CallWatcher,
    all_gather_autograd,
    pytree,
    reduce_scatter_autograd,
)
from remat.graph_capture.tracing.step_module import apply_loss
from remat.graph_capture.tracing.trace import trace
from remat.graph_capture.tracing.traced_step import Trace

# Weights are the rank's parts. What runs between split layers has the rank's part of the sequence
# (sequence parallel, Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198): what a norm
# returns is gathered along the sequence, and the sum of a layer that is split by rows is scattered
# along it. Context parallel ranks have a part of each sequence throughout, and share the heads of
# attention. These modules are for planning: they run where collectives do nothing, and their
# results mean nothing.


class _Gathers(nn.Module):
    """A module whose result, or whose input, is gathered along the sequence."""

    def __init__(self, inner: nn.Module, group: Any, *, behind: bool) -> None:
        super().__init__()
        self.inner, self.group, self.behind = inner, group, behind

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.behind:
            return all_gather_autograd(self.inner(x, *args, **kwargs), SEQUENCE, self.group)
        return self.inner(all_gather_autograd(x, SEQUENCE, self.group), *args, **kwargs)


class _Scatters(nn.Module):
    """A layer split by rows: its result is summed over ranks, each of which keeps its tokens."""

    def __init__(self, inner: nn.Module, group: Any) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x: Tensor) -> Tensor:
        return reduce_scatter_autograd(self.inner(x), "sum", SEQUENCE, self.group)


class _OnRank(nn.Module):
    """A block of one rank, in which attention reaches over the context parallel ranks."""

    def __init__(self, inner: nn.Module, cp: int, groups: Sequence[Any]) -> None:
        super().__init__()
        self.inner, self.cp, self.groups = inner, cp, groups

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.cp == 1:
            return self.inner(*args, **kwargs)
        with HeadsOverRanks(*self.groups):
            return self.inner(*args, **kwargs)


def _block_on_rank(
    chain: ChainModel, shape: ChainShape, kind: int, tp: int, cp: int, groups: FakeGroups
) -> nn.Module:
    """The first block of a kind, split; `CaptureError` where a weight has no equal parts."""
    ring = ring_ranks(shape.heads, tp, cp)
    heads = cp // ring  # neighbours share heads: they exchange most
    of_context = groups.group(heads, apart=tp), groups.group(ring, apart=tp * heads)
    path = list(chain.blocks)[shape.blocks[kind][0]]
    inner = copy.deepcopy(chain.blocks[path])
    _split(inner, f"{path}.", shape, tp, groups.group(tp))
    return _OnRank(inner, cp, of_context[: 1 + (ring > 1)])


def _border_on_rank(border: Tensor, tp: int) -> Tensor:
    sizes = list(border.shape)
    if tp > 1:
        # Between split layers a tensor parallel rank has its part of the sequence.
        sizes[SEQUENCE] //= tp
    return torch.empty(sizes, dtype=border.dtype, device="meta", requires_grad=True)


def _call_on_rank(block: BlockShape, tp: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments; what trained parameters made is split as borders are."""
    leaves = block.leaves
    for i in (*block.borders, *block.with_gradient):
        is_split = tp > 1 and leaves[i].dim() == block.read.dim()
        leaves[i] = _border_on_rank(leaves[i], tp if is_split else 1)
    return block.call(leaves)


_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape)


class _PartsOfRows(CallWatcher):
    """Where a view names the whole vocabulary, as ``logits.view(-1, size)``, the rank's part."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.tp = tp

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _RESHAPES and not kwargs and isinstance(args[-1], int):
            split, *sizes = args
            if self.tp > 1 and sizes[-1] == self.tp * split.shape[-1]:
                return func(split, *sizes[:-1], split.shape[-1])
        return func(*args, **kwargs)


class _BehindRank(nn.Module):
    """What follows the blocks, and what lies between two lists of them."""

    def __init__(self, model: nn.Module, loss_fn: Any, tp: int, noted: list[Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn, self.tp, self.noted = model, loss_fn, tp, noted

    def forward(self, args: Any, kwargs: Any, target: Any) -> Any:
        with _PartsOfRows(self.tp):
            loss = apply_loss(self.loss_fn, self.model(*args, **kwargs), target)
        between = tuple(self.noted)
        self.noted.clear()  # a forward leaves its module as it was
        return (loss, *between) if between else loss


class Passes(nn.Module):
    """In the place of a block: hands on what it reads, in the form of what the block returns."""

    def __init__(self, border: int = 0, result: Any = None) -> None:
        super().__init__()
        # As an attribute of no module: it may hold tensors.
        self.border, self.result = border, result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.returned(pytree.tree_leaves((args, kwargs))[self.border])

    def returned(self, x: Tensor) -> Any:
        leaves = pytree.tree_leaves(self.result)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for i in tensors:
            leaves[i] = x if i == tensors[0] else _empty_like(leaves[i], x)
        return pytree.tree_unflatten(leaves, pytree.tree_structure(self.result)) if tensors else x


def _empty_like(tensor: Tensor, x: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=x.device)


class _Given(Passes):
    """In the place of the last block of a list: the border that it would return."""

    def __init__(self, border: Tensor, result: Any) -> None:
        super().__init__(0, result)
        # A parameter, so that it has a gradient.
        self.given = nn.Parameter(border.detach())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.returned(self.given)


class _Begins(Passes):
    """In the place of the first block of a list behind another one: notes what it is given."""

    def __init__(self, border: int, result: Any, noted: list[Tensor]) -> None:
        super().__init__(border, result)
        self.noted = noted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        self.noted += [t for t in given if isinstance(t, Tensor) and t.requires_grad]
        return super().forward(*args, **kwargs)


def _split(module: nn.Module, prefix: str, shape: ChainShape, tp: int, group: Any) -> None:
    if tp == 1:
        return
    names = {f"{prefix}{name}": name for name, _ in module.named_modules(remove_duplicate=False)}
    for path, role in shape.roles.items():
        if path in names:
            linear = module.get_submodule(names[path])
            assert isinstance(linear, nn.Linear)
            _cut(linear, path, role, tp)
            if role == "rows":
                module.set_submodule(names[path], _Scatters(linear, group))
    for path, behind in shape.gathered.items():
        if path in names:
            inner = module.get_submodule(names[path])
            module.set_submodule(names[path], _Gathers(inner, group, behind=behind))


def _cut(linear: nn.Linear, path: str, role: SplitRole, tp: int) -> None:
    out, into = linear.weight.shape
    whole = out if role == "columns" else into
    if whole % tp:
        what = "results" if role == "columns" else "inputs"
        raise CaptureError(f"{path} has {whole} {what}, which {tp} ranks cannot share")
    sizes = (out // tp, into) if role == "columns" else (out, into // tp)
    linear.weight = nn.Parameter(linear.weight.new_empty(sizes))
    linear.out_features, linear.in_features = sizes
    bias = dict(linear.named_parameters(recurse=False)).get("bias")
    # Of a layer split by rows, each rank has the whole bias.
    if bias is not None and role == "columns":
        linear.bias = nn.Parameter(bias.new_empty(sizes[0]))


BORDER = "remat.border"  # the op that stands for the arrival of what a block reads


def block_graph_on_rank(
    chain: ChainModel, shape: ChainShape, kind: int, tp: int, cp: int, groups: FakeGroups,
    device: str, links: RankLinks,
) -> tuple[TrainingGraph, str]:  # fmt: skip
    """And the value that is the gradient of the block's border; empty where there is none."""
    module = _block_on_rank(chain, shape, kind, tp, cp, groups)
    block = shape.blocks[kind][1]
    args, kwargs = _stored(_call_on_rank(block, tp))
    traced = trace(module, args, kwargs, device=device, optimizer="none", split="none")
    joint = traced.joint
    # Inputs are parameters and buffers, and then the tensors of a call in turn.
    inputs = [v.name for v in traced.graph.values if v.kind == "input" and not v.producer]
    tensors = [i for i, leaf in enumerate(block.leaves) if isinstance(leaf, Tensor)]
    borders = [inputs[tensors.index(i)] for i in block.borders]
    nodes = joint.module.graph.find_nodes(op="placeholder")
    results: Any = joint.module.graph.output_node().args[0]
    of_inputs = results[joint.num_forward_outputs :]
    pairs = zip(nodes, of_inputs, strict=False)  # behind the inputs come tangents
    made = (one for node, one in pairs if node.name == borders[0] and isinstance(one, fx.Node))
    gradient = next((joint.value_of_node[one] for one in made), "")
    return _prepared(traced, groups, links, *borders), gradient


def behind_graph_on_rank(
    chain: ChainModel, shape: ChainShape, tp: int, groups: FakeGroups, device: str,
    links: RankLinks,
) -> TrainingGraph:  # fmt: skip
    """Of what follows the blocks, its vocabulary split; `CaptureError` as of `_block_on_rank`."""
    shared: dict[int, Any] = {id(block): block for block in chain.blocks.values()}
    model = copy.deepcopy(chain.model, shared)  # blocks go, so they are not copied
    noted = list[Tensor]()
    for number, path in enumerate(chain.blocks):
        model.set_submodule(path, _stand_in(shape, number, tp, noted))
    _split(model, "", shape, tp, groups.group(tp))
    module = _BehindRank(model, chain.loss_fn, tp, noted)
    # Errors name the user's class.
    module.__class__ = type(type(chain.model).__name__, (_BehindRank,), {})
    args = _stored((chain.args, chain.kwargs, chain.target))
    traced = trace(module, args, {}, device=device, optimizer="none", split="none")
    return _prepared(traced, groups, links)


class _Reached(BaseException):  # no `Exception`: a forward may catch those
    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = given


class _Ends(nn.Module):
    """In the place of the first block: ends forward with what the block is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        raise _Reached([t for t in given if isinstance(t, Tensor) and t.is_floating_point()])


class _BeforeRank(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: Any, kwargs: Any) -> Any:
        try:
            return self.model(*args, **kwargs)
        except _Reached as reached:
            return tuple(reached.given)


def before_graph_on_rank(
    chain: ChainModel, groups: FakeGroups, device: str, links: RankLinks
) -> TrainingGraph:
    """Of what runs before the blocks, which each tensor parallel rank runs whole."""
    ends: dict[int, Any] = {id(block): _Ends() for block in chain.blocks.values()}
    module = _BeforeRank(copy.deepcopy(chain.model, ends))
    args = _stored((chain.args, chain.kwargs))
    traced = trace(module, args, {}, device=device, optimizer="none", split="none")
    return _prepared(traced, groups, links)


def _stand_in(shape: ChainShape, number: int, tp: int, noted: list[Tensor]) -> nn.Module:
    """In the place of a block, where what lies beside blocks is traced."""
    result = shape.results[number]
    if number + 1 in (*shape.starts, len(shape.kinds)):
        border = next(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
        return _Given(_border_on_rank(border, tp), result)
    at = shape.blocks[shape.kinds[number]][1].borders[0]
    is_first = number > 0 and number in shape.starts
    return _Begins(at, result, noted) if is_first else Passes(at, result)


def _stored(batch: Any) -> Any:
    # A trace asks for storage. On the CPU, memory that is never touched takes none.
    return pytree.tree_map_only(
        Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype).requires_grad_(t.requires_grad), batch
    )


def runs_split(chain: ChainModel, shape: ChainShape, tp: int, groups: FakeGroups) -> str:
    """Why one rank's block does not run over so many tensor parallel ranks; empty if it does."""
    whys = (_why_unsplit(chain, shape, kind, tp, groups) for kind in range(len(shape.blocks)))
    return shape.unsplit or next(filter(None, whys), "")


def _why_unsplit(
    chain: ChainModel, shape: ChainShape, kind: int, tp: int, groups: FakeGroups
) -> str:
    block = shape.blocks[kind][1]
    border = block.read
    if border.dim() != 3 or border.shape[1] % tp:
        return f"its border {list(border.shape)} has no {tp} parts of a sequence"
    try:
        module = _block_on_rank(chain, shape, kind, tp, 1, groups)
        args, kwargs = _call_on_rank(block, tp)
        with torch.no_grad():
            made = pytree.tree_leaves(module(*args, **kwargs))
    except CaptureError as error:
        return str(error)
    # A view with the whole's number of heads fails on a part of them.
    except RuntimeError as error:
        return f"with a part of its heads, torch says: {str(error).splitlines()[0]}"
    is_as_read = made[0].shape == _border_on_rank(border, tp).shape
    return "" if is_as_read else "its result has another shape than what it reads"


def border_value(traced: Trace) -> str:
    """The first input that is no parameter."""
    return next(v.name for v in traced.graph.values if v.kind == "input" and not v.producer)


def _prepared(traced: Trace, groups: FakeGroups, links: RankLinks, *borders: str) -> TrainingGraph:
    for name, node in traced.joint.node_of_op.items():
        if is_collective(node) and not groups.has(groups_of([node])):
            raise CaptureError(
                f"leave the collective {name} out of the model: a block runs it, and a cluster's "
                "plan adds all collectives itself"
            )
    return planned_graph(model_costs(traced, traced.recipe.device, ranks=links), *borders)


def planned_graph(graph: TrainingGraph, *borders: str) -> TrainingGraph:
    """A rank's part as a planner of clusters takes it; an op in front makes the `borders`."""
    ops = tuple(map(_free_to_repeat, graph.ops))
    values = graph.values
    if borders:
        # It arrives from another rank: nothing here makes it again.
        ops = (Op("border", BORDER, "forward", (), borders, no_recompute=BORDER), *ops)
        values = tuple(replace(v, producer="border") if v.name in borders else v for v in values)
    # The gradient of a border comes from the block behind, which is done with it.
    values = tuple(replace(v, kind="activation") if v.kind == "tangent" else v for v in values)
    known = {v.name: v for v in values}
    return replace(
        # States are counted by `stages.py`.
        graph, ops=ops, values=values, resident=Resident(), regions=(), links=None,
        outputs=tuple(name for name in graph.outputs if known[name].kind == "gradient"),
    )  # fmt: skip


def _free_to_repeat(op: Op) -> Op:
    if not is_collective_target(op.target):
        return op
    # All ranks of a group follow one schedule of a block, so each of them computes it again.
    no_recompute = "" if op.no_recompute in (ALL_RANKS_RUN, RETURNED) else op.no_recompute
    held_bytes = op.workspace_bytes if is_ring(op.target) else 0
    return replace(op, workspace_bytes=held_bytes, no_recompute=no_recompute)
