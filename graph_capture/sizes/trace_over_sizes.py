"""Torch's symbols for the sizes that vary, and the guards that a trace with them leaves.

A size is a symbol times what it is a multiple of, so that nobody asks about remainders. What the
told ranges leave open becomes a guard when it is asked, with the op and the line that asked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import storage_key, target_name
from remat.graph_capture.joint.provenance import is_users, source_of
from remat.graph_capture.sizes.symbols import (
    FloatOfSizes,
    Guard,
    SizeArgument,
    Symbol,
    number_of_points,
    points,
)
from remat.graph_capture.torch_private.aot import ConstantSource, Max, PythonPrinter, bound_sympy
from remat.graph_capture.torch_private.core import OpOverload, pytree

MOST_POINTS = 1 << 14  # points at which to ask the code's question: all must agree


class Environment:
    """The symbols of one trace; `hints`: the sizes that are traced with."""

    def __init__(self, symbols: Sequence[Symbol], hints: Mapping[str, int]) -> None:
        # As without symbols, a size that is data, or a value that code looks at, is refused.
        self.shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.symbols, self.hints = tuple(symbols), dict(hints)
        self._noted = _NotedGuards()
        self.shape_env.guards = self._noted  # torch appends what it asks
        self._named: dict[sympy.Symbol, sympy.Expr] = {}
        self._whole: dict[sympy.Symbol, Any] = {}
        self._multiple: dict[sympy.Symbol, Symbol] = {}
        self._values: dict[tuple[Any, ...], dict[sympy.Expr, int]] = {}
        self._texts: dict[sympy.Expr, str] = {}
        # Torch's symbolic size, by name.
        self.size = {symbol.name: self._size_of(symbol) for symbol in self.symbols}

    def _size_of(self, symbol: Symbol) -> Any:
        steps, source = self.hints[symbol.name] // symbol.multiple, ConstantSource(symbol.name)
        made: Any = self.shape_env.create_symbol(steps, source, DimDynamic.DYNAMIC, None)
        least = min(symbol.low // symbol.multiple, steps)  # in a part, they may lie outside
        most = max(symbol.high // symbol.multiple, steps)
        self.shape_env.constrain_symbol_range(made, least, most)
        named: Any = sympy.Symbol(symbol.name, integer=True, positive=True)
        self._named[made] = named
        self._multiple[made] = symbol
        self._whole[made] = named / symbol.multiple  # torch's symbol counts steps of `multiple`
        return self.shape_env.create_symintnode(made, hint=steps, source=source) * symbol.multiple

    def value(self, number: Any, sizes: Mapping[str, int]) -> Any:
        if not isinstance(number, torch.SymInt):
            return number
        expr, point = number.node.expr, tuple(sizes.items())
        known = self._values.setdefault(point, {})
        if expr not in known:
            at = {s: sizes[one.name] // one.multiple for s, one in self._multiple.items()}
            known[expr] = int(expr.xreplace(at) if at else expr)
        return known[expr]

    def points_of(self, numbers: Iterable[Any]) -> list[dict[str, int]]:
        """All sizes of the symbols in these numbers, the largest last; none if these are many."""
        exprs = [number.node.expr for number in numbers if isinstance(number, torch.SymInt)]
        found = {one for expr in exprs for one in expr.free_symbols}
        symbols = [symbol for made, symbol in self._multiple.items() if made in found]
        if number_of_points(symbols) > MOST_POINTS:
            return []
        return [{**self.hints, **sizes} for sizes in points(symbols)]

    def text(self, number: Any) -> str:
        is_symbolic = isinstance(number, torch.SymInt)
        return self.text_of(number.node.expr) if is_symbolic else str(number)

    def text_of(self, expr: Any) -> str:
        if expr not in self._texts:
            printed = self._printed(self._without_max(expr))  # a ceiling in whole numbers, exactly
            self._texts[expr] = re.sub(
                r"math\.ceil\((.+?) / (\d+)\)", r"((\1 + \2 - 1)//\2)", printed
            )
        return self._texts[expr]

    def _without_max(self, expr: Any) -> Any:
        for one in expr.atoms(sympy.Max, Max):  # where ranges tell the larger one, no max
            for arg in one.args:
                others = [other for other in one.args if other is not arg]
                least = self._bounds(arg).lower
                if all(self._bounds(other).upper <= least for other in others):
                    return self._without_max(expr.xreplace({one: arg}))
        return expr

    def _bounds(self, expr: Any) -> Any:
        return bound_sympy(expr, self.shape_env.var_to_range)

    def _printed(self, expr: Any) -> str:
        whole = sympy.expand(expr.xreplace(self._whole))  # no floor if the multiples cancel out
        is_whole = all(number.is_Integer for number in whole.atoms(sympy.Rational))
        if is_whole and not expr.atoms(sympy.Function):
            return PythonPrinter().doprint(whole)
        printed = PythonPrinter().doprint(sympy.expand(expr.xreplace(self._named)))
        for symbol in self.symbols:
            if symbol.multiple > 1:  # torch's symbol is the number of steps
                steps = f"({symbol.name}//{symbol.multiple})"
                printed = re.sub(rf"\b{symbol.name}\b", steps, printed)
        return printed

    def in_words(self, said: str) -> str:
        for made, symbol in self._multiple.items():
            times = f"{symbol.multiple}*" if symbol.multiple > 1 else ""
            said = re.sub(rf"(?:{re.escape(times)})?\b{made}\b", symbol.name, said)
        ranges = " and ".join(map(str, self.symbols))
        return (
            "leave sizes that the model hard-codes or restricts out of dynamic, or narrow their "
            f"range: {said} (traced for {ranges})"
        )

    def guards(self) -> tuple[Guard, ...]:
        pairs = zip(self._noted, self._noted.places, strict=True)
        found = (Guard(self.text_of(guard.expr), *place) for guard, place in pairs)
        return tuple(dict.fromkeys(found))


class _NotedGuards(list[Any]):
    """The guards of a `ShapeEnv`, each with the op and the line that asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[str, str]] = []

    def append(self, item: Any) -> None:
        super().append(item)
        self.places.append(_who_asks())


def _who_asks() -> tuple[str, str]:
    """The op whose kernel is traced, and the innermost line of the user's that runs."""
    frame: FrameType | None = sys._getframe(2)  # that called `append`
    op, line = "", ""
    while frame is not None and not line:
        func = frame.f_locals.get("func")
        if not op and isinstance(func, OpOverload):
            op = str(func)
        if is_users(frame):
            line = source_of(frame)
        frame = frame.f_back
    return op, line


SYMBOLIC = "remat_symbolic"  # key of a node's meta: its traced value, with symbols
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NO_NAMES: dict[str, Any] = {"__builtins__": {}, "max": max, "min": min}


def at_sizes(gm: fx.GraphModule, env: Environment, sizes: Mapping[str, int]) -> fx.GraphModule:
    """The joint graph with numbers for symbols, as traced at these sizes. Tensors that share memory
    still do. Numbers that follow from the sizes are `SizeArgument`s."""
    return _AtSizes(gm, env, sizes).copy()


class _AtSizes:
    def __init__(self, gm: fx.GraphModule, env: Environment, sizes: Mapping[str, int]) -> None:
        self.gm, self.env, self.sizes = gm, env, sizes
        self.copies: dict[fx.Node, fx.Node] = {}
        self.storages: dict[int, Any] = {}

    def copy(self) -> fx.GraphModule:
        graph = fx.Graph()
        for node in self.gm.graph.nodes:
            # What only computes sizes runs no op at given ones.
            if isinstance(node.meta.get("val"), _NUMBERS) and node.op != "output":
                continue
            args, kwargs = pytree.tree_map(self._argument, (tuple(node.args), dict(node.kwargs)))
            copy = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            copy.meta = dict(node.meta)
            if "val" in node.meta:
                copy.meta[SYMBOLIC] = node.meta["val"]
                copy.meta["val"] = pytree.tree_map_only(Tensor, self._tensor, node.meta["val"])
            self.copies[node] = copy
        return fx.GraphModule(self.gm, graph)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            value = leaf.meta.get("val")
            is_number = isinstance(value, _NUMBERS) and leaf.op != "output"
            return self._number(value, leaf) if is_number else self.copies[leaf]
        return self._number(leaf, None) if isinstance(leaf, _NUMBERS) else leaf

    def _number(self, value: Any, node: fx.Node | None) -> Any:
        if isinstance(value, torch.SymInt):
            number = self.env.value(value, self.sizes)
            text = self.env.text(value)
            return number if text.lstrip("-").isdigit() else SizeArgument(number, text)
        if node is None or isinstance(value, torch.SymBool):
            raise CaptureError(
                f"leave the sizes it is made of out of dynamic: an op takes {value}, which a plan "
                "for a range cannot compute again"
            )
        bound: dict[str, Any] = {}
        text = self._code(node, bound)
        number = float(eval(text, dict(_NO_NAMES), {**bound, **self.sizes}))
        return FloatOfSizes(number, text, bound)

    def _code(self, leaf: Any, bound: dict[str, Any]) -> str:
        """Python that computes what the trace has computed of sizes, by the same functions."""
        if not isinstance(leaf, fx.Node):
            return f"({leaf!r})"
        value = leaf.meta.get("val")
        if isinstance(value, torch.SymInt):
            return f"({self.env.text(value)})"
        if not isinstance(value, torch.SymFloat) or leaf.kwargs or not callable(leaf.target):
            raise CaptureError(
                f"leave the sizes it depends on out of dynamic: {target_name(leaf)} computes a "
                "number from them, which a plan for a range cannot do again"
            )
        name = f"_f{len(bound)}"
        bound[name] = leaf.target
        return f"{name}({', '.join(self._code(arg, bound) for arg in leaf.args)})"

    def _tensor(self, traced: Tensor) -> Tensor:
        if traced.layout != torch.strided:
            return traced
        storage = traced.untyped_storage()
        size_bytes: Any = storage.nbytes()
        geometry = [*traced.shape, *traced.stride(), traced.storage_offset(), size_bytes]
        if not any(isinstance(number, torch.SymInt) for number in geometry):
            return traced
        shape = [self.env.value(n, self.sizes) for n in traced.shape]
        stride = [self.env.value(n, self.sizes) for n in traced.stride()]
        offset = self.env.value(cast("Any", traced.storage_offset()), self.sizes)
        mode: Any = getattr(traced, "fake_mode")  # noqa: B009
        with mode, torch.no_grad():
            key = storage_key(traced)
            if key not in self.storages:
                held = self.env.value(size_bytes, self.sizes)
                is_symbolic = isinstance(size_bytes, torch.SymInt)  # others stay as they are
                made = torch.empty(held, dtype=torch.uint8, device=traced.device)
                self.storages[key] = made.untyped_storage() if is_symbolic else storage
            view = torch.empty(0, dtype=traced.dtype, device=traced.device)
            view.set_(self.storages[key], offset, shape, stride)
        may_need = traced.is_floating_point() or traced.is_complex()
        return view.requires_grad_(traced.requires_grad and may_need)
