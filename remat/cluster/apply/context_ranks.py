"""Context parallel ranks: each runs blocks on its own tokens, and has a share of the heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.cluster.apply.by_token import (
    ChangedPlaces,
    is_by_token,
    require_block_by_token,
    require_loss_by_token,
)
from remat.cluster.apply.cluster_mesh import CP
from remat.graph_capture.cluster.heads_over_ranks import WAY_OUT, HeadsOverRanks
from remat.graph_capture.cluster.on_rank import SEQUENCE
from remat.graph_capture.errors import CaptureError, PlanError
from remat.graph_capture.tracing.step_module import apply_loss
from remat.rewriter.stages.border import Arrival, Before, Behind, arrival_of
from remat.rewriter.stages.sequence_part import (
    PartOfBefore,
    SequencePart,
    cut_dimension,
)
from remat.rewriter.user_module.block_shells import shell_with

if TYPE_CHECKING:
    from remat.cluster.apply.asked import Applied


@dataclass(frozen=True)
class FirstCall:
    """The call of the first block, with the tokens that this rank has.

    Attributes
    ----------
    before : what gives it. given : the call. cut : dimensions that count tokens, by the id of an
        argument.
    """

    before: Callable[..., Arrival]
    given: Arrival
    cut: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def times_border(self) -> int:
        """How many times the border's bytes are made before it is cut to the rank's tokens."""
        before = self.before
        if isinstance(before, PartOfBefore) and before.reads_all:
            return before.part.count
        return 1


def part_of(asked: Applied) -> SequencePart:
    """The tokens that this rank has."""
    ranks = asked.mesh[CP]
    return SequencePart(asked.plan.seq, ranks.get_local_rank(), ranks.size())


def with_own_loss(asked: Applied) -> Applied:
    """What is asked for, with a loss of the rank's own tokens.

    Raises
    ------
    PlanError : the target, or the batch, is not of whole sequences.
    """
    part = part_of(asked)
    for what, given in (("the microbatch in args", asked.args), ("target", asked.target)):
        leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        wrong = next((leaf for leaf in leaves if not part.counts_tokens(leaf)), None)
        if wrong is not None:
            raise PlanError(
                f"{what} has a tensor of {list(wrong.shape)}, and context parallel ranks cut each "
                f"along its tokens: pass [batch, {part.seq}, ...] on all ranks, or {WAY_OUT}"
            )
    return replace(asked, loss_fn=part.loss(asked.loss_fn))


def first_call(
    before: Before, model: nn.Module, args: tuple[Any, ...], part: SequencePart, path: str
) -> FirstCall:
    """The call of the first block, with this rank's tokens.

    Raises
    ------
    CaptureError : something beside the border depends on the batch, or belongs to pairs of tokens;
        or tensor parallel ranks share the tokens of a border that knows positions.
    """
    whole = arrival_of(before, model, args, path)
    own = arrival_of(before, model, part.of(args), path)
    length = own.border.shape[SEQUENCE]
    reads_all = not is_by_token(
        before.module, lambda batch: before(*batch).border, part.of(args),
        replace(part, seq=part.seq // part.count).counts_tokens, ChangedPlaces(length),
    )  # fmt: skip
    if reads_all and whole.border.shape[SEQUENCE] != part.seq:
        raise CaptureError(
            f"what comes before block {path} knows positions, and tensor parallel ranks share the "
            "tokens of its border: let tp_plan leave the modules before the blocks whole, and "
            f"split the border in the blocks; or {WAY_OUT}"
        )
    of_rank = PartOfBefore(before, part, reads_all)
    cut: dict[int, int] = {}

    def own_part(name: str, of_all: Any, of_part: Any) -> Any:
        dim = cut_dimension(of_all, of_part, part, name)
        if dim is None:
            return of_all
        found = part.along(of_all, dim)
        cut[id(found)] = dim
        return found

    named = pytree.tree_map_with_path(
        lambda at, a, b: own_part(pytree.keystr(at), a, b),
        (whole.args_, whole.kwargs), (own.args_, own.kwargs),
    )  # fmt: skip
    with torch.no_grad():
        border = part.along(whole.border, SEQUENCE) if reads_all else own.border
    return FirstCall(of_rank, Arrival(border, *named), cut)


def blocks_over_ranks(
    blocks: Mapping[str, nn.Module], found: FirstCall, asked: Applied
) -> dict[str, nn.Module]:
    """Each block with attention over the tokens of all context parallel ranks.

    Raises
    ------
    CaptureError : one cannot run on a rank's own tokens.
    """
    ranks = asked.mesh[CP]
    for path, block in blocks.items():
        require_block_by_token(path, block, found.given, found.cut, ranks.size())
    return {path: _over(block, ranks.get_group()) for path, block in blocks.items()}


def require_own_loss(behind: Behind, given: Arrival, asked: Applied, part: SequencePart) -> None:
    """Raise `CaptureError` for a loss that ranks cannot compute of their own tokens."""
    target = part.of(asked.target)

    def loss_of(border: Tensor, other: Any) -> Tensor:
        return apply_loss(asked.loss_fn, behind(border), other)

    require_loss_by_token(
        loss_of, given.border, target, replace(part, seq=part.seq // part.count).counts_tokens
    )


def _over(block: nn.Module, group: Any) -> nn.Module:
    """A copy of a block, one deep, whose attention goes over the ranks of a group."""
    kind = type(block)

    class OverRanks(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with HeadsOverRanks(group):
                return super().forward(*args, **kwargs)

    OverRanks.__name__ = OverRanks.__qualname__ = kind.__name__
    shell = shell_with(block, dict(block._modules))
    shell.__class__ = OverRanks
    return shell
