"""A linear layer and its cross-entropy loss: their numbers, and logits by rows or by classes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadLoss:
    """One head and its loss.

    Attributes
    ----------
    x : (n, d). weight : (classes, d). bias : (classes,) or None. target : (m,).
    class_weight : (classes,) or None.
    grid : where the loss takes a part of the logits' rows, these as a grid, which is sliced from
        `start` to `stop`; empty where it takes all. dtype : of the loss.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    grid: Sequence[int]
    start: Sequence[int]
    stop: Sequence[int]
    dtype: torch.dtype
    reduction: int
    ignore_index: int
    pieces: int

    @property
    def n_classes(self) -> int:
        """Rows of the weight."""
        return self.weight.shape[0]

    @functools.cached_property
    def chosen(self) -> Tensor | None:
        """The rows of the logits that the loss takes, ascending; None for all.

        On the CPU whatever the device is, so that nothing waits for a GPU.
        """
        if not self.grid:
            return None
        rows = torch.arange(self.x.shape[0]).view(*self.grid)
        for dim, (a, b) in enumerate(zip(self.start, self.stop, strict=True)):
            rows = rows.narrow(dim, a, b - a)
        return rows.reshape(-1)

    @functools.cached_property
    def chosen_here(self) -> Tensor | None:
        """`chosen` on the device of the head."""
        return None if self.chosen is None else self.chosen.to(self.x.device)

    def row_blocks(self) -> Iterator[Rows]:
        """Blocks of rows of the logits, with the rows of the loss among them."""
        for a, b in blocks(self.x.shape[0], self.pieces):
            if self.chosen is None:
                yield Rows(a, b, a, b, None)
            else:
                low, high = torch.searchsorted(self.chosen, torch.tensor([a, b])).tolist()
                inside = (self.chosen[low:high] - a).to(self.x.device)
                yield Rows(a, b, low, high, inside)

    def logits(self, rows: Rows) -> Tensor:
        """Logits of those of the block's rows that the loss takes, in the dtype of the loss."""
        x = self.x[rows.a : rows.b]
        return self._taken(_product(x, self.weight, self.bias), rows.inside)

    def class_logits(self, a: int, b: int) -> Tensor:
        """Logits of all rows that the loss takes, for the classes from `a` to `b`."""
        bias = None if self.bias is None else self.bias[a:b]
        return self._taken(_product(self.x, self.weight[a:b], bias), self.chosen_here)

    def _taken(self, logits: Tensor, chosen: Tensor | None) -> Tensor:
        if chosen is not None:
            logits = logits.index_select(0, chosen)
        return logits.to(self.dtype)

    def weighted(self, of_rows: Tensor) -> Tensor:
        """Numbers of rows by classes, or of rows alone, times the weights of classes if any."""
        return of_rows if self.class_weight is None else of_rows * self.class_weight.view(1, -1)

    def whole_rows(self, gradient: Tensor, a: int, b: int, chosen: Tensor | None) -> Tensor:
        """`gradient` of the logits that the loss takes, as one of rows a..b - 1, in x's dtype.

        Rows that the loss leaves out have none.
        """
        gradient = gradient.to(self.x.dtype)
        if chosen is None:
            return gradient
        whole = gradient.new_zeros(b - a, gradient.shape[1])
        return whole.index_copy_(0, chosen, gradient)


@dataclass(frozen=True)
class Rows:
    """Rows a..b - 1 of the logits, of which `inside` are rows low..high - 1 of the loss."""

    a: int
    b: int
    low: int
    high: int
    inside: Tensor | None

    @property
    def of_loss(self) -> slice:
        """Where the block's rows are among those of the loss."""
        return slice(self.low, self.high)


def blocks(n: int, pieces: int, multiple: int = 1) -> list[tuple[int, int]]:
    """At most `pieces` ranges of 0..n - 1, of a multiple of `multiple` each, but for the last."""
    step = max(-(-n // (pieces * multiple)) * multiple, 1)
    return [(a, min(a + step, n)) for a in range(0, n, step)]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
