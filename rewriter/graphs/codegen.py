"""Generated Python that takes its inputs in a list and lets go of each value after its last use.

With inputs one by one it would hold them until it returns. Ops are bound once, not per call.
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

from remat.graph_capture.joint.nodes import is_getitem
from remat.graph_capture.torch_private.core import OP_NAMESPACES, OpOverload, OpWatcher, pytree

# `torch.ops.aten.mm.default(a, b)` matches a schema at each call, one to two microseconds more than
# `torch.mm(a, b)`. Which op that runs depends on its arguments, so each is tried once on fake
# tensors, and taken only if it runs the same overload with the same arguments.

_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

_REJECTED = (TypeError, ValueError, RuntimeError)  # where a function's parameters are not the op's


class _OpBindings:
    def __init__(self) -> None:
        self._known: dict[Any, Callable[..., Any]] = {}

    def of(self, node: fx.Node) -> Callable[..., Any]:
        target = node.target
        assert callable(target)
        if not isinstance(target, OpOverload):
            return target
        given = tuple(node.args), dict(node.kwargs)
        args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta.get("val"), given)
        whole = (*args, *kwargs.items())
        parts = (one if isinstance(one, (tuple, list)) else (one,) for one in whole)
        key = (target, *map(_kind, itertools.chain.from_iterable(parts)))
        if key not in self._known:  # each kind of call is tried once
            self._known[key] = _quickest(target, args, kwargs)
        return self._known[key]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):  # a parser may take a tensor without dimensions for a number
        return Tensor, leaf.dtype, leaf.dim() == 0
    return leaf if isinstance(leaf, str) else type(leaf)


def _quickest(
    target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    if target is torch.ops.aten.linear.default:
        return torch.nn.functional.linear  # a composite, of which no op of its own is recorded
    if target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags:
        for space in OP_NAMESPACES:
            candidate = getattr(space, target._opname, None)
            if candidate is not None and _runs_same(candidate, target, args, kwargs):
                return candidate
    return target._op  # without the Python of `OpOverload.__call__` around it


def _runs_same(
    candidate: Callable[..., Any], target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    recorder = _Recorder()
    try:
        with torch.no_grad(), recorder:
            candidate(*args, **kwargs)
    except _REJECTED:
        return False
    return len(recorder.calls) == 1 and _same_call(recorder.calls[0], (target, args, kwargs))


class _Recorder(OpWatcher):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)


def _same_call(found: _Call, wanted: _Call) -> bool:
    if found[0] is not wanted[0]:
        return False
    parameters = enumerate(found[0]._schema.arguments)
    return all(_same(_given(one, i, found), _given(one, i, wanted)) for i, one in parameters)


def _given(parameter: Any, i: int, call: _Call) -> Any:
    _, args, kwargs = call
    return args[i] if i < len(args) else kwargs.get(parameter.name, parameter.default_value)


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor) or isinstance(found, Tensor):
        return found is wanted
    if isinstance(wanted, (tuple, list)) and isinstance(found, (tuple, list)):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    return type(found) is type(wanted) and found == wanted


# With marks, backward is a generator: it releases gradients at each, and waits to be asked again.

Released = tuple[tuple[int, ...], list[Any]]  # places among backward's results, and gradients
Steps = Callable[[list[Any]], Iterator[Released]]


@has_side_effect
def release_gradients(places: Sequence[int], gradients: Sequence[Tensor]) -> None:
    """The mark. A backward graph that is run as it stands returns all gradients at its end."""


def marks(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=release_gradients)


def places_released(graph: fx.Graph) -> tuple[tuple[int, ...], ...]:
    """For each mark the places that it releases, then those that are left to the end."""
    found: list[Any] = [tuple(mark.args[0]) for mark in marks(graph)]  # pyright: ignore
    results: Any = graph.output_node().args[0]
    released = {place for places in found for place in places}
    rest = (i for i, r in enumerate(results) if isinstance(r, fx.Node) and i not in released)
    return (*found, tuple(rest))


Boxed = Callable[[list[Any]], Any]

_serial = itertools.count()


class _Writer:
    """`bound` holds the globals that it reads."""

    def __init__(self, gm: fx.GraphModule, *, in_steps: bool = False) -> None:
        self.gm = gm
        results: Any = gm.graph.output_node().args[0]
        self.marks = frozenset(marks(gm.graph) if in_steps else ())
        self.rest = places_released(gm.graph)[-1] if in_steps else ()
        self.results = [results[place] for place in self.rest] if in_steps else results
        self.bindings = _OpBindings()
        self.bound: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.lines: list[str] = []

    def write(self) -> str:
        nodes = list(self.gm.graph.nodes)
        dead = dead_after(nodes, [r for r in self.results if isinstance(r, fx.Node)])
        if taken := [node for node in nodes if node.op == "placeholder"]:
            self.lines.append(f"{', '.join(node.name for node in taken)}, = args_list")
        self.lines.append("args_list.clear()")  # or the caller's list would hold the inputs
        self._drop([node for node in taken if not node.users])
        for node in nodes:
            if _is_boxed(node):  # it lets go of what it is given, so nothing here may hold that
                self.lines.append(f"_given = {self._shown(node.args[0])}")
                self._drop(dead.pop(node, []))
            self._line(node)
            self._drop(dead.get(node, []))
            if node in self.marks:  # not before: it would hold what it waits with
                self.lines.append(f"yield {node.args[0]!r}, _released")
        body = "\n    ".join(self.lines)
        return f"def run(args_list):\n    {body}\n"

    def _line(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            constant = self.bind(getattr(self.gm, str(node.target)))
            self.lines.append(f"{node.name} = {constant}")
        elif node.op == "output" and self.marks:
            self.lines.append(f"yield {self.rest!r}, {self._shown(self.results)}")
        elif node.op == "output":
            self.lines.append(f"return {self._shown(node.args[0])}")
        elif node in self.marks:
            gradients: Any = node.args[1]
            self.lines.append(f"_released = {self._shown(list(gradients))}")
        elif node.op == "call_function":
            result = f"{node.name} = " if node.users else ""
            self.lines.append(f"{result}{self._call(node)}")

    def _call(self, node: fx.Node) -> str:
        if is_getitem(node):
            return f"{self._shown(node.args[0])}[{node.args[1]}]"
        if _is_boxed(node):
            return f"{self.bind(node.target)}(_given)"
        given = [self._shown(argument) for argument in node.args]
        given += [f"{name}={self._shown(argument)}" for name, argument in node.kwargs.items()]
        return f"{self.bind(self.bindings.of(node))}({', '.join(given)})"

    def _drop(self, nodes: list[fx.Node]) -> None:
        if nodes:
            self.lines.append(f"del {', '.join(node.name for node in nodes)}")

    def _shown(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return argument.name
        if argument is None or isinstance(argument, (bool, int)):  # inf and nan have no literal
            return repr(argument)
        if isinstance(argument, (tuple, list)):
            if any(isinstance(item, (fx.Node, tuple, list)) for item in argument):
                items = "".join(f"{self._shown(item)}, " for item in argument)
                return f"({items})" if isinstance(argument, tuple) else f"[{items}]"
            return self.bind(list(argument) if isinstance(argument, list) else argument)
        return self.bind(argument)

    def bind(self, thing: Any) -> str:
        if id(thing) not in self.names:  # `bound` keeps the thing, so no other gets its id
            name = f"_{len(self.bound)}"
            self.names[id(thing)], self.bound[name] = name, thing
        return self.names[id(thing)]


def dead_after(nodes: list[fx.Node], returned: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that it is the last to read; what is returned never dies."""
    dead: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set(returned)
    for node in reversed(nodes[:-1]):
        for read in node.all_input_nodes:
            if read not in seen:
                seen.add(read)
                dead.setdefault(node, []).append(read)
    return dead


def boxed(run: Boxed) -> Boxed:
    # AOTAutograd then passes inputs in a list, which the function empties.
    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _is_boxed(node: fx.Node) -> bool:
    return getattr(node.target, "_boxed_call", False) is True


def compile_boxed(gm: fx.GraphModule) -> Boxed:
    return boxed(_compiled(_Writer(gm)))


def compile_in_steps(gm: fx.GraphModule) -> Steps:
    """A generator that releases gradients at marks; last, those that no mark releases."""
    return _compiled(_Writer(gm, in_steps=True))


def _compiled(writer: _Writer) -> Any:
    source = writer.write()
    filename = f"<remat step {next(_serial)}>"
    space = dict(writer.bound)
    exec(compile(source, filename, "exec"), space)
    run = space["run"]
    # Tracebacks show the generated lines, for as long as the function lives.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(run, linecache.cache.pop, filename, None)
    return run
