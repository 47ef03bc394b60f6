"""The peak of a compiled step: what its generated code allocates and frees, replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.joint.nodes import is_tangent, storage_key
from remat.graph_capture.torch_private.core import holds_tangents
from remat.rewriter.inductor.lowering import Event, Lowered, lower

CallWorkspaces = Callable[[Sequence[fx.Node]], Sequence[int]]  # bytes of calls beyond their results


@dataclass(frozen=True)
class ReplayedMemory:
    """What a compiled step allocates beyond its inputs; the peaks are while each graph runs."""

    forward_peak_bytes: int
    backward_peak_bytes: int
    saved_bytes: int  # for backward, without `output_bytes`
    output_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    def raised(self, forward_bytes: int, backward_bytes: int) -> ReplayedMemory:
        peaks = self.forward_peak_bytes + forward_bytes, self.backward_peak_bytes + backward_bytes
        return ReplayedMemory(*peaks, self.saved_bytes, self.output_bytes)


@dataclass(eq=False)
class StepBytes:
    """Bytes live while a graph runs that other graphs have allocated."""

    static_bytes: int  # parameters and buffers
    dynamic_bytes: int  # all other inputs
    gradient_bytes: int  # of parameters
    calls: int = 1  # before a backward: all but one leave what they saved, and their inputs
    modules: int = 1  # of these calls, each with gradients of its own
    awaited_gradient_bytes: int = 0  # left by later graphs before backward runs

    def beside(self, found: ReplayedMemory, times: int = 1) -> ReplayedMemory:
        # The last call's backward runs first, beside what all others saved. Later ones have one
        # less, but the gradients of the first, or of all before if each has a module of its own.
        each_bytes = found.saved_bytes + self.dynamic_bytes
        saved_bytes = (self.calls - 1) * each_bytes
        left_bytes = saved_bytes
        if self.modules > 1:
            left_bytes = max(saved_bytes, (self.modules - 1) * self.gradient_bytes)
        elif self.calls > 1:
            left_bytes = max(saved_bytes, saved_bytes - each_bytes + self.gradient_bytes)
        backward_bytes = left_bytes + self.awaited_gradient_bytes
        return found.raised(times * saved_bytes, times * backward_bytes)

    def alone(self, found: ReplayedMemory) -> ReplayedMemory:
        return self.beside(found, -1)


def replay(
    forward: fx.GraphModule, backward: fx.GraphModule, n_outputs: int, workspaces: CallWorkspaces,
    visible: Sequence[int], *, donated: Sequence[int] = (), holds_outputs: bool = True,
) -> ReplayedMemory:  # fmt: skip
    """Lower both graphs and replay what they allocate; `ReplayError` if the code cannot be read.

    Backward may write to its inputs `donated`.
    """
    inputs = [node.meta["val"] for node in forward.graph.find_nodes(op="placeholder")]
    lowered = lower(forward, inputs, is_backward=False, visible=visible)
    run = LiveStorages(workspaces, held=set(lowered.inputs))
    for name in lowered.inputs:
        run.bring(name, [run.storage(0)])  # what is allocated beyond inputs is counted
    run.carry_out(lowered)
    forward_peak = run.peak_bytes
    kept = [[] if name is None else run.names.get(name, []) for name in lowered.outputs]
    outputs, saved = kept[:n_outputs], kept[n_outputs:]
    output_bytes = run.bytes_of(outputs)
    saved_bytes = run.bytes_of(kept) - output_bytes
    then = _backward_run(
        run, backward, workspaces, outputs if holds_outputs else [], saved,
        lowered.output_strides[n_outputs:], donated,
    )  # fmt: skip
    return ReplayedMemory(forward_peak, then.peak_bytes, saved_bytes, output_bytes)


class LiveStorages:
    """Storages that are live while events are carried out, by the names that hold them."""

    def __init__(self, workspaces: CallWorkspaces, held: set[str]) -> None:
        self.workspaces, self.held = workspaces, held
        self.size_bytes: list[int] = []
        self.holders: list[int] = []
        self.names: dict[str, list[int]] = {}
        self.live_bytes = self.peak_bytes = 0

    def storage(self, size_bytes: int) -> int:
        self.size_bytes.append(size_bytes)
        self.holders.append(0)
        return len(self.size_bytes) - 1

    def bring(self, name: str, storages: list[int]) -> None:
        self.names[name] = storages
        for number in storages:
            if not self.holders[number]:
                self.live_bytes += self.size_bytes[number]
            self.holders[number] += 1
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drop(self, name: str) -> None:
        """Let go of what `name` holds, unless the caller holds `name` too."""
        if name in self.held:
            return
        for number in self.names.pop(name, ()):
            self.holders[number] -= 1
            if not self.holders[number]:
                self.live_bytes -= self.size_bytes[number]

    def bytes_of(self, held: Sequence[list[int]]) -> int:
        return sum(self.size_bytes[number] for number in {n for one in held for n in one})

    def carry_out(self, lowered: Lowered) -> None:
        calls = [event.node for event in lowered.events if event.node is not None]
        extra = iter(self.workspaces(calls))
        for event in lowered.events:
            self._carry_out(event, next(extra) if event.node is not None else 0)

    def _carry_out(self, event: Event, extra_bytes: int) -> None:
        if event.kind == "free":
            self.drop(event.name)
        elif event.kind == "alias":
            shared = self.names.get(event.of, [])
            self.bring(event.name, shared if event.element is None else [shared[event.element]])
        elif event.kind == "rename":
            self.bring(event.name, self.names[event.of])
            self.drop(event.of)
        else:
            made = sum(event.sizes_bytes)
            # A call's workspace lies beside its results, and is gone when it ends.
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + made + extra_bytes)
            if event.sizes_bytes:
                self.bring(event.name, [self.storage(size) for size in event.sizes_bytes])


def _backward_run(
    run: LiveStorages, backward: fx.GraphModule, workspaces: CallWorkspaces,
    outputs: Sequence[list[int]], saved: Sequence[list[int]],
    strides: Sequence[tuple[int, ...] | None], donated: Sequence[int],
) -> LiveStorages:  # fmt: skip
    placeholders = backward.graph.find_nodes(op="placeholder")
    tangents = [node for node in placeholders if is_tangent(node)]
    inputs = [
        # Backward reads what is saved in the strides that the generated forward gives it.
        _restrided(node.meta["val"], strides[i] if i < len(saved) else None)
        for i, node in enumerate(placeholders)
    ]
    lowered = lower(backward, inputs, is_backward=True, visible=(), donated=donated)
    then = LiveStorages(workspaces, held={"their outputs"})
    # One numbering for both graphs: what is saved keeps its number.
    then.size_bytes, then.holders = run.size_bytes, [0] * len(run.size_bytes)
    then.bring("their outputs", sorted({n for held in outputs for n in held}))
    for name, storages in zip(lowered.inputs, saved, strict=False):
        then.bring(name, storages)
    rest = lowered.inputs[len(saved) :]
    # `backward()` holds the gradient that it makes for the loss.
    then.held.update(
        name for name, node in zip(rest, tangents, strict=False)
        if holds_tangents() or node.meta["val"].numel() == 1
    )  # fmt: skip
    bring_tangents(then, rest[: len(tangents)], tangents)
    for name in rest[len(tangents) :]:
        then.bring(name, [then.storage(0)])
    then.carry_out(lowered)
    return then


def bring_tangents(run: LiveStorages, names: Sequence[str], tangents: Sequence[fx.Node]) -> None:
    made: dict[int, int] = {}
    for name, node in zip(names, tangents, strict=True):
        tensor = node.meta["val"]
        key = storage_key(tensor)
        if key not in made:
            made[key] = run.storage(tensor.untyped_storage().nbytes())
        run.bring(name, [made[key]])


def _restrided(value: Any, stride: tuple[int, ...] | None) -> Any:
    if not isinstance(value, Tensor) or stride is None or tuple(value.stride()) == stride:
        return value
    return torch.as_strided(value, value.shape, stride)
