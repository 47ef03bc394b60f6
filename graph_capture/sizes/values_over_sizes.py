"""Values that depend on nothing but sizes that vary: what code finds when it looks at them.

Transformers asks of positions whether they count up. They do at every length, so that a trace for
a range of lengths can go the way that eager goes at each of them. A value is kept as the ops that
make it; where code looks at it, they run at all sizes of the range, and the answer counts if it is
the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from remat.graph_capture.sizes.symbols import Sizes
from remat.graph_capture.torch_private.core import OpOverload, pytree

_MOST_WORK = 1 << 30
"""Elements that are made to answer one question, at all sizes together: a second on a CPU."""

_Run = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


class TraceSizes(Protocol):
    """The sizes of one trace, see `Environment` in `trace_over_sizes.py`."""

    def points_of(self, numbers: Iterable[Any]) -> Sequence[Sizes]:
        """All sizes of the symbols in these numbers, the largest last; none if these are many."""
        ...

    def value(self, number: Any, sizes: Sizes) -> Any:
        """A number of the trace at these sizes."""
        ...


@dataclass(eq=False)
class Formula:
    """An op, and what it is run on: formulas, tensors with values, and numbers of the trace."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None = None  # which of several results it is
    base: Formula | None = None
    # Where the values come from that it, or a view of it, was overwritten with.
    lost: frozenset[str] = frozenset()
    # Symbolic ones in all that it is made of.
    numbers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Formula):
                self.numbers += leaf.numbers
            elif isinstance(leaf, torch.SymInt):
                self.numbers.append(leaf)

    @property
    def root(self) -> Formula:
        """What it is a view of, or itself."""
        return self if self.base is None else self.base.root


class _Evaluation:
    """The values of formulas at one point. `work` counts the elements that were made."""

    def __init__(self, over: TraceSizes, sizes: Sizes, run: _Run) -> None:
        self._over, self._sizes, self._run = over, sizes, run
        self._made: dict[tuple[int, ...], Any] = {}
        self.work = 0

    def of(self, formula: Formula) -> Any:
        # Formulas share parts, of which each runs once.
        key = tuple(map(id, (formula.func, *pytree.tree_leaves((formula.args, formula.kwargs)))))
        if key not in self._made:
            args, kwargs = pytree.tree_map(self._leaf, (formula.args, formula.kwargs))
            self._made[key] = self._run(formula.func, args, kwargs)
            tensors = pytree.tree_leaves(self._made[key])
            self.work += sum(one.numel() for one in tensors if isinstance(one, Tensor))
        made = self._made[key]
        return made if formula.item is None else pytree.tree_leaves(made)[formula.item]

    def _leaf(self, leaf: Any) -> Any:
        return self.of(leaf) if isinstance(leaf, Formula) else self._over.value(leaf, self._sizes)


def answer(formula: Formula, over: TraceSizes, run: _Run) -> Any:
    """What code that looks at a value finds at all sizes; None if that differs or they are many."""
    points = over.points_of(formula.numbers)
    found: Any = None
    # The largest first: it tells how much work all sizes are at most.
    for i, sizes in enumerate(reversed(points)):
        one = _Evaluation(over, sizes, run)
        said = one.of(formula)
        if not i:
            found = said
            if one.work * len(points) > _MOST_WORK:
                return None
        elif type(said) is not type(found) or said != found:
            return None
    return found
