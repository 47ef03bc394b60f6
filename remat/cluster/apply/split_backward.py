"""`split_backward`: stages of a pipeline whose gradients of weights come later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from remat.cluster.apply.weight_cut import split_graph
from remat.graph_capture.distributed.collectives import collectives_in
from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.nodes import draws_randomness
from remat.rewriter.graphs.backward_parts import SplitCode, SplitGraphs, StepSplit, WeightsQueue
from remat.rewriter.user_module.module import RematModule
from remat.rewriter.user_module.ranged import RangedModule

_WITHOUT = "or use a schedule without zero bubbles, such as 1F1B or Interleaved1F1B"


class SplitBackward:
    """A stage's `dw_builder` over its rewritten blocks; `live` is a microbatch's bytes by path."""

    def __init__(self, blocks: dict[str, RematModule], codes: dict[str, SplitCode]) -> None:
        self._blocks = list(blocks.values())
        self._queue = WeightsQueue()
        self.live = {path: code.graphs.live for path, code in codes.items()}
        for path, block in blocks.items():
            type(block)._remat_split = StepSplit(codes[path], self._queue)

    def dw_builder(self) -> Callable[[], None]:
        """W of the backward that has just run, for `PipelineStage`; to be called once."""
        return self._queue.take()

    def together(self) -> None:
        """Let each backward run as a whole again; all gradients of weights must be added."""
        self._queue.require_taken("backward is to run as a whole again")
        for block in self._blocks:
            type(block)._remat_split = None


def split_backward(module: nn.Module) -> SplitBackward:
    """Let backward of each rewritten block in `module` leave the gradients of its weights.

    `module` stays the same object. The gradients of what it is given come at once; those of the
    weights of rewritten blocks are added when the function that `SplitBackward.dw_builder` returns
    is called. What lies outside of such blocks has its gradients at once. Gradients are eager's bit
    by bit, as torch's zero bubble schedules have them, and no op runs twice::

        split = split_backward(module)
        PipelineStage(module, 0, 4, device, dw_builder=split.dw_builder)

    Parameters
    ----------
    module : of `remat.rematerialize`, or one that holds such.

    Raises
    ------
    RewriteError : nothing in it is rewritten, or a block cannot be split. Nothing is changed then.
    """
    for path, one in module.named_modules():
        if isinstance(one, RangedModule):
            raise _not_split(path, one, "is planned for a range of sizes: plan it for one size")
    blocks = {p: one for p, one in module.named_modules() if isinstance(one, RematModule)}
    if not blocks:
        raise RewriteError(
            f"leave out dw_builder: no part of this {type(module).__name__} is rewritten, and "
            "torch splits the backward of eager modules itself"
        )
    _refuse_shared(module, blocks)  # all refusals come before any block is changed
    codes: dict[Any, SplitCode] = {}
    for path, block in blocks.items():
        _refuse_step(path, block)
        key = id(block._remat_compiled_step)  # equal blocks share a step, and both parts' code
        if key not in codes:
            codes[key] = SplitCode(_graphs(path, block), block._remat_guards.kind)
    of_path = {path: codes[id(block._remat_compiled_step)] for path, block in blocks.items()}
    return SplitBackward(blocks, of_path)


def _graphs(path: str, block: RematModule) -> SplitGraphs:
    step = block._remat_compiled_step
    for node in step.backward.graph.nodes:
        if draws_randomness(node):
            raise _not_split(
                path, block,
                f"draws random numbers in backward ({node.target}), in an order that two parts "
                "would change: rewrite its parts separately",
            )  # fmt: skip
    n_state = len(block._remat_guards.names)  # parameters and buffers are the first inputs
    weights = [place for place in step.gradients.needs if place < n_state]
    return split_graph(step.backward, weights, _resident(step.forward.graph, step, n_state))


def _resident(forward: fx.Graph, step: Any, n_state: int) -> list[str]:
    state = set(forward.find_nodes(op="placeholder")[:n_state])
    results: Any = forward.output_node().args[0]
    inputs = [n for n in step.backward.graph.nodes if n.op == "placeholder"]
    saved = [n for n in inputs if not str(n.target).startswith("tangents")]
    kept = results[len(results) - len(saved) :]  # what forward saves comes last
    return [given.name for given, node in zip(saved, kept, strict=True) if node in state]


def _refuse_step(path: str, block: RematModule) -> None:
    step, facts = block._remat_compiled_step, block._remat_guards.facts
    # Beside a gradient for each input, backward returns what it writes to buffers.
    results: Any = step.backward.graph.output_node().args[0]
    has_more = len(results) != len(step.forward.graph.find_nodes(op="placeholder"))
    reasons = {
        "is already split: use what the first call returned": block._remat_split,
        "is one piece of Inductor's code: leave out compile=True": step.by_inductor,
        "copies values to the host: plan without offloading": block._remat_schedule.moves,
        "updates parameters in backward: plan without an optimizer": block._remat_updates,
        "has its memory in an arena: plan without one": step.memory.source,
        "was planned over DTensors: leave out tensor parallelism": any(one[-1] for one in facts),
        "has collectives in backward: rewrite what is between them": collectives_in(step.backward),
        "writes to buffers in backward: rewrite what does not": has_more,
    }
    for why, is_so in reasons.items():
        if is_so:
            raise _not_split(path, block, why)


def _refuse_shared(module: nn.Module, blocks: dict[str, RematModule]) -> None:
    owners: dict[int, str] = {}  # a parameter of two would be summed in another order
    held = [(path, path, block.named_parameters()) for path, block in blocks.items()]
    inside = {one for block in blocks.values() for one in block.modules()}
    held += [
        ("modules outside the blocks", path, one.named_parameters(recurse=False))
        for path, one in module.named_modules() if one not in inside
    ]  # fmt: skip
    for holder, path, named in held:
        for name, parameter in named:
            where = owners.setdefault(id(parameter), holder)
            if where != holder:
                raise RewriteError(
                    f"rewrite the two together as one module, {_WITHOUT}: "
                    f"{f'{path}.{name}'.lstrip('.')} belongs to {where or 'the module'} and to "
                    f"{holder or 'the module'}, and two parts would add up its gradient in "
                    "another order"
                )


def _not_split(path: str, block: nn.Module, why: str) -> RewriteError:
    name = f"{path} ({type(block).__name__})" if path else type(block).__name__
    return RewriteError(f"cannot split the backward of {name}: it {why}, {_WITHOUT}")
