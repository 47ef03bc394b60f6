"""What one training step asks the allocator for, in order, and when it gives each block back.

Related: STAlloc, 2025, arXiv 2507.16274, which records a step too. A record has what a graph does
not tell, such as the workspaces of kernels in their pieces.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.devices.meter import Run
from remat.graph_capture.errors import ArenaError, DeviceError
from remat.graph_capture.graph import Ints
from remat.graph_capture.python_state.state_guards import python_state_kept
from remat.graph_capture.tracing.restore import restored_after
from remat.graph_capture.tracing.step_module import LossFunction, apply_loss
from remat.rewriter.arena.library import ArenaLibrary, arena_library
from remat.rewriter.arena.step_allocator import PassKind, StepAllocator
from remat.rewriter.checking.check import plan_run
from remat.rewriter.checking.outcomes import OwnBatch, StepState, own_parameters
from remat.rewriter.graphs.codegen import Boxed
from remat.rewriter.user_module.module import RematModule
from remat.rewriter.user_module.unplanned import as_before
from remat.schedules.layout import Buffers

_Mask = NDArray[np.bool_]
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, eq=False)
class Requests:
    """The requests of one step in the order of its calls, those of forward first.

    `start` and `end` are in events of the step; `end` is `n_events` for what backward leaves alive.
    `results` are calls that took what forward returns to the user.
    """

    size_bytes: Ints
    start: Ints
    end: Ints
    n_forward: int
    n_events: int
    results: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.size_bytes)

    @property
    def outlives(self) -> _Mask:
        # Not given back when backward's graph has returned.
        return self.end == self.n_events

    @property
    def is_placed(self) -> _Mask:
        # The user may hold what forward leaves while the next step runs.
        of_forward = np.arange(len(self)) < self.n_forward
        placed = ~(of_forward & self.outlives)
        placed[list(self.results)] = False
        return placed

    @property
    def buffers(self) -> Buffers:
        chosen = self.is_placed
        return Buffers.of_arrays(self.size_bytes[chosen], self.start[chosen], self.end[chosen])


class Recorder:
    """A source of memory that leaves all to torch's allocator, and notes what it is asked for."""

    def __init__(self, library: ArenaLibrary, n_results: int) -> None:
        self._library, self._n_results = library, n_results
        self.marks: dict[PassKind, tuple[int, int]] = {}
        self._results: tuple[int, ...] = ()
        self._has_gradients = False

    def run(self, phase: PassKind, graph: Boxed, args: list[Any]) -> Any:
        if phase in self.marks:
            raise ArenaError(
                f"one step runs the {phase} of this module twice: an arena serves modules that run "
                "once a step"
            )
        try:
            self._library.record_begin()
            results = graph(args)
        finally:
            self.marks[phase] = self._library.record_end()
        if phase == "forward":
            self._results = self._calls_of(results[: self._n_results])
        else:
            self._has_gradients = any(isinstance(one, Tensor) for one in results)
        return results

    def _calls_of(self, results: Sequence[Any]) -> tuple[int, ...]:
        tensors = [one for one in results if isinstance(one, Tensor)]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        calls = map(self._library.record_call, addresses)
        return tuple(sorted(call for call in calls if call >= 0))

    def requests(self) -> Requests:
        if len(self.marks) < 2:
            missing = "backward" if "forward" in self.marks else "forward"
            raise ArenaError(
                f"the {missing} of the rewritten step did not run, so there is nothing to place: "
                "pass the batch that the module was planned for"
            )
        # Backward in steps returns no gradients, and goes on after the graph.
        if not self._has_gradients:
            raise ArenaError(
                "the backward of this module goes on after its graph has returned, as where "
                "parameters are updated during backward, and an arena serves whole graphs: make "
                "the plan with remat.rematerialize"
            )
        n_calls, n_events = self.marks["backward"]
        events, n_forward = self._library.record_read(n_events), self.marks["forward"][0]
        return requests_of(events, n_calls, n_forward, self._results)


def requests_of(
    events: Ints, n_calls: int, n_forward: int, results: tuple[int, ...] = ()
) -> Requests:
    # As of `ArenaLibrary.record_read`: a size of -1 gives the call's block back.
    sizes, calls = events.T
    is_start = sizes >= 0
    size_bytes, start = (np.zeros(n_calls, np.int64) for _ in range(2))
    end = np.full(n_calls, len(events), np.int64)  # what is never given back outlives the step
    times = np.arange(len(events))
    size_bytes[calls[is_start]], start[calls[is_start]] = sizes[is_start], times[is_start]
    end[calls[~is_start]] = times[~is_start]
    return Requests(size_bytes, start, end, n_forward, len(events), results)


@contextlib.contextmanager
def recorded(memory: StepAllocator) -> Generator[Recorder]:
    library = arena_library()
    with _one_at_a_time:  # the library keeps one record
        before = memory.source
        try:
            library.record_open()
            memory.source = recorder = Recorder(library, memory.n_results)
            yield recorder
        finally:
            memory.source = before
            library.record_close()


def require_arena_fits(module: nn.Module) -> RematModule:
    if not isinstance(module, RematModule):
        raise ArenaError(
            f"an arena is for one rewritten module, and this is {type(module).__name__}: pass what "
            "remat.rematerialize or Plan.apply returned, before it is wrapped"
        )
    tensors = *module.parameters(), *module.buffers()
    others = {tensor.device.type for tensor in tensors} - {CPU}
    if others:
        raise DeviceError(
            f"the model is on {', '.join(sorted(others))}, and arenas are for the CPU so far: "
            "train without one"
        )
    if not module.training:
        raise ArenaError(
            "the module is in eval mode, which runs no step of its plan: call train() on it first"
        )
    if module._remat_compiled_step.gradient_gates is not None:
        raise ArenaError(
            "the module releases gradients while backward runs, whose parts an arena does not "
            "follow: plan with accumulate=False and remat.rematerialize, or train without one"
        )
    if module._remat_compiled_step.memory.source is not None:
        raise ArenaError("the module has an arena: close that first")
    return module


def record_step(
    module: RematModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    loss_fn: LossFunction | None,
    target: Any,
) -> Requests:
    """The requests of one step; all that it changes is put back, and no hook of a parameter runs.

    `loss_fn` is what the results go through outside of the module. It says in which layout backward
    gets its first gradients, and so what that asks for.
    """
    guards, model = module._remat_guards, module._remat_original_module
    captured_loss = guards.recipe.loss_fn
    batch = OwnBatch((args, dict(kwargs or {}), target))
    outside = loss_fn if captured_loss is None else None
    run = _with_loss(module, batch, outside) if outside else plan_run(module, batch, captured_loss)
    overwrites = module._remat_compiled_step.gradients.overwrites
    with contextlib.ExitStack() as stack:
        stack.enter_context(restored_after(model))
        stack.enter_context(as_before(module))
        ran = guards.python_state.code_in_scope
        python_state = stack.enter_context(python_state_kept(model, captured_loss, ran))
        stack.enter_context(own_parameters(model, module))
        state = StepState(model, batch.leaves, CPU, python_state, keep_parameters=overwrites)
        stack.enter_context(state.put_back())
        # The first step of a process asks for more, such as what kernels keep.
        state.prepared(run, accumulate=False)
        state.reset()
        recorder = stack.enter_context(recorded(module._remat_compiled_step.memory))
        run()
        return recorder.requests()


def _with_loss(module: RematModule, batch: OwnBatch, loss_fn: LossFunction) -> Run:
    def run() -> Any:
        args, kwargs, target = batch()
        loss = apply_loss(loss_fn, module(*args, **kwargs), target)
        loss.backward()
        return loss

    return run
