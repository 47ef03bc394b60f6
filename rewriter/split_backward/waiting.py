"""The backward of one forward in two parts: the first now, the second when it is asked for.

The node of a compiled step runs I alone, and gives autograd no gradient of a weight. What W needs
is kept in a `_Waiting`. The parameters of a step come in as leaves of their own, so that a pass of
autograd's engine that wants gradients of inputs alone can be told from one that adds to ``.grad``:
the first leaves nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.torch_private.core import active_ddp_module, will_execute_node
from remat.rewriter.graphs.codegen import Boxed, compile_boxed, compile_in_steps
from remat.rewriter.graphs.gradient_gates import ExpectedBackward
from remat.rewriter.split_backward.dependencies import SplitBytes


def _accumulate(parameters: Sequence[Tensor], gradients: list[Tensor]) -> None:
    """Add a gradient to each parameter; the list is empty afterwards."""
    # By autograd's own node of each parameter: hooks run, a wrapper for ranks sees its gradients,
    # sums are made in place, and the first gradient becomes .grad where eager would take it.
    with torch.enable_grad():
        root = _Given.apply(gradients, *parameters)
    torch.autograd.backward(root, root.detach())


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
class SplitGraphs:
    """The two parts of a backward graph. To run them needs no solver, unlike to cut them.

    `inputs` (I) takes what backward takes, and returns backward's `n_results`, None in the `places`
    of weights, then what it carries to W. `weights` (W) takes that, and releases gradients where
    the graph has marks. `live` are bytes of both, of one microbatch. `reads_tangents` says that W
    reads a gradient that backward is given.
    """

    inputs: fx.GraphModule
    weights: fx.GraphModule
    n_results: int
    places: tuple[int, ...]
    live: SplitBytes
    reads_tangents: bool


_expected: ExpectedBackward[SplitRun] = ExpectedBackward()


class SplitCode:
    def __init__(self, graphs: SplitGraphs, kind: str) -> None:
        self.graphs, self.kind = graphs, kind
        self.run_inputs: Boxed = compile_boxed(graphs.inputs, None)
        self.run_weights = compile_in_steps(graphs.weights) if graphs.places else None


class SplitRun:
    """One forward whose backward comes in two parts, each time that a pass comes to it.

    `state` is the parameters and buffers that the step reads; `leave` is given what waits after I.
    """

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
            # A leaf of its own, whose node tells whether a pass adds to .grad.
            passed[place] = parameter.detach().requires_grad_()
            self._sink = get_gradient_edge(passed[place]).node
        return passed

    def expect(self, unreached: Sequence[int]) -> None:
        self.unreached = frozenset(unreached)
        _expected.expect(self)

    def inputs(self, given: list[Any]) -> list[Any]:
        taken = [_detached(one) for one in given]
        given.clear()
        results = self.code.run_inputs(taken)
        n_results = self.code.graphs.n_results
        # A pass that wants gradients of inputs alone leaves nothing to wait for.
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
                f"a tensor that backward of the rewritten {self.code.kind} reads was changed in "
                "place between its two parts: run W of all microbatches before what changes it"
            )
        assert self.code.run_weights is not None
        for places, gradients in self.code.run_weights(self.carried):
            found = {p: g for p, g in zip(places, gradients, strict=True) if p in self.parameters}
            # The generator holds this list.
            gradients.clear()
            if found:
                parameters = [self.parameters[place] for place in found]
                _accumulate(parameters, _emptied(found))


def in_parts(whole: Boxed) -> Boxed:
    def backward(taken: list[Any]) -> Any:
        run = _expected.take()
        return whole(taken) if run is None else run.inputs(taken)

    backward._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return backward


def _detached(one: Any) -> Any:
    # A saved input of a forward knows the graph before it, which need not live until W.
    return one.detach() if isinstance(one, Tensor) and one.requires_grad else one


def _version(one: Any) -> int:
    return one._version if isinstance(one, Tensor) and not one.is_inference() else -1


def _emptied(found: dict[int, Tensor]) -> list[Tensor]:
    # Nobody else then holds the gradients, so autograd need not copy them.
    gradients = list(found.values())
    found.clear()
    return gradients


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
                f"{what}, and gradients of weights of the rewritten {kind} were not added yet: "
                "call dw_builder()() after each backward, as PipelineStage(..., dw_builder=...) "
                "does, or call together() first to train without a pipeline"
            )


class StepSplit:
    def __init__(self, code: SplitCode, queue: WeightsQueue) -> None:
        self.code, self.queue = code, queue

    def begin(self, state: list[Tensor], used: list[Tensor]) -> tuple[list[Tensor], SplitRun]:
        if active_ddp_module() is not None:
            raise RewriteError(
                f"DistributedDataParallel would reduce the gradients of {self.code.kind} before "
                "those of its weights are made, in the second part of its backward: wrap it by "
                "torch.distributed.fsdp.fully_shard, which pipelines reduce at the end of a step"
            )
        self.queue.require_taken("another forward begins")
        run = SplitRun(self.code, state, self.queue.leave)
        return run.as_inputs(used), run
