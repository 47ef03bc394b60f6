"""Gradients reach autograd as they are made: a backward of several autograd nodes.

AOTAutograd makes one node of a backward, and autograd's engine takes the gradients of a node when
all of it has run. So the inputs of a step pass through gates, one for each place where gradients
are final, which stand in a chain::

    loss ─► compiled step ─► gate 1 ─► gate 2 ─► ... ─► last gate
                               │         │                 │
                          parameters parameters     all other inputs

In forward a gate does nothing. In backward the compiled step only begins a generator; each gate
runs it up to the next mark and returns the gradients that are final there. The engine then adds
them to ``.grad`` before it comes to the next gate. All that is autograd's stays autograd's: hooks,
`torch.autograd.grad`, ``inputs=``, sums with gradients from elsewhere, wrappers for ranks. Gates
that no wanted gradient needs are not run, and neither is the rest of backward.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx

from remat.graph_capture.torch_private.core import (
    DisableAutocast,
    active_ddp_module,
    current_graph_task_id,
    queue_callback,
)
from remat.rewriter.graphs.codegen import Boxed, compile_in_steps
from remat.rewriter.graphs.result_gradients import Released, places_released
from remat.rewriter.graphs.updating import Updates

_Run = TypeVar("_Run")


class ExpectedBackward(Generic[_Run]):
    """Tells the backward of a compiled step which forward it is of, as autograd does not.

    A hook that runs right before it, in the same thread and pass of the engine, says so here.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def expect(self, run: _Run) -> None:
        self._of_thread.said = run, current_graph_task_id()

    def take(self) -> _Run | None:
        run, task = getattr(self._of_thread, "said", (None, -1))
        self._of_thread.said = None, -1
        # A pass that failed may have left its word.
        return run if task == current_graph_task_id() else None


_expected: ExpectedBackward[tuple[Running, frozenset[int]]] = ExpectedBackward()
"""With the places that get no gradient."""


class Running:
    """The backward of one forward, once in each pass of autograd's engine that comes to it."""

    def __init__(
        self, gradient_gates: GradientGates, inputs: list[Any], updates: Updates | None
    ) -> None:
        self.gradient_gates, self.updates = gradient_gates, updates
        self.parameters = [inputs[p] for p in gradient_gates.updated] if updates else []
        self.passes: dict[int, _Pass] = {}

    def expect(self, unreached: Sequence[int]) -> None:
        if self.updates:
            self.updates.require_backward()
        _expected.expect((self, frozenset(unreached)))

    def begin(self, steps: Iterator[Released], unreached: frozenset[int]) -> None:
        task = current_graph_task_id()
        self.passes[task] = _Pass(steps, unreached)
        # What is left of a pass that wants few gradients goes with it.
        queue_callback(lambda: self.passes.pop(task, None))
        if self.updates:
            queue_callback(self.updates.begin(self.parameters))

    def gradients(self, gate: int) -> dict[int, Tensor]:
        now = self.passes.get(current_graph_task_id())
        return now.up_to(gate, len(self.gradient_gates.gates) - 1) if now else {}


class _Pass:
    def __init__(self, steps: Iterator[Released], unreached: frozenset[int]) -> None:
        self.steps, self.unreached = steps, unreached

    def up_to(self, gate: int, last: int) -> dict[int, Tensor]:
        found = self._taken(*next(self.steps))
        if gate == last:
            for released in self.steps:
                found |= self._taken(*released)
        return found

    def _taken(self, places: tuple[int, ...], gradients: list[Any]) -> dict[int, Tensor]:
        found = dict(zip(places, gradients, strict=True))
        gradients.clear()  # the generator holds this list
        return {place: g for place, g in found.items() if place not in self.unreached}


class GradientGates:
    """The gates of one compiled step, each with the places of the inputs that pass through it.

    `updated` are places of the parameters whose gradients are released before the end.
    """

    def __init__(self, backward: fx.GraphModule) -> None:
        *released, rest = places_released(backward.graph)
        self.gates = (*released, rest) if rest else tuple(released)
        self.updated = [place for places in released for place in places]
        results: Any = backward.graph.output_node().args[0]
        self.n_results = len(results)

    def through_gates(
        self, inputs: list[Any], updates: Updates | None = None
    ) -> tuple[list[Any], Running]:
        running, passed = Running(self, inputs, updates), list(inputs)
        first = next(passed[place] for place in self.gates[0])
        token = torch.empty(0, device=first.device)
        # The token chains the gates, the last one innermost: backward comes to the first one first.
        for number in reversed(range(len(self.gates))):
            places = self.gates[number]
            token, *aliases = _Gate.apply(running, number, token, *(passed[p] for p in places))
            for place, alias in zip(places, aliases, strict=True):
                passed[place] = alias
        return passed, running

    def compile_backward(self, gm: fx.GraphModule) -> Boxed:
        in_steps = compile_in_steps(gm)

        def backward(taken: list[Any]) -> list[Any]:
            # A saved tensor knows the gate that it came through, and the gate this generator.
            given = [t.detach() if isinstance(t, Tensor) and t.grad_fn else t for t in taken]
            taken.clear()
            running, unreached = _expected.take() or (None, frozenset[int]())
            if running is None or running.gradient_gates is not self:
                return self._together(in_steps(given))  # no gate waits for each
            running.begin(in_steps(given), unreached)
            return [None] * self.n_results

        backward._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return backward

    def _together(self, steps: Iterator[Released]) -> list[Any]:
        found: list[Any] = [None] * self.n_results
        for places, gradients in steps:
            for place, gradient in zip(places, gradients, strict=True):
                found[place] = gradient
        return found


class _Gate(torch.autograd.Function):
    """Passes tensors on as they are; returns their gradients when they are final."""

    @staticmethod
    def forward(ctx: Any, running: Running, number: int, token: Tensor, *inputs: Tensor) -> Any:
        # A gradient that nobody gave stays None, not zeros of the parameter's size.
        ctx.set_materialize_grads(False)
        ctx.running, ctx.number, ctx.token = running, number, token.detach()
        return token.new_empty(0), *inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _, *given = gradients
        # AOTAutograd runs backward without autocast, too.
        with DisableAutocast():
            found = ctx.running.gradients(ctx.number)
        places = ctx.running.gradient_gates.gates[ctx.number]
        sums = [_sum(found.pop(p, None), g) for p, g in zip(places, given, strict=True)]
        # The token's gradient leads the engine on to the next gate.
        return None, None, ctx.token, *sums


def _sum(gradient: Tensor | None, other: Tensor | None) -> Tensor | None:
    if gradient is None or other is None:
        return other if gradient is None else gradient
    return gradient + other


# After the first backward DDP (Li et al., VLDB 2020, https://arxiv.org/abs/2006.15704) makes its
# buckets again, in the order in which gradients came. A ring adds up each element in an order that
# its place in the bucket decides, so over more than two ranks another order gives other last bits.
# A compiled step is one autograd node, whose gradients all come together. So, until the buckets are
# made, each parameter passes through a node of its own.


_MOST_EXACT_RANKS = 2
"""A sum of two terms has one order."""


def is_order_noted() -> bool:
    """Whether the DDP that runs now makes its buckets in the order of this step's gradients."""
    wrapper = active_ddp_module()
    if wrapper is None or wrapper._has_rebuilt_buckets:
        return False
    # As DDP's reducer decides it: with a static graph it looks for no unused parameters.
    makes_new = wrapper.static_graph or not wrapper.find_unused_parameters
    return makes_new and wrapper.process_group.size() > _MOST_EXACT_RANKS


def in_gradient_order(tensors: Sequence[Tensor], gradient_order: Sequence[int]) -> list[Tensor]:
    """`tensors`; those at the places `gradient_order` get their gradients in that order."""
    passed = list(tensors)
    # The engine takes the node first that forward made last.
    for place in reversed(gradient_order):
        passed[place] = passed[place].view_as(passed[place])
    return passed


def warn_of_own_order(kind: str) -> None:
    warnings.warn(
        f"DistributedDataParallel makes its buckets in the order in which the gradients of the "
        f"rewritten {kind} come, which was planned for one rank: last bits of gradients may differ "
        'from those around eager. Plan with sharding=remat.Sharding("ddp", ranks)',
        stacklevel=2,
    )
