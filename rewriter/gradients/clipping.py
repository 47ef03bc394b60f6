"""Notices a training loop that clips gradients which updates during backward have used.

`clip_grad_norm_` after backward finds no gradients, returns a norm of 0 and says nothing. No hook
sees that call. But the functions that call forward are on the stack meanwhile, and theirs is mostly
the loop that clips. So their code is looked at, once each.
"""

from __future__ import annotations

import dis
import sys
import warnings
from dataclasses import dataclass, field
from types import CodeType, FrameType

from torch.nn.utils import clip_grad

CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "clip_gradients")
"""Functions of torch, and methods of wrappers around models that call them."""


@dataclass
class ClippingWatch:
    """Warns once if a caller of forward clips gradients.

    Attributes
    ----------
    kind : of the module. seen : code that was looked at.
    """

    kind: str
    seen: set[CodeType] = field(default_factory=set[CodeType])
    has_warned: bool = False

    def look(self) -> None:
        """Look at the code of all callers that was not seen before."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self.has_warned:
            code = frame.f_code
            if code not in self.seen:
                self.seen.add(code)
                self._warn_of(frame, _clipper_in(frame))
            frame = frame.f_back

    def _warn_of(self, frame: FrameType, name: str) -> None:
        if not name:
            return
        self.has_warned = True
        code = frame.f_code
        warnings.warn(
            f"{code.co_name} ({code.co_filename}:{_line_of(code, name)}) names {name}: the "
            f"{self.kind} updates its parameters during backward, so that {name} finds no "
            "gradients after it and clips nothing. Update after backward (remat.rematerialize), "
            "or leave out clipping",
            stacklevel=2,
        )


def _clipper_in(frame: FrameType) -> str:
    """The name by which the code of a frame loads a function that clips; empty without one."""
    ours = {id(getattr(clip_grad, name)) for name in CLIPPERS if hasattr(clip_grad, name)}
    for name in frame.f_code.co_names:
        if name in CLIPPERS or id(frame.f_globals.get(name)) in ours:
            return name
    return ""


def _line_of(code: CodeType, name: str) -> int:
    """The line at which the code first loads the name."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        positions = instruction.positions
        line = positions.lineno if positions and positions.lineno else line
        if instruction.argval == name:
            break
    return line
