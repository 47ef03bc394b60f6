"""A backward in several parts: gradients reach autograd as they are made, those of weights later.

AOTAutograd makes one node of a backward, and the engine takes a node's gradients when it has run.
So the inputs of a step pass through a chain of gates, one for each place where gradients are final.
In backward the compiled step only begins a generator; each gate runs it to the next mark and
returns the gradients that are final there. Gates that no wanted gradient needs are not run.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.torch_private.core import (
    DisableAutocast,
    active_ddp_module,
    current_graph_task_id,
    queue_callback,
    will_execute_node,
)
from remat.rewriter.graphs.codegen import (
    Boxed,
    Released,
    boxed,
    compile_boxed,
    compile_in_steps,
    places_released,
)
from remat.rewriter.graphs.updating import Updates

_Run = TypeVar("_Run")


class _ExpectedBackward(Generic[_Run]):
    """Tells the backward of a compiled step which forward it is of; a hook before it says so."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def expect(self, run: _Run) -> None:
        self._of_thread.said = run, current_graph_task_id()

    def take(self) -> _Run | None:
        run, task = getattr(self._of_thread, "said", (None, -1))
        self._of_thread.said = None, -1
        return run if task == current_graph_task_id() else None  # a failed pass may leave its word


_expected_gates: _ExpectedBackward[tuple[Running, frozenset[int]]] = _ExpectedBackward()
"""With the places that get no gradient."""


class Running:
    """The backward of one forward, once in each pass of autograd's engine that comes to it."""

    def __init__(
        self, gradient_gates: GradientGates, inputs: list[Any], updates: Updates | None
    ) -> None:
        self.gradient_gates, self.updates = gradient_gates, updates
        sets = gradient_gates.updated if updates else ()
        self.parameters = [[inputs[place] for place in places] for places in sets]
        self.passes: dict[int, _Pass] = {}

    def expect(self, unreached: Sequence[int]) -> None:
        if self.updates:
            self.updates.require_backward()
        _expected_gates.expect((self, frozenset(unreached)))

    def begin(self, steps: Iterator[Released], unreached: frozenset[int]) -> None:
        task = current_graph_task_id()
        self.passes[task] = _Pass(steps, unreached)
        queue_callback(lambda: self.passes.pop(task, None))  # a pass for few gradients leaves some
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
    """The gates of a compiled step, with their places; `updated` parameters are released early."""

    def __init__(self, backward: fx.GraphModule) -> None:
        *released, rest = places_released(backward.graph)
        self.gates = (*released, rest) if rest else tuple(released)
        self.updated = tuple(released)
        results: Any = backward.graph.output_node().args[0]
        self.n_results = len(results)

    def through_gates(
        self, inputs: list[Any], updates: Updates | None = None
    ) -> tuple[list[Any], Running]:
        running, passed = Running(self, inputs, updates), list(inputs)
        first = next(passed[place] for place in self.gates[0])
        token = torch.empty(0, device=first.device)
        for number in reversed(range(len(self.gates))):  # the last one is innermost in the chain
            places = self.gates[number]
            token, *aliases = _Gate.apply(running, number, token, *(passed[p] for p in places))
            for place, alias in zip(places, aliases, strict=True):
                passed[place] = alias
        return passed, running

    def compile_backward(self, gm: fx.GraphModule) -> Boxed:
        in_steps = compile_in_steps(gm)

        @boxed
        def backward(taken: list[Any]) -> list[Any]:
            # A saved tensor knows the gate that it came through, and the gate this generator.
            given = [t.detach() if isinstance(t, Tensor) and t.grad_fn else t for t in taken]
            taken.clear()
            running, unreached = _expected_gates.take() or (None, frozenset[int]())
            if running is None or running.gradient_gates is not self:
                found: list[Any] = [None] * self.n_results
                for places, gradients in in_steps(given):
                    for place, gradient in zip(places, gradients, strict=True):
                        found[place] = gradient
                return found  # no gate waits for each
            running.begin(in_steps(given), unreached)
            return [None] * self.n_results

        return backward


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: Running, number: int, token: Tensor, *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)  # a gradient that nobody gave stays None, not zeros
        ctx.running, ctx.number, ctx.token = running, number, token.detach()
        return token.new_empty(0), *inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _, *given = gradients
        with DisableAutocast():  # AOTAutograd runs backward without autocast, too
            found = ctx.running.gradients(ctx.number)
        places = ctx.running.gradient_gates.gates[ctx.number]
        pairs = [(found.pop(p, None), g) for p, g in zip(places, given, strict=True)]
        sums = [g if own is None else own if g is None else own + g for own, g in pairs]
        return None, None, ctx.token, *sums  # the token's gradient leads to the next gate


# After the first backward DDP (Li et al., VLDB 2020, https://arxiv.org/abs/2006.15704) rebuilds its
# buckets in the order of gradients. That is a ring's order of adding, which decides the last bits
# over more than two ranks. Until then each parameter passes through an autograd node of its own.

_MOST_EXACT_RANKS = 2  # a sum of two terms has one order


def is_order_noted() -> bool:
    """Whether the DDP that runs now makes its buckets in the order of this step's gradients."""
    if (wrapper := active_ddp_module()) is None or wrapper._has_rebuilt_buckets:
        return False
    # As DDP's reducer decides it: with a static graph it looks for no unused parameters.
    makes_new = wrapper.static_graph or not wrapper.find_unused_parameters
    return makes_new and wrapper.process_group.size() > _MOST_EXACT_RANKS


def in_gradient_order(tensors: Sequence[Tensor], gradient_order: Sequence[int]) -> list[Tensor]:
    """`tensors`; those at the places `gradient_order` get their gradients in that order."""
    passed = list(tensors)
    for place in reversed(gradient_order):  # the engine takes the node first that forward made last
        passed[place] = passed[place].view_as(passed[place])
    return passed


def warn_of_own_order(kind: str) -> None:
    warnings.warn(
        'plan with sharding=remat.Sharding("ddp", ranks): DistributedDataParallel fills its '
        f"buckets in the order in which the gradients of the rewritten {kind} come, which was "
        "planned for one rank, so last bits may differ from eager's",
        stacklevel=2,
    )


# Where weights' gradients (W) come later than inputs' (I), a step's node runs I alone; W waits in a
# `_Waiting`. Parameters are leaves of their own here, to tell a pass that wants gradients of inputs
# alone: it leaves nothing to wait for.


class _Given(torch.autograd.Function):
    """Has gradients that are there already, in a list that it lets go of."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        given = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *given


@dataclass(frozen=True)
class SplitBytes:
    """Of one microbatch in one block, parameters apart, without workspaces of ops."""

    inputs: int  # the most in I, with all that backward is given
    held: int  # from I to W
    weights: int  # the most in W, with what is held


@dataclass(frozen=True)
class SplitGraphs:
    """The two parts of a backward graph. To run them needs no solver, unlike to cut them."""

    inputs: fx.GraphModule  # I: backward's results, None in `places`, then what goes to W
    weights: fx.GraphModule  # W: takes that; releases gradients at marks
    n_results: int
    places: tuple[int, ...]  # of the weights among the results
    live: SplitBytes  # of one microbatch
    reads_tangents: bool  # W reads a gradient that backward is given


_expected_split: _ExpectedBackward[SplitRun] = _ExpectedBackward()


class SplitCode:
    def __init__(self, graphs: SplitGraphs, kind: str) -> None:
        self.graphs, self.kind = graphs, kind
        self.run_inputs: Boxed = compile_boxed(graphs.inputs)
        self.run_weights = compile_in_steps(graphs.weights) if graphs.places else None


class SplitRun:
    """One forward whose backward comes in two parts; `leave` is given what waits after I."""

    def __init__(
        self, code: SplitCode, state: Sequence[Tensor], leave: Callable[[_Waiting], None]
    ) -> None:
        self.code, self.leave = code, leave
        self.parameters = {place: state[place] for place in code.graphs.places}
        self.unreached: frozenset[int] = frozenset()
        self._sink: Any = None

    def as_inputs(self, state: Sequence[Tensor]) -> list[Tensor]:
        passed = list(state)
        for place, parameter in self.parameters.items():
            passed[place] = parameter.detach().requires_grad_()
            self._sink = get_gradient_edge(passed[place]).node
        return passed

    def expect(self, unreached: Sequence[int]) -> None:
        self.unreached = frozenset(unreached)
        _expected_split.expect(self)

    def inputs(self, given: list[Any]) -> list[Any]:
        # A saved input of a forward knows the graph before it, which need not live until W.
        taken = [t.detach() if isinstance(t, Tensor) and t.requires_grad else t for t in given]
        given.clear()
        results = self.code.run_inputs(taken)
        n_results = self.code.graphs.n_results
        if self._sink is not None and will_execute_node(self._sink):
            wanted = {p: t for p, t in self.parameters.items() if p not in self.unreached}
            self.leave(_Waiting(self.code, wanted, list(results[n_results:])))
        return list(results[:n_results])


class _Waiting:
    """W of one microbatch, which is still to run; `parameters` by the places of their gradients."""

    def __init__(self, code: SplitCode, parameters: dict[int, Tensor], carried: list[Any]) -> None:
        self.code, self.parameters, self.carried = code, parameters, carried
        self._versions = [_version(one) for one in carried]

    def finish(self) -> None:
        if [_version(one) for one in self.carried] != self._versions:
            raise RewriteError(
                "run W of all microbatches before you change it: a tensor that backward of the "
                f"rewritten {self.code.kind} reads was changed in place between its two parts"
            )
        assert self.code.run_weights is not None
        for places, gradients in self.code.run_weights(self.carried):
            found = {p: g for p, g in zip(places, gradients, strict=True) if p in self.parameters}
            gradients.clear()  # the generator holds this list
            if found:
                parameters, gradients = [self.parameters[p] for p in found], list(found.values())
                found.clear()  # autograd need not copy gradients that nobody else holds
                # By each parameter's own autograd node: hooks run, wrappers see gradients, and the
                # first becomes .grad as in eager. The list is empty afterwards.
                with torch.enable_grad():
                    root = _Given.apply(gradients, *parameters)
                torch.autograd.backward(root, root.detach())


def in_parts(whole: Boxed) -> Boxed:
    @boxed
    def backward(taken: list[Any]) -> Any:
        run = _expected_split.take()
        return whole(taken) if run is None else run.inputs(taken)

    return backward


def _version(one: Any) -> int:
    return one._version if isinstance(one, Tensor) and not one.is_inference() else -1


class WeightsQueue:
    """W of the blocks of one stage whose backward has run, until a runner takes it."""

    def __init__(self) -> None:
        self._left: list[_Waiting] = []

    def leave(self, waiting: _Waiting) -> None:
        self._left.append(waiting)

    def take(self) -> Callable[[], None]:
        left, self._left = self._left, []

        def finish() -> None:
            while left:
                left.pop(0).finish()

        return finish

    def require_taken(self, what: str) -> None:
        """Raise `RewriteError` if gradients of weights of an earlier backward would be lost."""
        if self._left:
            kind = self._left[0].code.kind
            self._left = []
            raise RewriteError(
                "call dw_builder()() after each backward, as PipelineStage(..., dw_builder=...) "
                f"does, or call together() first to train without a pipeline: {what}, and the "
                f"weight gradients of the rewritten {kind} were not added yet"
            )


class StepSplit:
    def __init__(self, code: SplitCode, queue: WeightsQueue) -> None:
        self.code, self.queue = code, queue

    def begin(self, state: list[Tensor], used: list[Tensor]) -> tuple[list[Tensor], SplitRun]:
        if active_ddp_module() is not None:
            raise RewriteError(
                f"wrap {self.code.kind} in torch.distributed.fsdp.fully_shard, which pipelines "
                "reduce at the end of a step: DistributedDataParallel would reduce its gradients "
                "before those of weights exist, in the second part of backward"
            )
        self.queue.require_taken("another forward begins")
        run = SplitRun(self.code, state, self.queue.leave)
        return run.as_inputs(used), run
