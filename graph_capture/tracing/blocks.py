"""How a model calls some of its submodules: the inputs of each, noted while it is traced."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from remat.graph_capture.distributed.dtensors import is_distributed
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import TANGENTS, Op, Resident
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import is_alias_of_input, is_tangent
from remat.graph_capture.joint.provenance import path_in_model
from remat.graph_capture.refusals import refuse_all_frozen, refuse_module, refuse_subclass
from remat.graph_capture.sizes.ranged_signature import signature_over
from remat.graph_capture.sizes.trace_over_sizes import Environment
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.recipe import Recipe, autocast_state
from remat.graph_capture.tracing.signature import Signature

_SHOWN = 5  # module paths that an error shows


@dataclass
class _BlockCalls:
    blocks: dict[str, nn.Module]
    signatures: dict[str, list[Signature]] = field(default_factory=dict[str, list[Signature]])
    autocast: dict[str, Any] = field(default_factory=dict[str, Any])

    def recipes(self, env: Environment | None = None) -> dict[str, Recipe]:
        """How to trace each block by itself, in the order in which they ran; `env`: of a range."""
        for path, block in self.blocks.items():
            count = len(self.signatures.get(path, ()))
            if count != 1:
                raise CaptureError(
                    "narrow the pattern to blocks that are called once, or plan the whole model "
                    f"with remat.rematerialize: block {path} ({type(block).__name__}) is called "
                    f"{count} times in a step, and a block's plan is for one call"
                )
            if self.autocast[path] != autocast_state():
                raise CaptureError(
                    "enter autocast around the whole step, as torch's documentation shows: block "
                    f"{path} runs under an autocast that forward enters"
                )
        kinds = {path: type(block).__name__ for path, block in self.blocks.items()}
        each = {path: found[0] for path, found in self.signatures.items()}
        if env is not None:
            each = {path: _over_range(path, found, env) for path, found in each.items()}
        return {
            path: Recipe(kinds[path], found, None, Resident(), self.autocast[path])
            for path, found in each.items()
        }


def _over_range(path: str, called: Signature, env: Environment) -> Signature:
    try:
        return signature_over(called, env)
    except CaptureError as error:
        raise CaptureError(f"block {path}: {error}").caused_by(error) from None


def matching_blocks(model: nn.Module, pattern: str, device: str) -> dict[str, nn.Module]:
    """The submodules whose path matches a glob, by path; of two nested ones the outer."""
    if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CaptureError(
            "give a glob, blocks='layers.*', and the batch as args=(...): blocks is a "
            f"{type(pattern).__name__}"
        )
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        # Modules are listed from the outside in, so the outer one is known by now.
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not inside and fnmatch.fnmatchcase(path, pattern):
            found[path] = module
    if not found:
        raise CaptureError(_nothing_matched(model, pattern))
    for path, block in found.items():
        try:
            refuse_module(block, device)
            refuse_all_frozen(block)
        except CaptureError as error:
            raise CaptureError(f"block {path}: {error}").caused_by(error) from None
    return found


def _nothing_matched(model: nn.Module, pattern: str) -> str:
    paths = [path for path, _ in model.named_modules() if path]
    shown = ", ".join(paths[:_SHOWN]) or "none"
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return (
        f"name blocks by their paths, such as 'model.layers.*': pattern '{pattern}' matches no "
        f"submodule of {type(model).__name__}; there are {shown}{more}"
    )


@contextlib.contextmanager
def watching_calls(model: nn.Module, blocks: dict[str, nn.Module]) -> Generator[_BlockCalls]:
    calls = _BlockCalls(blocks)

    def start(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.signatures.clear()  # a trace runs forward more than once, and the last run counts
        calls.autocast.clear()
        return forward(*args, **kwargs)

    def note(path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for leaf in filter(is_distributed, pytree.tree_leaves((args, kwargs))):
            refuse_subclass(f"an argument of block {path}", leaf)
        calls.signatures.setdefault(path, []).append(Signature((args, kwargs, None)))
        calls.autocast[path] = autocast_state()
        return forward(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(forward_wrapped(model, start))
        for path, block in blocks.items():
            stack.enter_context(forward_wrapped(block, functools.partial(note, path)))
        yield calls


@contextlib.contextmanager
def forward_wrapped(module: nn.Module, wrapped: Callable[..., Any]) -> Generator[None]:
    """Have calls of `module` run ``wrapped(forward, *args, **kwargs)``, of its own forward."""
    space = vars(module)
    before = {"forward": space["forward"]} if "forward" in space else {}
    called = functools.partial(wrapped, module.forward)
    vars(called)["__signature__"] = inspect.signature(module.forward)  # sizes are named by argument
    space["forward"] = called
    try:
        yield
    finally:
        del space["forward"]
        space.update(before)


@dataclass
class BlockMatch:
    """Where a block is in the whole graph: each by the name in the block."""

    op_of: dict[str, str]  # ops, without tangents
    value_of: dict[str, str]
    state_of: dict[str, str]  # parameters and buffers


@dataclass
class _Matcher:
    """Nodes of the block, with those of the whole graph that they were found to be."""

    block: Joint
    whole: Joint
    of_node: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    trail: list[fx.Node] = field(default_factory=list[fx.Node])  # undone if the comparison fails
    op_of: dict[str, str] = field(default_factory=dict[str, str])

    def is_same_op(self, mine: Op, theirs: Op) -> bool:
        """Whether two ops do the same to matching inputs; if so they match from now on."""
        a, b = self.block.node_of_op.get(mine.name), self.whole.node_of_op.get(theirs.name)
        if a is None or b is None:
            is_same = mine.target == theirs.target
        else:
            self.trail.clear()
            is_same = self._same_call(a, b)
            for node in () if is_same else self.trail:
                del self.of_node[node]
        is_same = is_same and len(mine.outputs) == len(theirs.outputs)
        if is_same:
            self.op_of[mine.name] = theirs.name
        return is_same

    def _same_call(self, a: fx.Node, b: fx.Node) -> bool:
        if a.op != b.op or a.target != b.target:
            return False
        mine, spec = pytree.tree_flatten((a.args, a.kwargs))
        theirs, other_spec = pytree.tree_flatten((b.args, b.kwargs))
        same = spec == other_spec and all(map(self._same_leaf, mine, theirs))
        return same and self._bind(a, b)

    def _same_leaf(self, a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            return self._same(a, b)
        return type(a) is type(b) and a == b  # scalars are equal too, by type, as 1 == True

    def _same(self, a: fx.Node, b: fx.Node) -> bool:
        a, b = _behind_aliases(a), _behind_aliases(b)  # a view is the tensor that it views
        if a in self.of_node:
            return self.of_node[a] is b
        if a.op == "placeholder":
            return _looks_alike(a, b) and self._bind(a, b)
        if a.op == "get_attr":
            mine = getattr(self.block.module, str(a.target))
            theirs: Any = getattr(self.whole.module, str(b.target), None)
            same = b.op == "get_attr" and mine.dtype == theirs.dtype
            return same and torch.equal(mine, theirs) and self._bind(a, b)
        # Ops are compared in the order of the graph, so one that is not bound by now has no match.
        return a.name not in self.block.node_of_op and self._same_call(a, b)

    def _bind(self, a: fx.Node, b: fx.Node) -> bool:
        self.of_node[a] = b
        self.trail.append(a)
        return True


def _behind_aliases(node: fx.Node) -> fx.Node:
    while is_alias_of_input(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _looks_alike(a: fx.Node, b: fx.Node) -> bool:
    mine, theirs = a.meta.get("val"), b.meta.get("val")
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        return mine == theirs
    alike = mine.shape == theirs.shape and mine.dtype == theirs.dtype
    # A gradient may have other strides: it is made contiguous before the block's backward.
    return alike and (is_tangent(a) or mine.stride() == theirs.stride())


def match_block(block: Joint, whole: Joint, path: str) -> BlockMatch:
    # A block compiled by itself sums gradients inside first. Bits are eager's only if the whole
    # step has its very ops, wired alike and in its order.
    matcher = _Matcher(block, whole)
    _match_forward(matcher, path)
    _match_backward(matcher, path)
    value_of, state_of = dict[str, str](), dict[str, str]()
    for op in block.graph.ops:
        if op.name in matcher.op_of:
            theirs = whole.graph.ops[whole.graph.op_index[matcher.op_of[op.name]]]
            value_of.update(zip(op.outputs, theirs.outputs, strict=True))
    for mine, theirs in matcher.of_node.items():
        if mine.op == "placeholder":
            value_of[block.value_of_node[mine]] = whole.value_of_node[theirs]
            if not is_tangent(mine) and (name := _state_name(mine)):
                state_of[name] = _state_name(theirs)
    return BlockMatch(matcher.op_of, value_of, state_of)


def _state_name(node: fx.Node) -> str:
    """Of the parameter or buffer that a placeholder stands for; empty if it is neither."""
    return path_in_model(str(getattr(node.meta.get("desc"), "target", "")))


def _is_inside(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def _match_forward(matcher: _Matcher, path: str) -> None:
    own, graph = matcher.block.graph, matcher.whole.graph
    inside = [op for op in graph.ops[: graph.n_forward] if _is_inside(op.module, path)]
    if len(inside) != own.n_forward:
        raise CaptureError(
            "narrow the pattern to other blocks, or plan the whole model with "
            f"remat.rematerialize: block {path} runs {own.n_forward} ops in forward on its own "
            f"and {len(inside)} in the model, which calls parts of it from elsewhere"
        )
    for mine, theirs in zip(own.ops[: own.n_forward], inside, strict=True):
        if not matcher.is_same_op(mine, theirs):
            raise CaptureError(
                "pass what forward depends on as an argument, or plan the whole model with "
                f"remat.rematerialize: block {path} alone runs {_op_text(mine)} in forward where "
                f"the model runs {_op_text(theirs)}, on the same inputs"
            )


def _match_backward(matcher: _Matcher, path: str) -> None:
    own, graph = matcher.block.graph, matcher.whole.graph
    backward = iter(graph.ops[graph.n_forward :])  # one iterator: others' ops may stand between
    begun = False
    for mine in own.ops[own.n_forward :]:
        if mine.target == TANGENTS:
            continue
        for theirs in backward:
            begun = begun or _is_inside(theirs.module, path)  # modules behind it may look alike
            if begun and matcher.is_same_op(mine, theirs):
                break
        else:
            raise CaptureError(
                "narrow the pattern, or plan the whole model with remat.rematerialize: block "
                f"{path} alone runs {_op_text(mine)} in backward, and the model does not, as "
                "where an input of the block is also used outside it.\n"
                "Gradients would be summed in another order, and their last bits differ"
            )


def _op_text(op: Op) -> str:
    place = ", ".join(part for part in (op.target, op.module, op.source) if part)
    return f"op {op.name} ({place})"
