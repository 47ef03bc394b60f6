"""One budget for the several graphs that a model breaks into, and for several calls of one.

While a graph runs, what the open forwards before it saved is held: those whose autograd node lives
and whose backward has not run. Dynamo's frame numbers cannot say this. All graphs are compiled in
the first forward, so each finds the same forwards open as in later steps. If the program changes, a
forward that no longer fits is refused.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from remat.compile.given_up import warn_of_eager_ops
from remat.compile.specialize import libraries_bytes
from remat.formats import budget_text, bytes_text
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.errors import BudgetError, RewriteError
from remat.graph_capture.torch_private.aot import functorch_config, symbolic_convert
from remat.graph_capture.torch_private.core import FakeTensor, module_call_code
from remat.graph_capture.tracing.resident import storage_bytes
from remat.rewriter.guards.backward import OpenForwards, refuse_compiled_autograd
from remat.rewriter.inductor.replay import ReplayedMemory, StepBytes

# Later graphs are not known yet, but the parameters of all modules are found on the stack.

_BUFFERS = 3  # buffers of the size of a block that FSDP2 needs beside the block that runs


@dataclass(frozen=True)
class WholeModel:
    """Bytes of all modules that the compiled function names."""

    static_bytes: int = 0  # parameters and buffers
    gradient_bytes: int = 0
    is_split: bool = False  # other graphs follow: a break, or a module in another
    n_alike: int = 1  # compiled modules of the same class
    around: str = ""  # class of the module around it; empty if there is none


def whole_model() -> WholeModel:
    translator: Any = getattr(symbolic_convert.tls, "current_tx", None)
    if translator is None:
        return WholeModel()
    root = translator.output.root_tx
    modules = list(_modules(root.f_locals.values()))
    # A function that is compiled may read its model from globals.
    modules += _modules(root.f_globals.get(name) for name in root.f_code.co_names)
    outer = _outermost(modules)
    static_bytes, gradient_bytes = _bytes_held_by(modules)
    outer_bytes, outer_gradient_bytes = (0, 0) if outer is None else _bytes_held_by([outer])
    outer_bytes += 0 if outer is None else _sharding_buffers_bytes(outer)
    reason = translator.output.compile_subgraph_reason
    is_part = outer_bytes > static_bytes  # a module that holds more calls it as a part
    return WholeModel(
        static_bytes=max(static_bytes, outer_bytes),
        gradient_bytes=max(gradient_bytes, outer_gradient_bytes),
        is_split=is_part or (reason is not None and reason.graph_break),
        n_alike=_n_alike(modules[0], outer) if is_part else 1,
        around=type(getattr(outer, "_orig_mod", outer)).__name__ if is_part else "",
    )


def _modules(values: Iterable[Any]) -> Iterator[nn.Module]:
    return (value for value in values if isinstance(value, nn.Module))


def _outermost(parts: Sequence[nn.Module]) -> nn.Module | None:
    known = set(map(id, parts))
    found: nn.Module | None = None
    frame = sys._getframe()
    while frame is not None:
        # Every call of a module goes through this code, with the module as `self`.
        owner = frame.f_locals.get("self") if frame.f_code is module_call_code else None
        if isinstance(owner, nn.Module) and not known.isdisjoint(map(id, owner.modules())):
            found = owner
        frame = frame.f_back
    return found


def _bytes_held_by(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Bytes of parameters and buffers, and of gradients; of a sharded one, this rank's part."""
    parameters = {id(p): p for module in modules for p in module.parameters()}
    buffers = {id(b): b for module in modules for b in module.buffers()}
    here = [getattr(t, "_local_tensor", t) for t in (*parameters.values(), *buffers.values())]
    trained = [p for p in parameters.values() if p.requires_grad]
    gradient_bytes = sum(getattr(p, "_local_tensor", p).nbytes for p in trained)
    return storage_bytes(here, set()), gradient_bytes


def _sharding_buffers_bytes(outer: nn.Module) -> int:
    """What FSDP2 holds beside a block that runs; 0 where nothing is sharded."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in outer.modules() if isinstance(module, FSDPModule)]
    # Gathered ahead, reduced in, and gloo's copy: each at most as large as the largest block.
    return _BUFFERS * max(map(_sharded_bytes, sharded), default=0)


def _sharded_bytes(module: nn.Module) -> int:
    """Of the parameters that are sharded with a module, and not with one inside, as whole."""
    from torch.distributed.fsdp import FSDPModule

    inner = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
    others = {id(p) for m in inner for p in m.parameters()}
    own = [p for p in module.parameters() if id(p) not in others]
    return sum(p.numel() * p.element_size() for p in own)  # `numel` of a sharded one is the whole's


def _n_alike(part: nn.Module, outer: nn.Module | None) -> int:
    if outer is None:
        return 1
    compiled = {
        id(inner): inner
        for module in outer.modules()
        for inner in (getattr(module, "_orig_mod", module),)
        # Compiled in place by `module.compile()`; `torch.compile` wraps it instead.
        if inner is not module or module._compiled_call_impl is not None
    }
    return max(1, sum(type(module) is type(part) for module in compiled.values()))


Frame = tuple[int, ...]  # dynamo's graph and compilation, ours of a size


@dataclass(frozen=True)
class _Noted:
    """Bytes of one compiled graph; `is_of_several` if each call is of a module of its own."""

    static_bytes: int
    dynamic_bytes: int
    gradient_bytes: int
    chosen: ReplayedMemory
    stock: ReplayedMemory
    budget_bytes: int
    is_of_several: bool = False

    @classmethod
    def of(
        cls, step: StepBytes, chosen: ReplayedMemory, stock: ReplayedMemory, budget_bytes: int
    ) -> _Noted:
        return cls(
            step.static_bytes, step.dynamic_bytes, step.gradient_bytes,
            step.alone(chosen), step.alone(stock), budget_bytes, step.modules > 1,
        )  # fmt: skip


@dataclass
class SharedBudget:
    """The graphs of one call of torch.compile, by dynamo's frame and compilation."""

    noted: dict[Frame, _Noted] = field(default_factory=dict[Frame, _Noted])
    forwards: OpenForwards = field(default_factory=OpenForwards)
    whole: WholeModel = field(default_factory=WholeModel)  # the model that a graph break has split
    awaited_gradient_bytes: int = 0  # of graphs still to be compiled
    device: str = CPU
    libraries_bytes: int = 0  # what libraries keep on `device` all the time

    def runs_on(self, device: str) -> None:
        if device != self.device:  # what libraries keep is measured, once for each device
            self.device, self.libraries_bytes = device, libraries_bytes(device)

    def modules_ahead(self, whole: WholeModel, frame: Frame) -> int:
        """How many compiled modules like that of `frame` are still to be called, it included."""
        called = sum(one[0] == frame[0] for one in self.forwards.graphs())
        return max(1, whole.n_alike - called)

    def expect(self, whole: WholeModel, frame: Frame, gradient_bytes: int, modules: int = 1) -> int:
        """Note the model around a graph; returns bytes of gradients that later graphs leave."""
        before = self.forwards.graphs()
        if not before:  # first graph of a step: another model may have been here
            self.whole = whole if whole.is_split else WholeModel()
        # A module inside ends without a break, and graphs of the modules around it follow.
        is_end = not whole.is_split and whole.static_bytes >= self.whole.static_bytes
        known = self._gradient_bytes([one for one in before if modules > 1 or one[0] != frame[0]])
        known += modules * gradient_bytes
        later = 0 if is_end else self.whole.gradient_bytes - known
        self.awaited_gradient_bytes = max(0, later)
        return self.awaited_gradient_bytes

    def held_bytes(self, frame: Frame, static_bytes: int, dynamic_bytes: int) -> int:
        """Before the graph of `frame` allocates anything."""
        before = self.forwards.graphs()
        # An earlier call of the same code has these parameters already.
        own = 0 if frame[0] in {one[0] for one in before} else static_bytes
        awaited = max(0, self.whole.static_bytes - own - self._static_bytes(before))
        left = self._left(before, is_stock=False)
        return self.libraries_bytes + own + awaited + dynamic_bytes + left

    def base_bytes(
        self, frame: Frame, step: StepBytes, stock: ReplayedMemory, held_bytes: int
    ) -> int:
        """The peak that all graphs so far have as torch compiles them, that of `frame` included."""
        before = self.forwards.graphs()
        left, held = self._left(before, is_stock=True), self._left(before, is_stock=False)
        self.noted[frame] = _Noted.of(step, stock, stock, 0)  # for `_peak`; `note` replaces it
        frames = [*before, frame]
        peaks = [self._peak(frames, k, is_stock=True) for k in range(len(frames))]
        return max(held_bytes + stock.peak_bytes - held + left, *peaks)

    def others_text(self, frame: Frame) -> str:
        # Without the numbers of frames, which differ between processes.
        before = [(one[0] == frame[0], self.noted[one]) for one in self.forwards.graphs()]
        whole = self.whole if before else None
        return f"{before} {whole} {self.given_to_other_shapes_bytes(frame)}"

    def given_to_other_shapes_bytes(self, frame: Frame) -> int:
        """The largest budget of other compilations of the same code; 0 if there are none."""
        others = (n for one, n in self.noted.items() if one[0] == frame[0] and one != frame)
        return max((one.budget_bytes for one in others), default=0)

    def note(
        self, frame: Frame, step: StepBytes, chosen: ReplayedMemory, stock: ReplayedMemory,
        budget_bytes: int, *, is_bound: bool = True,
    ) -> None:  # fmt: skip
        """`BudgetError` where a bound budget is exceeded; one that was not asked for is raised."""
        frames = [*self.forwards.graphs(), frame]
        self.noted[frame] = _Noted.of(step, chosen, stock, budget_bytes)
        peaks = [self._peak(frames, k, is_stock=False) for k in range(len(frames))]
        if not is_bound:
            raised = max(budget_bytes, *peaks)
            self.noted[frame] = dataclasses.replace(self.noted[frame], budget_bytes=raised)
            return
        highest = peaks.index(max(peaks))  # earlier graphs were planned before this one was known
        if peaks[highest] <= budget_bytes:
            return
        enough = max(*peaks, *(self._peak(frames, k, is_stock=True) for k in range(len(frames))))
        raise BudgetError(
            f'give options={{"budget": "{budget_text(enough)}"}}, for which nothing need be '
            "recomputed, or find and remove graph breaks with fullgraph=True.\n"
            f"The model breaks into {len(set(frames))} graphs, and graph {frames[highest][0]} "
            f"needs {bytes_text(peaks[highest])} with the parameters and gradients of later ones, "
            "which were not known when it was planned, above the budget of "
            f"{bytes_text(budget_bytes)}"
        )

    def require_room(self, frame: Frame) -> None:
        """`BudgetError` where more forwards are open than when the graph of `frame` was planned."""
        if not (before := self.forwards.graphs()):  # alone, it has the room that it was planned for
            return
        budget_bytes, frames = self.noted[frame].budget_bytes, [*before, frame]
        peak_bytes = max(self._peak(frames, k, is_stock=False) for k in range(len(frames)))
        if peak_bytes > budget_bytes:
            again = before.count(frame)
            raise BudgetError(
                "call backward before the next forward, put no_grad around forwards that need no "
                f'backward, or plan for more open forwards with options={{"calls": {again + 1}, '
                "...}.\n"
                f"Graph {'/'.join(map(str, frame))} is called with {len(before)} forwards whose "
                f"backward is still to come, {again} of them its own, and would need "
                f"{bytes_text(peak_bytes)} with what these saved, above the budget of "
                f"{bytes_text(budget_bytes)}"
            )

    def _left(self, frames: Sequence[Frame], *, is_stock: bool) -> int:
        """What forwards leave: inputs and saved bytes for each, parameters once for each graph."""
        noted = [self.noted[frame] for frame in frames]
        saved = sum((n.stock if is_stock else n.chosen).saved_bytes for n in noted)
        return saved + sum(n.dynamic_bytes for n in noted) + self._static_bytes(frames)

    def _static_bytes(self, frames: Sequence[Frame]) -> int:
        largest: dict[int, int] = {}
        for frame in frames:
            # Compilations of one frame, for other shapes, share their parameters.
            largest[frame[0]] = max(largest.get(frame[0], 0), self.noted[frame].static_bytes)
        return sum(largest.values())

    def _gradient_bytes(self, frames: Sequence[Frame]) -> int:
        shared: dict[int, int] = {}
        own_bytes = 0
        for frame in frames:
            one = self.noted[frame]
            if one.is_of_several:
                own_bytes += one.gradient_bytes
            else:
                shared[frame[0]] = one.gradient_bytes  # calls of one module add up in one gradient
        return own_bytes + sum(shared.values())

    def _peak(self, frames: Sequence[Frame], k: int, *, is_stock: bool) -> int:
        """Peak of the k-th forward and its backward, with what others hold beside them."""
        own = self.noted[frames[k]]
        peaks = own.stock if is_stock else own.chosen
        # Parameters of all modules are there all the time, also those of graphs still to come.
        static = max(self._static_bytes(frames), self.whole.static_bytes)
        parameters = static - self._static_bytes(frames[:k])
        after_bytes = self._gradient_bytes(frames[k + 1 :])  # backward runs from last to first
        backward = peaks.backward_peak_bytes + after_bytes + self.awaited_gradient_bytes
        if k < len(frames) - 1:
            backward += self.noted[frames[-1]].chosen.output_bytes  # the loss, which the user holds
        left = self._left(frames[:k], is_stock=is_stock)
        beside = self.libraries_bytes + left + parameters + own.dynamic_bytes
        return beside + max(peaks.forward_peak_bytes, backward)


def watched(
    call: Callable[..., Any], shared: SharedBudget, frame: Frame, *, is_first: bool = True,
    is_last: bool = True,
) -> Callable[..., Any]:  # fmt: skip
    """`call`, a compiled training graph, that counts as open from each run until its backward."""

    # Of a graph in subgraphs, the first asks for room, and the last has the results.
    is_subgraph, is_new = not (is_first and is_last), True
    donates = functorch_config.donated_buffer

    def run(*args: Any) -> Any:
        nonlocal is_new
        # Looked at for subgraphs alone: each forward comes through here, with all its parameters.
        if is_subgraph and any(isinstance(value, FakeTensor) for value in args):
            return call(*args)  # DDP runs subgraphs once on fake tensors, for shapes
        refuse_compiled_autograd()  # it may have been turned on since the graph was compiled
        if donates and not functorch_config.donated_buffer:  # torch's own check is off then
            raise RewriteError(
                "set torch._functorch.config.donated_buffer = False before the first step, or "
                "call torch._dynamo.reset() after it: this step was compiled with donated "
                "buffers, and a second backward through one forward would read what the first "
                "has overwritten"
            )
        if is_new and not is_subgraph:
            is_new = False
            warn_of_eager_ops(args)
        if is_first:
            shared.require_room(frame)
        output = call(*args)
        if is_last:
            shared.forwards.watch(frame, output)
        return output

    return run


_known: dict[int, tuple[Mapping[str, Any] | None, SharedBudget]] = {}


def shared_budget(options: Mapping[str, Any] | None) -> SharedBudget:
    # Dynamo hands all graphs of a model the same options, kept so that no other takes the id.
    # Models that take turns do not share: one's forwards are closed when the other runs.
    return _known.setdefault(id(options), (options, SharedBudget()))[1]


def forget_graphs() -> None:
    _known.clear()  # Dynamo calls this when it is reset
