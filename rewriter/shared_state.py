"""Modules that have the user's own state: every parameter, buffer and attribute, by one dict."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from torch import nn

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.step import LossFunction, apply_loss


class SharedState:
    """What such modules have in common; each instance has a class of its own.

    Class attributes
    ----------------
    original_module : the user's, whose ``__dict__`` the instance has.
    not_copied, not_pickled : what to tell who tries.
    """

    original_module: ClassVar[nn.Module]
    not_copied: ClassVar[str]
    not_pickled: ClassVar[str]
    _loss_fn: ClassVar[LossFunction | None]

    def __init__(self) -> None:
        self.__dict__ = self.original_module.__dict__

    @classmethod
    def _last_used(cls) -> type[SharedState]:
        """The class of the rewritten module that the last step ran; this one, or one it holds."""
        return cls

    @classmethod
    def _run_original(cls, args: Any, kwargs: Any, target: Any) -> Any:
        """The user's own forward, and the loss where there is a target."""
        output = cls.original_module.forward(*args, **kwargs)
        return output if target is None else apply_loss(cls._loss_fn, output, target)

    def __copy__(self) -> NoReturn:
        raise RewriteError(type(self).not_copied)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RewriteError(type(self).not_copied)

    def __reduce__(self) -> NoReturn:
        raise RewriteError(type(self).not_pickled)
