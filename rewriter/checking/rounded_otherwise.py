"""How far rounding alone moves each result of an eager step.

A step is run with each op's result a little off, by as much as one rounding may be. Results that
move by their own size are made of rounding errors, such as the gradient of a bias before a batch
norm, which is zero on paper. Other code may round otherwise, and such a result is then another.

Source: D. S. Parker, Monte Carlo Arithmetic, 1997.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class RoundedOtherwise(TorchDispatchMode):
    """In here, each new result is off by up to one unit in the last place of its dtype.

    Whole numbers stay as they are: they are counts and masks, and most are exact. So do results
    that are made of no tensor, and those that share a storage with an argument. The random streams
    are not touched.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the op, and move what it returns."""
        results = func(*args, **(kwargs or {}))
        given = pytree.tree_leaves((args, kwargs))
        shares = any(result.alias_info is not None for result in func._schema.returns)
        if shares or not any(isinstance(leaf, Tensor) for leaf in given):
            return results
        return pytree.tree_map(self._moved, results)

    def _moved(self, result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        by = torch.empty_like(result).uniform_(-1, 1, generator=self._generator(result.device))
        by.mul_(result).mul_(torch.finfo(result.dtype).eps)
        return result + torch.where(result == result.round(), torch.zeros_like(by), by)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device=device).manual_seed(0)
        return self._generators[device]


Outcome = Mapping[str, Any]


def moved_by_rounding(outcome: Callable[[], Outcome], expected: Outcome) -> dict[str, float]:
    """For each floating-point result, how far its norm moves if each op rounds otherwise.

    Parameters
    ----------
    outcome : runs the eager step. expected : what it gave without this.
    """
    with RoundedOtherwise():
        found = outcome()
    return {
        name: float((found[name].double() - like.double()).norm())
        for name, like in expected.items()
        if isinstance(like, Tensor) and like.is_floating_point()
    }
