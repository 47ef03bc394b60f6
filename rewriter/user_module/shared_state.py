"""Modules that share the user's state, every parameter, buffer and attribute, through one dict."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
from torch import nn

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.over_ranks.dtensors import is_sharded_by_fsdp
from remat.graph_capture.tracing.step_module import LossFunction, apply_loss
from remat.rewriter.user_module.block_shells import original_of_shell
from remat.rewriter.user_module.own_forward import replacement_of
from remat.rewriter.user_module.unplanned import Unplanned


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
    _remat_unplanned: ClassVar[Unplanned]

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
        result = output if target is None else apply_loss(cls._remat_loss_fn, output, target)
        if torch.is_grad_enabled():
            cls._remat_unplanned.evaluated(cls._remat_original_module, result)
        return result

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)  # pyright: ignore
        if isinstance(found, nn.Module):
            self._remat_note(name)
        return found

    def _remat_note(self, part: str) -> None:
        """Somebody takes a part of this module, which may be called in place of the whole."""
        if not torch.is_grad_enabled():
            return
        forward, module = replacement_of(self), self  # pyright: ignore
        if forward is not None:
            self._remat_unplanned.replaced(module, forward)  # pyright: ignore
        elif self._remat_unplanned.is_open:
            self._remat_unplanned.taken_apart(module, part)  # pyright: ignore

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
        made = self._remat_over(copy.deepcopy(self._remat_original_module, memo))
        made.__setstate__(copy.deepcopy(self._remat_unplanned, memo))
        return made

    def __setstate__(self, unplanned: Unplanned) -> None:
        type(self)._remat_unplanned = unplanned

    def __reduce__(self) -> tuple[Any, ...]:
        return *self._remat_recipe_to_pickle(), self._remat_unplanned

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return self.__reduce__()

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RewriteError(
            "use DistributedDataParallel: DataParallel copies a module at each step, and a plan is "
            "for the parameters of one"
        )


def original_of(model: nn.Module) -> nn.Module:
    """The module that a planned one was made of, as a notebook cell that is run twice plans it.

    Raises
    ------
    RewriteError : the planned module has become another since, which its original is not.
    """
    while isinstance(model, SharedState):
        if replacement_of(model) is not None:
            raise RewriteError(
                f"plan this {type(model).__name__} before its forward is replaced, as Accelerate's "
                "prepare does: the new one calls the first plan, and the original lacks it"
            )
        if is_sharded_by_fsdp(model):
            raise RewriteError(
                f"plan this {type(model).__name__} before fully_shard: it is sharded, and follows "
                "a plan already"
            )
        model = model._remat_original_module
    # What is no module at all is refused later, by its name.
    return original_of_shell(model) if isinstance(model, nn.Module) else model  # pyright: ignore
