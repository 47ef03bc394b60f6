"""Parameters are updated during backward, each as soon as its gradient is there.

Hooks stand only while the step's backward runs, so no other backward updates anything. No op reads
a parameter after its update (`schedules/simulate.py`).
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.gradients import parameter_groups, require_known, step_of
from remat.graph_capture.torch_private.core import (
    active_ddp_module,
    current_graph_task_id,
    keeps_graph,
)

_CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "clip_gradients")
"""Functions of torch, and methods of wrappers around models that call them."""


@dataclass
class ClippingWatch:
    """Warns once if a caller of forward clips gradients, which updates have used by then."""

    kind: str
    seen: set[CodeType] = field(default_factory=set[CodeType])
    has_warned: bool = False

    def look(self) -> None:
        # Clipping finds no gradients and returns 0; forward's callers on the stack show it.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self.has_warned:
            code = frame.f_code
            if code not in self.seen:  # each step comes through the same code
                self.seen.add(code)
                if name := _clipper_in(frame):
                    self._warn_of(frame, name)
            frame = frame.f_back

    def _warn_of(self, frame: FrameType, name: str) -> None:
        self.has_warned = True
        code = frame.f_code
        warnings.warn(
            f"leave out clipping, or update after backward (remat.rematerialize): the "
            f"{self.kind} updates its parameters during backward, so {name}, in {code.co_name} "
            f"({code.co_filename}:{_line_of(code, name)}), finds no gradients and clips nothing",
            stacklevel=2,
        )


def _clipper_in(frame: FrameType) -> str:
    # By identity too: a loop may import them under another name.
    ours = {id(getattr(clip_grad, name)) for name in _CLIPPERS if hasattr(clip_grad, name)}
    for name in frame.f_code.co_names:
        if name in _CLIPPERS or id(frame.f_globals.get(name)) in ours:
            return name
    return ""


def _line_of(code: CodeType, name: str) -> int:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        positions = instruction.positions
        line = positions.lineno if positions and positions.lineno else line
        if instruction.argval == name:
            break
    return line


@dataclass
class _Set:
    """Parameters whose gradients come together, for one step of the optimizer."""

    optimizer: Optimizer | None
    groups: dict[int, dict[str, Any]]
    parameters: dict[int, nn.Parameter]  # by `id`
    there: set[int] = field(default_factory=set[int])  # whose gradients are

    def update(self) -> None:
        # In the order in which the step was measured: some take more in another.
        ready = [one for key, one in self.parameters.items() if key in self.there]
        self.there.clear()
        if ready and self.optimizer is not None:
            step_of(self.optimizer, ready, self.groups)
        for parameter in ready:
            parameter.grad = None  # the plan has room for a few gradients, not for all


_NONE = _Set(None, {}, {})


class Updates:
    """Gradients stay in ``.grad`` while `paused`, which the plan counts if it `accumulates`."""

    def __init__(self, optimizer: Optimizer, kind: str, *, accumulates: bool) -> None:
        self.optimizer, self.kind, self.accumulates = optimizer, kind, accumulates
        self.paused = False
        self._handles: list[RemovableHandle] = []
        self._filling = _NONE
        self._last_pass = -1
        self._clipping = ClippingWatch(kind)

    def require_forward(self) -> None:
        """Refuse a forward within DDP, which waits for gradients; warn of a caller that clips."""
        if not self.paused:
            self._clipping.look()
        if not self.paused and active_ddp_module() is not None:
            raise RewriteError(
                f"plan with remat.rematerialize, and update after backward: the {self.kind} "
                "updates its parameters during backward, and DistributedDataParallel around it "
                "averages their gradients first"
            )

    def require_backward(self) -> None:
        if self.paused:
            return
        require_known(self.optimizer)
        if keeps_graph():
            raise RewriteError(
                "call backward once, or use module.no_update() for all calls but the last: "
                f"backward with retain_graph=True through the {self.kind} would read parameters "
                "that it has already updated"
            )
        now = current_graph_task_id()
        if self._last_pass == now:
            raise RewriteError(
                "call backward for each loss, all but the last within module.no_update(): one "
                f"backward runs through two forwards of the {self.kind}, which updates its "
                "parameters meanwhile"
            )
        self._last_pass = now

    def begin(self, sets: Iterable[Iterable[Any]]) -> Callable[[], None]:
        """Each of `sets`, whose gradients come together, takes one step of the optimizer."""
        self._end()  # a backward that failed has not ended, and updates nothing more
        if self.paused:
            return self._end
        groups = parameter_groups(self.optimizer)
        for parameters in sets:
            # What the optimizer does not have keeps its gradient.
            trained = [p for p in parameters if isinstance(p, nn.Parameter) and id(p) in groups]
            own = _Set(self.optimizer, groups, {id(one): one for one in trained})
            for parameter in own.parameters.values():
                there = functools.partial(self._there, own)
                self._handles.append(parameter.register_post_accumulate_grad_hook(there))

        def end() -> None:
            self._filling.update()  # a backward of some parameters fills no set
            self._end()

        return end

    def _there(self, own: _Set, parameter: Tensor) -> None:
        if self._filling is not own:
            self._filling.update()  # it gets no more gradients
            self._filling = own
        own.there.add(id(parameter))
        if len(own.there) == len(own.parameters):
            own.update()

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._filling = _NONE

    @contextlib.contextmanager
    def held_back(self) -> Generator[None]:
        """Backwards meanwhile add to ``.grad`` and update nothing; the plan must have the room."""
        if not self.accumulates:
            raise RewriteError(
                f"make the plan with accumulate=True: this {self.kind}'s plan has no room for "
                "gradients that stay"
            )
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before
