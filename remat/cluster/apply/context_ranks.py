"""Context parallel ranks: each runs blocks on its own tokens, and has a share of the heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from remat.cluster.apply.cluster_mesh import CP, DIMENSIONS, Applied
from remat.cluster.apply.loss_over_ranks import require_summed_loss
from remat.cluster.capture.tokens_over_ranks import (
    SEQUENCE,
    WAY_OUT,
    AttentionMode,
    HeadsOverRanks,
    OwnLoss,
    SequencePart,
    cut_dimension,
    require_shared,
)
from remat.cluster.model_part import (
    Arrival,
    Before,
    Behind,
    arrival_of,
    drawn_like,
)
from remat.graph_capture.distributed.ring_attention import HEADS, TOKENS
from remat.graph_capture.errors import CaptureError, PlanError
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.step_module import apply_loss
from remat.rewriter.user_module.module import in_modes
from remat.rewriter.user_module.own_forward import shell_running

# Context parallel ranks run what is outside of attention on their own tokens, which begin in the
# middle of a sequence. That is right only if a token's result depends neither on other tokens nor
# on its place. Two experiments with drawn numbers show it: half of the tokens are drawn anew, and
# all of them change places. Attention is left out of them: in its place each token has a result of
# its own query, key and value.


_Parts = list[tuple[Tensor, int]]
"""Tensors that were made, each with the dimension that counts tokens."""


class _OwnAttention(AttentionMode):
    """Stands in for attention; `seen` has its queries and keys."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.seen = ranks, list[tuple[Tensor, int]]()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        require_shared(query, key, given.get("attn_mask"), self.ranks)
        # Positions show most in queries and keys.
        self.seen += [(query, TOKENS), (key, TOKENS)]
        # Grouped queries: a head of keys serves several of queries.
        copies = query.shape[HEADS] // key.shape[HEADS]
        key, value = (t.repeat_interleave(copies, HEADS) for t in (key, value))
        return value * (1 + query.mean(-1, keepdim=True) + key.mean(-1, keepdim=True))


@dataclass(frozen=True)
class ChangedPlaces:
    """Another order of a rank's tokens: each of its parts, of `own` tokens, is turned by half.

    Tensor parallel ranks may share the tokens of a border, and have all of them elsewhere.
    """

    own: int

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        # One for all tokens.
        if tensor.shape[dim] <= 1:
            return tensor
        parts = tensor.unflatten(dim, (-1, self.own))
        return parts.roll(max(self.own // 2, 1), dim + 1).flatten(dim, dim + 1)

    def half_kept(self, batch: Tensor) -> Tensor:
        """The second half of each part of a batch's tokens turned round."""
        parts, middle = batch.unflatten(SEQUENCE, (-1, self.own)), self.own // 2
        changed = parts[:, :, middle:].flip(SEQUENCE + 1)
        whole = torch.cat([parts[:, :, :middle], changed], SEQUENCE + 1)
        return whole.flatten(SEQUENCE, SEQUENCE + 1)


def require_token_local_block(
    path: str, block: nn.Module, given: Arrival, cut: Mapping[int, int], ranks: int
) -> None:
    """`CaptureError` for a block that mixes tokens; `cut` : dimensions by the id of an argument."""
    border = drawn_like(given.border, 1)
    places = ChangedPlaces(border.shape[SEQUENCE])

    def run(x: Tensor, *, turned: bool = False) -> _Parts:
        def other(leaf: Any) -> Any:
            # What a token has beside it, such as its position, goes with it.
            return places.of(leaf, cut[id(leaf)]) if turned and id(leaf) in cut else leaf

        args, kwargs = pytree.tree_map(other, (given.args_, given.kwargs))
        attention = _OwnAttention(ranks)
        with torch.no_grad(), attention:
            result = block(x, *args, **kwargs)
        return [*attention.seen, (result, SEQUENCE)]

    with _evaluating(block):
        why = _why_not_token_local(run, border, places)
    if why:
        raise CaptureError(
            "give the block positions as an argument, one for each token that it reads, and let "
            f"only torch.nn.functional.scaled_dot_product_attention mix tokens; or {WAY_OUT}.\n"
            f"Block {path} {why}, and context parallel ranks run it on their own tokens"
        )


def require_token_local_loss(
    loss_of: Callable[[Tensor, Any], Tensor], border: Tensor, target: Any,
    has_tokens: Callable[[object], bool],
) -> None:  # fmt: skip
    """`CaptureError` for a loss that is no mean over tokens, each with its own target."""
    border = drawn_like(border, 1)
    places = ChangedPlaces(border.shape[SEQUENCE])

    def run(x: Tensor, *, turned: bool = False) -> _Parts:
        def other(leaf: Any) -> Any:
            return places.of(leaf, SEQUENCE) if turned and has_tokens(leaf) else leaf

        x = x.detach().requires_grad_()
        loss = loss_of(x, pytree.tree_map(other, target))
        # A loss is one number: what each token adds to it shows in its gradient.
        return [(torch.autograd.grad(loss, x)[0], SEQUENCE)]

    if why := _why_not_token_local(run, border, places):
        raise CaptureError(
            "make the loss a mean over tokens, each with its own target, shifted beforehand; or "
            f"{WAY_OUT}.\n"
            f"The loss {why}, and context parallel ranks compute it from their own tokens"
        )


def is_token_local(
    model: nn.Module, border_of: Callable[[Any], Tensor], args: Any,
    has_tokens: Callable[[object], bool], places: ChangedPlaces,
) -> bool:  # fmt: skip
    def changed(change: Callable[[Tensor], Tensor]) -> Any:
        return pytree.tree_map(lambda leaf: change(leaf) if has_tokens(leaf) else leaf, args)

    with torch.no_grad(), _evaluating(model):
        usual = border_of(args)
        turned = border_of(changed(lambda t: places.of(t, SEQUENCE)))
        other = border_of(changed(places.half_kept))
    kept = slice(0, places.own // 2)
    return _alike(places.of(usual, SEQUENCE), turned) and _alike(usual[:, kept], other[:, kept])


def _why_not_token_local(run: Callable[..., _Parts], x: Tensor, places: ChangedPlaces) -> str:
    usual = run(x)
    middle = x.shape[SEQUENCE] // 2
    # Both halves in turn: what looks back alone shows only in the second one.
    for own in (slice(0, middle), slice(middle, None)):
        other = drawn_like(x, 2)
        other[:, own] = x[:, own]
        for (a, dim), (b, _) in zip(usual, run(other), strict=True):
            of_parts = (t.unflatten(dim, (-1, places.own)).transpose(0, dim + 1) for t in (a, b))
            a, b = (t[own] for t in of_parts)
            if not _alike(a, b):
                return "mixes tokens outside of attention"
    turned = run(places.of(x, SEQUENCE), turned=True)
    for (a, dim), (b, _) in zip(usual, turned, strict=True):
        if not _alike(places.of(a, dim), b):
            return "depends on the position of a token"
    return ""


def _alike(a: Tensor, b: Tensor) -> bool:
    eps, size = torch.finfo(a.dtype).eps, a.float().abs()
    # Rounding: a product's rows may be summed in another order elsewhere.
    room = 2 * eps * size + max(eps / 8, 1e-5) * size.max()
    return bool(((a.float() - b.float()).abs() <= room).all())


def _evaluating(block: nn.Module) -> AbstractContextManager[None]:
    """Without dropout, whose draws differ from call to call."""
    return in_modes(block, {path: False for path, _ in block.named_modules()})


@dataclass(frozen=True)
class FirstCall:
    """The first block's call, with this rank's tokens; `cut` as in `require_token_local_block`.

    `made` : as `before` makes it, with other arguments not cut to these tokens.
    `times_border` : how many times the border's bytes are made before it is cut to these tokens.
    """

    before: Callable[..., Arrival]
    given: Arrival
    made: Arrival
    cut: dict[int, int] = field(default_factory=dict[int, int])
    times_border: int = 1


def tokens_of_rank(asked: Applied) -> SequencePart:
    ranks = asked.mesh[CP]
    plan = asked.plan
    return SequencePart(plan.seq, ranks.get_local_rank(), ranks.size(), plan.context_ring)


def with_own_loss(asked: Applied) -> Applied:
    """With a loss of the rank's own tokens; `PlanError` for a batch that is not whole sequences."""
    part = tokens_of_rank(asked)
    for what, given in (("the microbatch in args", asked.args), ("target", asked.target)):
        leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        wrong = next((leaf for leaf in leaves if not part.counts_tokens(leaf)), None)
        if wrong is not None:
            raise PlanError(
                f"pass [batch, {part.seq}, ...] on all ranks, or {WAY_OUT}: {what} has a tensor "
                f"of {list(wrong.shape)}, and context parallel ranks cut each along its tokens"
            )
    return replace(asked, loss_fn=OwnLoss(part, asked.loss_fn))


def first_call(before: Before, args: tuple[Any, ...], part: SequencePart, path: str) -> FirstCall:
    """The call of the first block, with this rank's tokens.

    `CaptureError` : something beside the border belongs to pairs of tokens; or tensor parallel
    ranks share the tokens of a border that knows positions.
    """
    # Called with all tokens and with the rank's: a dimension that differs counts tokens.
    whole = arrival_of(before, args)
    own = arrival_of(before, part.of(args))
    length = own.border.shape[SEQUENCE]
    reads_all = not is_token_local(
        before.module, lambda batch: before(*batch).border, part.of(args),
        # The rank's own tensors have its own tokens alone.
        replace(part, seq=part.seq // part.count).counts_tokens, ChangedPlaces(length),
    )  # fmt: skip
    if reads_all and whole.border.shape[SEQUENCE] != part.seq:
        raise CaptureError(
            "leave the modules before the blocks whole in tp_plan, and split the border in the "
            f"blocks; or {WAY_OUT}.\n"
            f"Modules before block {path} know positions, and tensor parallel ranks share the "
            "tokens of its border"
        )
    cut: dict[int, int] = {}

    def own_part(at: Any, of_all: Any, of_part: Any) -> Any:
        dim = cut_dimension(of_all, of_part, part, pytree.keystr(at))
        if dim is None:
            return of_all
        found = part.along(of_all, dim)
        cut[id(found)] = dim
        return found

    both = (whole.args_, whole.kwargs), (own.args_, own.kwargs)
    named = pytree.tree_map_with_path(own_part, *both)
    with torch.no_grad():
        border = part.along(whole.border, SEQUENCE) if reads_all else own.border
    of_rank = _BeforeOfRank(before, part, reads_all=reads_all)
    times = part.count if reads_all else 1
    return FirstCall(of_rank, Arrival(border, *named), whole if reads_all else own, cut, times)


@dataclass(frozen=True)
class _BeforeOfRank:
    """What runs before the blocks, on the rank's own tokens where it treats each by itself."""

    before: Before
    part: SequencePart
    reads_all: bool

    def __call__(self, *batch: Any) -> Arrival:
        if not self.reads_all:
            return self.before(*self.part.of(batch))
        found = self.before(*batch)
        border = self.part.along(found.border, SEQUENCE)
        return Arrival(border, found.args_, found.kwargs)


def blocks_over_ranks(
    blocks: Mapping[str, nn.Module], found: FirstCall, asked: Applied
) -> dict[str, nn.Module]:
    sharing = asked.mesh[CP].size() // asked.plan.context_ring
    for path, block in blocks.items():
        require_token_local_block(path, block, found.given, found.cut, sharing)
    groups = _groups_of(asked)
    return {path: _over(block, groups) for path, block in blocks.items()}


def _groups_of(asked: Applied) -> list[Any]:
    """The ranks that share heads with this one and, behind them, those of its ring."""
    ring, mesh = asked.plan.context_ring, asked.mesh
    if ring == 1:
        return [mesh[CP].get_group()]
    lines = mesh.mesh.movedim(DIMENSIONS.index(CP), -1)
    in_rings = lines.unflatten(-1, (ring, -1))  # neighbours share heads
    return [_own_group(one.flatten(0, -2)) for one in (in_rings, in_rings.transpose(-1, -2))]


def _own_group(groups: Tensor) -> Any:
    # Each rank has to make all groups, in one order.
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups.tolist()}
    return next(group for ranks, group in made.items() if dist.get_rank() in ranks)


def require_own_loss(behind: Behind, given: Arrival, asked: Applied, part: SequencePart) -> None:
    target = part.of(asked.target)
    require_token_local_loss(
        lambda border, target: apply_loss(asked.loss_fn, behind(border), target), given.border,
        target, replace(part, seq=part.seq // part.count).counts_tokens,
    )  # fmt: skip
    border = drawn_like(given.border, 1)
    with torch.no_grad():
        result = behind(border)
    assert isinstance(asked.loss_fn, OwnLoss)
    require_summed_loss(asked.loss_fn, result, target, len(border))


def _over(block: nn.Module, groups: Sequence[Any]) -> nn.Module:
    """A copy of a block, one deep, whose attention goes over the ranks of groups."""
    kind = type(block)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with HeadsOverRanks(*groups):
            return kind.forward(self, *args, **kwargs)

    return shell_running(block, forward)
