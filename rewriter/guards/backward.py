"""What is checked when backward reaches a rewritten step, before any of its ops runs.

AOTAutograd gives zeros for a gradient that no tangent reaches; eager and we leave it unset.
Refused, as not equal to eager: a hook on such a parameter, one backward through two forwards
(another order of terms), and a checkpoint around a step that writes to buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.torch_private.aot import compiled_autograd, dynamo_config
from remat.graph_capture.torch_private.core import current_graph_task_id, pytree
from remat.graph_capture.tracing.outputs import leaves_in
from remat.graph_capture.tracing.step_module import is_inside_checkpoint
from remat.rewriter.compiled import GradientFacts
from remat.rewriter.graphs.backward_parts import Running, SplitRun
from remat.rewriter.guards.live_state import RecomputeInputs, UnshardedParameters

COMPILED_NODE = "CompiledFunctionBackward"  # AOTAutograd's name of a step's autograd node

_last_pass: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


class OnlyLooks:
    """A hook of ours on a parameter, which may be called without a gradient."""


class BackwardGuards:
    """Watches the autograd node of one forward; `inputs` begin with parameters and buffers."""

    def __init__(
        self, model: nn.Module, names: list[str], inputs: list[Any], facts: GradientFacts,
        constants: list[tuple[str, Tensor]], running: Running | SplitRun | None = None,
        unsharded_parameters: UnshardedParameters | None = None,
        recompute_inputs: RecomputeInputs | None = None,
    ) -> None:  # fmt: skip
        self.model, self.names, self.facts, self.running = model, names, facts, running
        self.unsharded_parameters = unsharded_parameters
        self.constants = [(name, tensor, tensor._version) for name, tensor in constants]
        self.recompute_inputs = recompute_inputs
        self.noted = recompute_inputs.noted(names, inputs, constants) if recompute_inputs else None
        self.trained = {i: weakref.ref(inputs[i]) for i in facts.needs}

    def watch(self, output: Any) -> None:
        if (node := _compiled_node(leaves_in(output))) is not None:
            node.register_prehook(self._before)
            node.register_hook(self._after)

    def _before(self, tangents: tuple[Tensor | None, ...]) -> None:
        if torch.is_grad_enabled():  # in backward, under create_graph=True alone
            raise RewriteError(
                "use the original model for steps that need second derivatives: double backward "
                f"through the rewritten {self._kind} (create_graph=True) is not possible, as its "
                "backward is a fixed sequence of ops"
            )
        if self.unsharded_parameters:
            self.unsharded_parameters.note_backward()
        self._require_own_pass()
        self._require_unchanged()
        unreached = self._unreached(tangents)
        for i in unreached:
            if (tensor := self.trained[i]()) is not None and _has_hook(tensor):
                raise RewriteError(
                    f"remove the hook on {self.names[i]}, or plan with a loss_fn that takes only "
                    f"that part: backward from a part of what the rewritten {self._kind} returned "
                    "does not reach it, and its hook would be called without a gradient"
                )
        if self.running:
            self.running.expect(unreached)

    def _after(
        self, gradients: tuple[Tensor | None, ...], tangents: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        if not (unreached := set(self._unreached(tangents))):
            return None
        # AOTAutograd gives zeros where eager sets no gradient.
        return tuple(None if i in unreached else g for i, g in enumerate(gradients))

    def _unreached(self, tangents: tuple[Tensor | None, ...]) -> list[int]:
        given = {i for i, tangent in enumerate(tangents) if tangent is not None}
        if self.facts.through <= given:
            return []
        return [i for i, needs in self.facts.needs.items() if needs.isdisjoint(given)]

    def _require_unchanged(self) -> None:
        if self.recompute_inputs and self.noted:  # eager refuses if it has saved the tensor
            self.recompute_inputs.require(self.noted, self._kind)
        for name, tensor, version in self.constants:
            if tensor._version != version:
                raise RewriteError(
                    f"change {name} after backward: it was changed in place between forward and "
                    f"backward of the rewritten {self._kind}, which reads it again in backward"
                )

    def _require_own_pass(self) -> None:
        now = current_graph_task_id()
        if self.facts.summed and _last_pass.get(self.model) == now:  # eager adds in another order
            raise RewriteError(
                "call backward for each loss, or forward once on both batches together: one "
                f"backward through two forwards of the rewritten {self._kind}.\n"
                f"The gradient of {self.names[self.facts.summed[0]]} is a sum of several terms, "
                "which eager would add in another order, so last bits would differ"
            )
        _last_pass[self.model] = now

    @property
    def _kind(self) -> str:
        return type(self.model).__name__


def is_of_a_plan() -> bool:
    return current_graph_task_id() in _last_pass.values()


def _has_hook(tensor: Tensor) -> bool:
    after = (tensor._post_accumulate_grad_hooks or {}).values()
    return bool(tensor._backward_hooks) or not all(isinstance(one, OnlyLooks) for one in after)


def _compiled_node(leaves: Iterable[Any]) -> Any:
    for leaf in leaves:
        node = leaf.grad_fn if isinstance(leaf, Tensor) else None
        while node is not None and node.name() != COMPILED_NODE:
            # A result may be a view of what the step returned.
            node = next((source for source, _ in node.next_functions if source is not None), None)
        if node is not None:
            return node
    return None


def refuse_checkpoint(model: nn.Module, facts: GradientFacts) -> None:
    if facts.overwrites and is_inside_checkpoint():  # torch ends it before buffers are written
        raise RewriteError(
            "call it without torch.utils.checkpoint, as the plan decides what to recompute: the "
            f"rewritten {type(model).__name__} writes to its buffers and is called inside a "
            "checkpoint, whose second forward torch ends before the buffers are written again"
        )


def refuse_compiled_autograd() -> None:
    if dynamo_config.compiled_autograd or compiled_autograd.compiled_autograd_enabled:
        raise RewriteError(
            "leave out torch._dynamo.config.compiled_autograd = True, or compile without a "
            "budget: compiled autograd recompiles backward in its own graph, which loses the "
            "plan's order and its peak"
        )


class _Open:
    """One forward of a graph. It lives as long as the autograd node of its results."""

    def __init__(self, graph: Hashable, number: int) -> None:
        self.graph, self.number = graph, number


class OpenForwards:
    """Forwards whose backward is to come; closed by the first, even with ``retain_graph=True``."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[_Open] = weakref.WeakSet()
        self._number = 0

    def graphs(self) -> list[Any]:
        return [one.graph for one in sorted(self._open, key=lambda one: one.number)]

    def watch(self, graph: Hashable, output: Any) -> None:
        if (node := _compiled_node(pytree.tree_leaves(output))) is None:
            return
        self._number += 1  # dynamo's numbers do not say which graphs are of one model
        one = _Open(graph, self._number)
        self._open.add(one)
        node.register_hook(lambda *_: self._open.discard(one))  # keeps `one` as long as the node
