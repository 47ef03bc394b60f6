"""What the backward that a thread is about to run belongs to.

Autograd calls the backward of a compiled step without a word of the forward that it is of. A hook
that runs right before it, in the same thread and the same pass of the engine, says so here.
"""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

import torch

_C: Any = torch._C
Run = TypeVar("Run")


class ExpectedBackward(Generic[Run]):
    """At most one `Run` a thread, which is taken once, by the pass that it was said in."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def expect(self, run: Run) -> None:
        """The next backward of this thread is of `run`."""
        self._of_thread.said = run, _C._current_graph_task_id()

    def take(self) -> Run | None:
        """What was said in this pass, if anything."""
        run, task = getattr(self._of_thread, "said", (None, -1))
        self._of_thread.said = None, -1
        return run if task == _C._current_graph_task_id() else None
