"""The loss of all tokens, on context parallel ranks that have some of them each.

Ranks have different numbers of tokens that count, as targets of -100 do not. So a mean of the
ranks' own losses is not the loss of one rank. Here each sum over tokens that the loss function
takes is one over all ranks: in `sum`, `mean`, and in torch's losses by their `reduction`. All ranks
find the same loss, and the mean of their gradients is that of one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from remat.cluster.capture.tokens_over_ranks import SEQUENCE, WAY_OUT, OwnLoss, SequencePart
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.torch_private.core import CallWatcher, pytree

_SUMS = (torch.sum, Tensor.sum, torch.nansum, Tensor.nansum)
_MEANS = (torch.mean, Tensor.mean)
_COUNTS = (Tensor.numel, torch.numel, Tensor.__len__)
_BY_CLASS = (functional.cross_entropy, functional.nll_loss)
_MARK = "_remat_of_own_tokens"
_Total = Callable[[Tensor], Tensor]


class LossOverRanks:
    """A loss function, whose sums over tokens are over the ranks of a group."""

    def __init__(self, own: OwnLoss, group: Any) -> None:
        self._own, self._group = own, group

    def __deepcopy__(self, memo: dict[int, Any]) -> LossOverRanks:
        return self  # groups cannot be copied

    def __call__(self, result: Any, *target: Any) -> Tensor:
        def total(own: Tensor) -> Tensor:
            whole = own.clone()
            dist.all_reduce(whole, group=self._group)
            return whole

        return _with_sums(self._own, self._own.part, total)(result, *target)


def _with_sums(own: OwnLoss, part: SequencePart, total: _Total) -> Callable[..., Tensor]:
    def loss(result: Any, *target: Any) -> Tensor:
        cut = part.of(target)
        with _SumsOverRanks(total, part.count, part.seq // part.count) as sums:
            sums.mark(result, cut)
            found = own.loss_fn(result, *cut)
            if getattr(found, _MARK, False):
                raise _refused("is no sum or mean over tokens, or of such")
        return found

    return loss


def _refused(why: str) -> CaptureError:
    return CaptureError(
        "make the loss of sums and means over tokens, as by torch's losses, .sum() and .mean(); "
        f"or {WAY_OUT}.\nThe loss {why}, and context parallel ranks each have some of the tokens"
    )


class _Everyone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, total: _Total, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return total(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Gradients are averaged over ranks afterwards, and each token's is on one rank alone.
        return gradients[0] * ctx.ranks, None, None


class _SumsOverRanks(CallWatcher):
    """Follows what is computed of a rank's own tokens, to where it is summed."""

    def __init__(self, total: _Total, ranks: int, tokens: int) -> None:
        super().__init__()
        self.total, self.ranks, self.tokens = total, ranks, tokens

    def mark(self, *made: Any) -> None:
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor):
                setattr(leaf, _MARK, True)

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(getattr(leaf, _MARK, False) for leaf in leaves if isinstance(leaf, Tensor)):
            return func(*args, **kwargs)
        if func in _SUMS or func in _MEANS:
            return self._reduced(func, args, kwargs)
        if func in _COUNTS and (func in _COUNTS[:2] or self._token_dim(args[0]) == 0):
            return int(self._sum(torch.tensor(func(*args, **kwargs), device=args[0].device)))
        if getattr(func, "__module__", "") == functional.__name__:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            if given.arguments.get("reduction", "none") != "none":
                return self._loss(func, given.arguments)
        made = func(*args, **kwargs)
        self.mark(made)
        return made

    def _sum(self, own: Tensor) -> Tensor:
        # Torch sums narrow numbers in float32, and rounds once.
        wide = own.float() if own.dtype in (torch.bfloat16, torch.float16) else own
        return _Everyone.apply(wide, self.total, self.ranks)  # pyright: ignore

    def _reduced(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        x, dims = args[0] if args else kwargs["input"], kwargs.get("dim")
        dims = args[1] if len(args) > 1 else dims
        if isinstance(dims, int):
            dims = (dims,)
        reduced = dims or range(x.dim())
        if self._token_dim(x) not in {dim % x.dim() for dim in reduced}:
            made = func(*args, **kwargs)
            self.mark(made)
            return made
        if func not in _MEANS:
            own = func(*args, **kwargs)
            return self._sum(own).to(own.dtype)
        dtype = kwargs.get("dtype") or x.dtype
        own = x.to(dtype).float().sum(*args[1:], **{**kwargs, "dtype": None})
        count = x.new_tensor(x.numel() // max(own.numel(), 1), dtype=torch.float32)
        return (self._sum(own) / self._sum(count)).to(dtype)

    def _token_dim(self, x: Tensor) -> int:
        """[batch, tokens, ...], or tokens of all sequences in one dimension."""
        return SEQUENCE if x.dim() > SEQUENCE and x.shape[SEQUENCE] == self.tokens else 0

    def _loss(self, func: Any, given: Mapping[str, Any]) -> Tensor:
        each = func(**{**given, "reduction": "none"})
        whole = self._sum(each.float().sum())
        if given["reduction"] == "sum":
            return whole.to(each.dtype)
        return (whole / self._sum(self._count(func, given, each))).to(each.dtype)

    def _count(self, func: Any, given: Mapping[str, Any], each: Tensor) -> Tensor:
        target = given.get("target")
        if func in _BY_CLASS and isinstance(target, Tensor) and not target.is_floating_point():
            kept = target != given["ignore_index"]
            weight = given["weight"]
            return (kept if weight is None else weight[target.where(kept, 0)] * kept).sum().float()
        rows = each.numel()
        if given["reduction"] == "batchmean":
            # The sequences are on all ranks, whole rows of tokens on one.
            rows = each.shape[0]
            rows = rows / self.ranks if self._token_dim(each) == SEQUENCE else rows
        return each.new_tensor(rows, dtype=torch.float32)


# Whether that is so shows when a rank's own tokens are taken for all, and their halves for ranks'.


def require_summed_loss(own: OwnLoss, result: Any, target: Any, batch: int) -> None:
    """`CaptureError` where gradients of two halves of the tokens are not those of all of them.

    Parameters
    ----------
    result : of the model, for a rank's own tokens of `batch` sequences; `target` likewise.
    """
    tokens = own.part.seq // own.part.count
    given = () if target is None else (target,)
    halves = [SequencePart(tokens, at, 2) for at in range(2)]
    for one in (given, pytree.tree_map(_ignoring, given)):
        whole = pytree.tree_map(_leaf, result)
        try:
            loss = own.loss_fn(whole, *one)
        except (RuntimeError, IndexError):
            continue  # the loss takes no such targets
        expected = _of_leaves(loss, whole)
        if not all(bool(t.isfinite().all()) for t in expected):
            continue
        found_by = _by_halves(own, result, one, halves, batch)
        for half, found in zip(halves, found_by, strict=True):
            of_half = (_part_of(half, t, batch) for t in expected)
            if not all(map(_is_rounded, of_half, found)):
                raise _refused("of two ranks is not that of one")


_IGNORED = -100  # torch's default
_ROUNDING = 1e-5


def _ignoring(leaf: Any) -> Any:
    """Targets most of which do not count for torch's losses."""
    if not isinstance(leaf, Tensor) or leaf.dtype != torch.int64 or leaf.dim() <= SEQUENCE:
        return leaf
    made = leaf.clone()
    made[:, : leaf.shape[SEQUENCE] * 3 // 4] = _IGNORED
    return made


def _leaf(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


def _part_of(half: SequencePart, leaf: Any, batch: int) -> Any:
    is_flat = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch * half.seq
    if not is_flat or half.counts_tokens(leaf):
        return half.of(leaf)
    return half.of(leaf.unflatten(0, (batch, half.seq))).flatten(0, 1)


def _half_leaf(half: SequencePart, batch: int, leaf: Any) -> Any:
    return _leaf(_part_of(half, leaf, batch))


def _of_leaves(loss: Tensor, result: Any) -> list[Tensor]:
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def _by_halves(
    own: OwnLoss, result: Any, target: Any, halves: Sequence[SequencePart], batch: int
) -> list[list[Tensor]]:
    """Gradients as ranks would find them that have a half each."""
    known: list[Tensor] = []
    while True:
        new: list[list[Tensor]] = []
        made: list[list[Tensor]] = []
        for half in halves:
            mine = pytree.tree_map(partial(_half_leaf, half, batch), result)
            totals = _Totals(known)
            loss = _with_sums(own, half, totals)(mine, *target)
            made.append([grad / len(halves) for grad in _of_leaves(loss, mine)])
            new.append(totals.new)
        # The first sum that is not known yet does not depend on later ones.
        if not new[0]:
            return made
        known.append(new[0][0] + new[1][0])


class _Totals:
    """Sums over ranks in turn, as far as they are known."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        self._known, self.new = iter(known), list[Tensor]()

    def __call__(self, own: Tensor) -> Tensor:
        if (known := next(self._known, None)) is not None:
            return known.clone()
        self.new.append(own.detach())
        return own.clone()


def _is_rounded(a: Tensor, b: Tensor) -> bool:
    room = max(4 * torch.finfo(a.dtype).eps, _ROUNDING)
    return bool((a.float() - b.float()).norm() <= room * a.float().norm())
