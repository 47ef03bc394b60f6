"""One training step recorded, and the arena that serves each later request from its planned place.

A record has kernels' workspaces too, in order. Related: STAlloc, 2025, arXiv 2507.16274.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.devices.meter import Run
from remat.graph_capture.errors import ArenaError, DeviceError
from remat.graph_capture.graph import Ints
from remat.graph_capture.python_state.state_guards import python_state_kept
from remat.graph_capture.tracing.option_pairs import require_compatible
from remat.graph_capture.tracing.restore import restored_after
from remat.graph_capture.tracing.step_module import LossFunction, apply_loss
from remat.rewriter.arena.library import ArenaLibrary, Counts, arena_library
from remat.rewriter.checking.check import plan_run
from remat.rewriter.checking.outcomes import OwnBatch, StepState, own_parameters
from remat.rewriter.compiled import PassKind, StepAllocator
from remat.rewriter.graphs.codegen import Boxed
from remat.rewriter.user_module.module import RematModule
from remat.rewriter.user_module.own_forward import as_before
from remat.schedules.layout import Buffers, Layout, check_layout

_Mask = NDArray[np.bool_]
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, eq=False)
class _Requests:
    size_bytes: Ints
    start: Ints  # event of the step, as `end`
    end: Ints  # `n_events` for what backward leaves alive
    n_forward: int
    n_events: int
    results: tuple[int, ...] = ()  # calls that took what forward returns to the user

    def __len__(self) -> int:
        return len(self.size_bytes)

    @property
    def outlives(self) -> _Mask:
        return self.end == self.n_events  # not given back when backward's graph has returned

    @property
    def is_placed(self) -> _Mask:
        of_forward = np.arange(len(self)) < self.n_forward  # the user may hold it in the next step
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
                f"use an arena for modules that run once a step: one step runs the {phase} of "
                "this module twice"
            )
        try:
            self._library.record_begin()
            results = graph(args)
        finally:
            self.marks[phase] = self._library.record_end()
        if phase == "forward":
            tensors = [one for one in results[: self._n_results] if isinstance(one, Tensor)]
            addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            calls = map(self._library.record_call, addresses)
            self._results = tuple(sorted(call for call in calls if call >= 0))
        else:
            self._has_gradients = any(isinstance(one, Tensor) for one in results)
        return results

    def requests(self) -> _Requests:
        if len(self.marks) < 2:
            missing = "backward" if "forward" in self.marks else "forward"
            raise ArenaError(
                f"pass the batch that the module was planned for: the {missing} of the rewritten "
                "step did not run, so there is nothing to place"
            )
        if not self._has_gradients:  # backward in steps returns none, and goes on after its graph
            raise ArenaError(
                "make the plan with remat.rematerialize: this backward continues after its graph "
                "has returned, as where parameters are updated during backward, and an arena "
                "serves whole graphs"
            )
        n_calls, n_events = self.marks["backward"]
        events, n_forward = self._library.record_read(n_events), self.marks["forward"][0]
        return requests_of(events, n_calls, n_forward, self._results)


def requests_of(
    events: Ints, n_calls: int, n_forward: int, results: tuple[int, ...] = ()
) -> _Requests:
    sizes, calls = events.T  # a size of -1 gives the call's block back (`record_read`)
    is_start = sizes >= 0
    size_bytes, start = (np.zeros(n_calls, np.int64) for _ in range(2))
    end = np.full(n_calls, len(events), np.int64)  # what is never given back outlives the step
    times = np.arange(len(events))
    size_bytes[calls[is_start]], start[calls[is_start]] = sizes[is_start], times[is_start]
    end[calls[~is_start]] = times[~is_start]
    return _Requests(size_bytes, start, end, n_forward, len(events), results)


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
            "pass what remat.rematerialize or Plan.apply returned, before it is wrapped: an arena "
            f"is for one rewritten module, and this is {type(module).__name__}"
        )
    tensors = *module.parameters(), *module.buffers()
    others = {tensor.device.type for tensor in tensors} - {CPU}
    if others:
        raise DeviceError(
            f"train without an arena: the model is on {', '.join(sorted(others))}, and arenas "
            "only work on the CPU so far"
        )
    if not module.training:
        raise ArenaError(
            "call train() on the module first: it is in eval mode, which runs no step of its plan"
        )
    updates = module._remat_updates is not None
    is_added = module._remat_compiled_step.gradient_gates is not None and not updates
    require_compatible(use_arena=True, optimizer_in_backward=updates, accumulate=is_added)
    if module._remat_compiled_step.memory.source is not None:
        raise ArenaError("close the module's arena first: it has one already")
    return module


def record_step(
    module: RematModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None,
    loss_fn: LossFunction | None, target: Any,
) -> _Requests:  # fmt: skip
    """The requests of one step, which is put back; `loss_fn` decides what backward asks for."""
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
        state.prepared(run, accumulate=False)  # the first step of a process asks for more
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


_PATIENCE = 64  # graphs that may run until what the user has kept no longer is in the way


class Arena:
    """One range of memory, in which each request of a training step has a planned place.

    It serves one rewritten module and its copies until it is closed. Requests that are not as
    planned go to torch's allocator: that costs memory and never bits. Blocks that outlive the step
    stay valid while anything holds them. Gradients kept into the next step are in the way until
    dropped; from then on torch's allocator serves them.
    """

    def __init__(self, memory: StepAllocator, requests: _Requests, layout: Layout) -> None:
        check_layout(requests.buffers, layout)
        self.layout = layout
        self._memory, self._library = memory, arena_library()
        n_forward = requests.n_forward
        self._parts = {"forward": (0, n_forward), "backward": (n_forward, len(requests))}
        offsets = np.full(len(requests), -1, np.int64)  # -1 leaves a request to torch's allocator
        offsets[requests.is_placed] = layout.offsets_bytes
        arena_bytes = max(layout.arena_bytes, 1)  # the system maps no 0 bytes
        may_outlive = requests.outlives.astype(np.int64)
        self._number = self._library.open(requests.size_bytes, offsets, may_outlive, arena_bytes)
        self._close = weakref.finalize(self, self._library.close, self._number)
        self._close.atexit = False  # blocks are given back until the process ends
        self._has_warned, self._patience = False, _PATIENCE
        self._last_counts = Counts()
        memory.source = self

    @property
    def arena_bytes(self) -> int:
        """Bytes that the arena takes from the system, once a step has touched them."""
        return self.layout.arena_bytes

    @property
    def counts(self) -> Counts:
        return self._library.counts(self._number) if self.is_open else self._last_counts

    @property
    def is_open(self) -> bool:
        return self._close.alive

    def close(self) -> None:
        if self._memory.source is self:  # a second close must not take away a later arena
            self._memory.source = None
        self._last_counts = self.counts  # the library has no counts of a closed arena
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, phase: PassKind, graph: Boxed, args: list[Any]) -> Any:
        """What the graph returns. This thread is armed while it runs, and not after."""
        if self._library.is_armed():  # another would disarm this thread for the outer graph
            return graph(args)
        counts = Counts()
        try:
            self._library.begin(self._number, *self._parts[phase])  # inside, as Ctrl-C may follow
            results = graph(args)
        finally:
            counts = self._library.end()
        if counts.misses and not self._has_warned:
            self._patience -= 1
            # What is missed since the user still holds blocks is forgiven at first: they may go.
            if counts.unplanned or counts.occupied or not self._patience:
                self._warn(phase, counts)
        return results

    def _warn(self, phase: PassKind, counts: Counts) -> None:
        self._has_warned = True
        warnings.warn(
            "drop what an earlier step has left before the next begins, or close the arena and "
            f"make another: {counts.misses} of {counts.misses + counts.hits} "
            f"requests of a {phase}, {counts.missed_bytes} bytes, went to torch's allocator. Of "
            f"these, {counts.unplanned} were not planned, and {counts.occupied + counts.kept} "
            "found their place taken.\n"
            "Results are the same, and more memory is in use. This is said once; the arena's "
            "counts go on",
            stacklevel=2,
        )

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"Arena({state}, {self.layout!r}, {self.counts!r})"
