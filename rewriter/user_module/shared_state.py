"""Modules that share the user's state, every parameter, buffer and attribute, through one dict."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, SupportsIndex

from torch import nn

from remat.graph_capture.tracing.step_module import LossFunction, apply_loss


class SharedState:
    """What such modules have in common. Each instance has a class of its own.

    A copy, deep or not, is made over a copy of the user's module. Pickling keeps the user's module,
    the schedule and the recipe of the trace; reading traces anew. So a plan that another torch
    would trace differently is refused there.

    Class attributes
    ----------------
    original_module : the user's module, whose ``__dict__`` the instance has.
    """

    original_module: ClassVar[nn.Module]
    _remat_original_module: ClassVar[nn.Module]
    _remat_loss_fn: ClassVar[LossFunction | None]

    def __init__(self) -> None:
        self.__dict__ = self._remat_original_module.__dict__

    @classmethod
    def _remat_last_used(cls) -> type[SharedState]:
        """The class of the rewritten module that ran last: this one, or one that it holds."""
        return cls

    def _remat_running(self, batch: Any) -> nn.Module:
        """The rewritten module that runs a batch, (args, kwargs, target): this one, or a part."""
        return self  # pyright: ignore[reportReturnType]

    @classmethod
    def _remat_run_original(cls, args: Any, kwargs: Any, target: Any) -> Any:
        """The user's own forward, and the loss if there is a target."""
        output = cls._remat_original_module.forward(*args, **kwargs)
        return output if target is None else apply_loss(cls._remat_loss_fn, output, target)

    @classmethod
    def _remat_over(cls, model: nn.Module) -> Any:
        """The same over a copy of the original module. Each kind of module says how."""
        raise NotImplementedError

    @classmethod
    def _remat_recipe_to_pickle(cls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function, and the arguments with which it makes the same elsewhere."""
        raise NotImplementedError

    def __copy__(self) -> Any:
        return self._remat_over(copy.copy(self._remat_original_module))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._remat_over(copy.deepcopy(self._remat_original_module, memo))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._remat_recipe_to_pickle()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._remat_recipe_to_pickle()
