"""Inductor in place of our own generated code: the compiler of a schedule's two graphs.

The graphs are those of `emit`: eager's ops in the schedule's order. AOTAutograd lets
`compile_fx_inner` compile them, so guards, views and mutation stay as they are. Three things differ
from what Inductor does by itself: ops that draw are functions of the stream's state
(`functional_draws`), what lasts across a call is stored (`decomposed`), and all results keep their
strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import copy_of
from remat.rewriter.graphs.boxed import Boxed
from remat.rewriter.graphs.emit import emit
from remat.rewriter.graphs.rng_states import save_rng_state, set_rng_state
from remat.rewriter.inductor.choices import calls_in_order
from remat.rewriter.inductor.decomposed import decomposed, inputs_of
from remat.rewriter.inductor.functional_draws import make_functional, underlying
from remat.rewriter.inductor.partition import CONFIG
from remat.rewriter.inductor.prices import CallPrices
from remat.rewriter.inductor.replay import replay
from remat.schedules.schedule import Schedule


@dataclass(frozen=True)
class _Phase:
    """One of the two graphs as Inductor gets it, with inputs that AOTAutograd does not know.

    These are `constants`, tensors that the trace took in, then the random state of each device.
    """

    graph: fx.GraphModule
    constants: tuple[Tensor, ...]
    devices: tuple[str, ...]


class InductorStep:
    """The emitted graphs of one schedule, made ready for Inductor.

    Parameters
    ----------
    joint : its resident bytes are counted in `peak_bytes`. forward, backward : made by `emit`.

    Raises
    ------
    RewriteError : an op draws from a generator of its own, or is decomposed into one that writes.
    """

    def __init__(self, joint: Joint, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        self._joint = joint
        self._mode = _mode_of(forward)
        self._forward, self._backward = self._phase(forward), self._phase(backward)

    def peak_bytes(self) -> int:
        """Peak of the step in Inductor's code, which is generated and replayed, but not compiled.

        Raises
        ------
        ReplayError : the code has something in it that the replay does not know.
        """
        forward = copy_of(self._forward.graph)
        _without_states(forward, len(self._forward.devices))
        returned: Any = forward.graph.output_node().args[0]
        backward = copy_of(self._backward.graph)
        _without_states(backward, len(self._backward.devices))
        prices = CallPrices(forward, self._joint.graph.device)
        with inductor_config.patch(CONFIG), calls_in_order(True), torch.no_grad():
            found = replay(
                forward, backward, self._joint.num_forward_outputs,
                lambda calls: _workspaces(prices, calls), range(len(returned)),
            )  # fmt: skip
        return self._joint.graph.resident.total_bytes + found.peak_bytes

    def compile_forward(self, gm: fx.GraphModule, example_inputs: Any) -> Boxed:
        """The compiler of forward that AOTAutograd is given."""
        return self._compiled(self._forward, gm, is_backward=False)

    def compile_backward(self, gm: fx.GraphModule, example_inputs: Any) -> Boxed:
        """The compiler of backward that AOTAutograd is given."""
        return self._compiled(self._backward, gm, is_backward=True)

    def _phase(self, gm: fx.GraphModule) -> _Phase:
        graph = copy_of(gm)
        constants = _lift_constants(graph)
        devices = make_functional(graph)
        graph = decomposed(graph, self._mode)
        end = graph.graph.output_node()
        returned: Any = end.args[0]
        # Users and backward rely on the traced strides, so Inductor must keep those of all results.
        end.meta["user_visible_output_idxs"] = [
            i for i, result in enumerate(returned) if isinstance(result, fx.Node)
        ]
        return _Phase(graph, constants, devices)

    def _compiled(self, phase: _Phase, gm: fx.GraphModule, *, is_backward: bool) -> Boxed:
        _require_same_inputs(phase, gm)
        inputs = inputs_of(phase.graph, self._mode)
        with inductor_config.patch(CONFIG), calls_in_order(True), torch.no_grad():
            run = compile_fx_inner(
                copy_of(phase.graph), inputs, is_backward=is_backward, static_input_idxs=()
            )
        return _with_own_inputs(run, phase)


def code_peak_bytes(joint: Joint, schedule: Schedule) -> int:
    """Peak of a step that runs Inductor's code for `schedule`; nothing is compiled.

    Raises
    ------
    ReplayError : the code has something in it that the replay does not know.
    """
    return InductorStep(joint, *emit(joint, schedule, writes=False)).peak_bytes()


def _mode_of(gm: fx.GraphModule) -> FakeTensorMode:
    values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def _require_same_inputs(phase: _Phase, gm: fx.GraphModule) -> None:
    """AOTAutograd may add inputs of its own after it has called the partitioner."""
    given = [node.target for node in gm.graph.find_nodes(op="placeholder")]
    known = [node.target for node in phase.graph.graph.find_nodes(op="placeholder")]
    known = known[: len(known) - len(phase.constants) - len(phase.devices)]
    if given != known:
        other = next((n for n in (*given, *known) if n not in given or n not in known), given[0])
        raise RewriteError(
            f"AOTAutograd calls the step with other inputs than were planned ({other}), as where "
            "forward makes random numbers or tokens of effects by an op of its own. Leave out "
            "compile=True, which runs eager's ops"
        )


def _without_states(gm: fx.GraphModule, n_states: int) -> None:
    """Leave out the random states that a graph returns: its caller does not keep them."""
    end = gm.graph.output_node()
    returned: Any = end.args[0]
    end.args = (tuple(returned[: len(returned) - n_states]),)


def _workspaces(prices: CallPrices, calls: Sequence[fx.Node]) -> list[int]:
    return [price.workspace_bytes for price in prices.of(map(underlying, calls))]


def _lift_constants(gm: fx.GraphModule) -> tuple[Tensor, ...]:
    """Make inputs of the tensors that the graph holds, in place, after its other inputs.

    Inductor would write the numbers of small ones into its code, and not see when they change.
    """
    constants: dict[str, fx.Node] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in constants:
            last = gm.graph.find_nodes(op="placeholder")[-1]
            with gm.graph.inserting_after(last):
                constants[name] = gm.graph.placeholder(f"constant_{len(constants)}")
            constants[name].meta["val"] = getattr(gm, name)
        node.replace_all_uses_with(constants[name])
        gm.graph.erase_node(node)
    gm.recompile()
    return tuple(node.meta["val"] for node in constants.values())


def _with_own_inputs(run: Any, phase: _Phase) -> Boxed:
    """`run` with the inputs that AOTAutograd does not know; random states go to the generators."""

    def called(args: list[Any]) -> Any:
        args.extend(phase.constants)
        args.extend(save_rng_state(device) for device in phase.devices)
        results: list[Any] = list(run(args))
        for device in reversed(phase.devices):
            state: Tensor = results.pop()
            set_rng_state(state, device)
        return results

    called._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return called
