"""Which module and which source line of the user's each traced op comes from."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Generator
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
import torch.fx.traceback as fx_traceback
from torch import nn

from remat.graph_capture.torch_private.core import (
    CallWatcher,
    SelectiveCheckpointMode,
    dispatch_mode_stack,
)

MODULE_KEY, SOURCE_KEY, FUNCTION_KEY = "remat_module", "remat_source", "remat_function"
CASTS_KEY = "remat_casts"  # the region of autocast that an op is in, if casts of weights are kept
COVERED_KEY = "remat_covered"  # number of the function of autograd that runs the op again
CHECKPOINT_KEY = "remat_checkpoint"  # number of the user's checkpoint that covers an op

_MAKES_NO_NODE = frozenset({
    "__get__", "__set__", "dim", "element_size", "is_complex", "is_floating_point", "numel", "size",
    "storage_offset", "stride", "untyped_storage",
})  # fmt: skip
"""Functions that read facts of a tensor: most calls are theirs, by torch's own code above all."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NUMPY = os.path.dirname(np.__file__) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OWN = tuple(
    os.path.join(_ROOT, package) + os.sep
    for package in ("remat", "graph_capture", "solver", "schedules", "rewriter")
)


class Provenance(CallWatcher):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.path = {id(module): name for name, module in model.named_modules()}
        self.stack: list[str] = [""]
        self.failure: BaseException | None = None
        self.failed_in = ""
        self.regions = self.checkpoint = 0

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.__name__ in _MAKES_NO_NODE:
            return func(*args, **kwargs)
        place = {
            MODULE_KEY: self.stack[-1],
            SOURCE_KEY: source_of(sys._getframe(2)),  # beyond the watcher's own
            FUNCTION_KEY: getattr(func, "__name__", ""),
        }
        if torch.is_autocast_cache_enabled():
            place[CASTS_KEY] = str(self.regions)
        if self.checkpoint and not any(  # a policy may keep results, which are not made again
            isinstance(mode, SelectiveCheckpointMode) for mode in dispatch_mode_stack()
        ):
            place[CHECKPOINT_KEY] = str(self.checkpoint)
        with fx_traceback.annotate(place):
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def watching_modules(self) -> Generator[Provenance]:
        hooks = nn.modules.module
        forget = torch.clear_autocast_cache  # called as the outermost region of autocast ends

        def next_region() -> None:
            self.regions += 1
            forget()

        torch.clear_autocast_cache = next_region
        try:
            with (
                hooks.register_module_forward_pre_hook(self._enter),
                # `always_call`: a module that raises leaves the stack too.
                hooks.register_module_forward_hook(self._leave, always_call=True),
            ):
                yield self
        finally:
            torch.clear_autocast_cache = forget

    def module_of(self, error: BaseException) -> str:
        return path_in_model(self.failed_in if error is self.failure else self.stack[-1])

    def _enter(self, module: nn.Module, args: Any) -> None:
        # A module that is none of the model's, as one made in forward, counts as its caller.
        self.stack.append(self.path.get(id(module), self.stack[-1]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and error is not self.failure:  # the innermost sees the error first
            self.failure, self.failed_in = error, self.stack[-1]
        if len(self.stack) > 1:
            self.stack.pop()


def path_in_model(path: str) -> str:
    return "" if path == "model" else path.removeprefix("model.")  # the traced step names it so


def source_of(frame: FrameType | None) -> str:
    """``file:line`` of the innermost frame that is the user's; empty if remat is met first."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.startswith(_OWN):
            break
        if not filename.startswith((_TORCH, "<")):  # names in brackets are of generated code
            return f"{_short_path(filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    if name.startswith((_TORCH, _NUMPY, *_OWN, "<")):
        return False
    return "site-packages" in name or not name.startswith(_STDLIB)


def line_of_user() -> str:
    """The innermost line of the user's code that is running, in brackets after a space."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return f" ({source_of(frame)})" if frame else ""


def source_of_error(traceback: TracebackType | None) -> str:
    """``file:line`` of the innermost user frame of a traceback."""
    found = ""
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not filename.startswith((_TORCH, *_OWN, "<")):
            found = f"{_short_path(filename)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def _short_path(filename: str) -> str:
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative
