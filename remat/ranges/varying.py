"""What a cache of plans asks of a batch: which plan could serve it, and which one to make."""

from __future__ import annotations

import inspect
import re
from collections.abc import Hashable, Mapping
from typing import Any, Literal, NamedTuple, cast

import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.shapes.ranges import Dynamic, Symbol
from remat.graph_capture.shapes.signature import places_in
from remat.graph_capture.tracing.recipe import autocast_state
from remat.graph_capture.tracing.signature import Signature, tensor_facts
from remat.ranges.learned import LEAST, At, LearnedSizes, Shapes

Asked = Dynamic | Literal["auto"]
Upto = Mapping[str | int, Any]
"""The largest sizes to come: by argument and dimension, ``{"tokens": {1: 2048}}``, or by name."""


class Wanted(NamedTuple):
    """A plan to make. `dynamic` : ranges by leaf and dimension; None for a plan of one size.

    `is_guess` : whether ends of ranges are guesses, so that less may be planned for.
    """

    dynamic: Dynamic | None
    is_guess: bool = False


class VaryingSizes:
    """The sizes that vary in the batches of one model.

    Parameters
    ----------
    dynamic : as of `remat.rematerialize`, or ``auto`` to learn it. upto : see `Upto`.
    """

    def __init__(self, model: nn.Module, dynamic: Asked, upto: Upto | None) -> None:
        if isinstance(dynamic, str) and dynamic != "auto":
            raise CaptureError(
                f"dynamic={dynamic!r} is unknown: give 'auto', or sizes by argument and dimension, "
                'such as {"tokens": {1: ("seq", 16, 2048)}}'
            )
        if upto is not None and not isinstance(upto, Mapping):  # pyright: ignore
            raise CaptureError(
                f"upto={upto!r} is no dict: give the largest sizes by argument and dimension, such "
                'as {"tokens": {1: 2048}}'
            )
        self.model, self.dynamic, self.upto = model, dynamic, dict(upto or {})
        self._kinds: dict[Hashable, LearnedSizes] = {}

    def key(self, batch: Any) -> tuple[tuple[Hashable, Hashable], bool]:
        """Which plans can serve a batch, and whether those of its kind were for other sizes.

        A key is a pair, of which the first is the kind.
        """
        leaves, spec = pytree.tree_flatten(batch)
        kind = (tuple(map(_kind_of, leaves)), spec, autocast_state())
        shapes = _shapes(leaves)
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = self._first_of(batch)
        is_new = known.learn(shapes)
        symbols = known.symbols_at(shapes)
        sizes = tuple(
            tuple(symbols.get((i, dim), size) for dim, size in enumerate(shape or ()))
            for i, shape in enumerate(shapes)
        )
        return (kind, sizes), is_new

    def wanted(self, batch: Any) -> Wanted:
        """The plan to make for a batch, whose `key` was asked for before."""
        kind, shapes = self._kind(batch)
        ranges, is_guess = kind.ranges_for(shapes)
        names = Signature(batch).names
        dynamic: dict[str | int, dict[int, Any]] = {}
        for (leaf, dim), name in kind.symbols_at(shapes).items():
            one = ranges[name]
            entry = (one.name, one.low, one.high, one.multiple)
            dynamic.setdefault(names[leaf], {})[dim] = entry
        return Wanted(dynamic or None, is_guess)

    def planned(self, batch: Any, symbols: tuple[Symbol, ...]) -> None:
        """Take note of the ranges of a plan that was made for a batch."""
        kind, _ = self._kind(batch)
        kind.planned |= {symbol.name: symbol for symbol in symbols}

    def follow_otherwise(self, batch: Any) -> bool:
        """Have other places follow those of `upto`; False where no way to do so is left."""
        return self._kind(batch)[0].follow_otherwise()

    def follow_as_at_first(self, batch: Any) -> None:
        """Have other places follow those of `upto` as before `follow_otherwise`."""
        self._kind(batch)[0].follow_as_at_first()

    def cannot_vary(self, batch: Any, why: str) -> None:
        """Take note that sizes of batches like this one need a plan each."""
        self._kind(batch)[0].unfit = why

    def _kind(self, batch: Any) -> tuple[LearnedSizes, Shapes]:
        leaves, spec = pytree.tree_flatten(batch)
        kind = (tuple(map(_kind_of, leaves)), spec, autocast_state())
        return self._kinds[kind], _shapes(leaves)

    def _first_of(self, batch: Any) -> LearnedSizes:
        """What is known of a kind of batch before any sizes were seen."""
        signature = Signature(batch)
        arguments = _argument_names(self.model)
        names = {
            (i, dim): _identifier(arguments.get(name, name), dim)
            for i, name in enumerate(signature.names)
            if (facts := signature.tensors[i]) is not None
            for dim in range(len(facts[0]))
        }
        given: dict[At, Symbol] | None = None
        if not isinstance(self.dynamic, str):
            symbols, places = places_in(batch, self.model, _with_ranges(self.dynamic))
            named = {symbol.name: symbol for symbol in symbols}
            given = {(one.leaf, one.dim): named[one.symbol] for one in places}
        return LearnedSizes(names, given, self._upto(batch, given))

    def _upto(self, batch: Any, given: Mapping[At, Symbol] | None) -> dict[At, int]:
        """The largest sizes by place."""
        named = {symbol.name for symbol in (given or {}).values()}
        by_name = {name: size for name, size in self.upto.items() if name in named}
        found = {at: by_name[s.name] for at, s in (given or {}).items() if s.name in by_name}
        rest = {name: dims for name, dims in self.upto.items() if name not in by_name}
        for argument, dims in rest.items():
            if not isinstance(dims, Mapping):
                raise CaptureError(
                    f"upto names {argument!r} with {dims!r}: give the largest size by argument and "
                    'dimension, such as {"tokens": {1: 2048}}, or by a name that dynamic gives'
                )
            entries = cast("Mapping[int, Any]", dims).items()
            asked = {dim: (f"upto_{dim}", LEAST, most) for dim, most in entries}
            symbols, places = places_in(batch, self.model, {argument: asked})
            high = {symbol.name: symbol.high for symbol in symbols}
            found |= {(one.leaf, one.dim): high[one.symbol] for one in places}
        return found


def _with_ranges(dynamic: Dynamic) -> Dynamic:
    """`dynamic`, with a short range for a name alone, which batches then extend."""

    def ranged(entry: Any) -> Any:
        return (entry, LEAST, LEAST + 1) if isinstance(entry, str) else entry

    return {
        argument: {dim: ranged(entry) for dim, entry in dims.items()}
        for argument, dims in dynamic.items()
    }


def _kind_of(leaf: Any) -> Hashable:
    """What no plan of another size can serve. A tensor with gaps is known by all its facts."""
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf)
    if not leaf.is_contiguous():
        return tensor_facts(leaf)
    return leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad


def _shapes(leaves: list[Any]) -> Shapes:
    return tuple(
        tuple(leaf.shape) if isinstance(leaf, Tensor) and leaf.is_contiguous() else None
        for leaf in leaves
    )


def _argument_names(model: nn.Module) -> dict[str, str]:
    parameters = inspect.signature(model.forward).parameters
    return {f"args[{i}]": name for i, name in enumerate(parameters)}


def _identifier(name: str, dim: int) -> str:
    return f"{re.sub(r'[^0-9A-Za-z]+', '_', name).strip('_')}_{dim}"
