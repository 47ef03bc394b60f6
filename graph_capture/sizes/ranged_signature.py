"""The signature of batches whose sizes vary, whose test is compiled to one function."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from remat.graph_capture.errors import CaptureError, SignatureError
from remat.graph_capture.python_state.state_slots import is_same
from remat.graph_capture.sizes.symbols import (
    Dynamic,
    Guard,
    Place,
    Sizes,
    Symbol,
    as_symbol,
    generic_sizes,
    require_in_range,
    require_one_range,
)
from remat.graph_capture.sizes.trace_over_sizes import Environment
from remat.graph_capture.torch_private.core import FakeTensorMode, pytree
from remat.graph_capture.tracing.signature import Signature, TensorFacts


class RangedSignature(Signature):
    """What is alike in all batches of a range. `tensors` are those of the sizes in `hints`."""

    def __init__(
        self, batch: Any, symbols: Sequence[Symbol], places: Sequence[Place], hints: Sizes
    ) -> None:
        super().__init__(batch)
        # `places`: where sizes vary; `hints`: the sizes that are traced with.
        self.symbols, self.places, self.hints = tuple(symbols), tuple(places), dict(hints)
        self.guards: tuple[Guard, ...] = ()  # what the trace asks of the sizes
        self._orders = {one.leaf: self._order(one.leaf) for one in places}
        self.tensors = self._tensors(self.hints)
        self._check: Callable[[list[Any]], bool] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_check": None}  # a function made by `exec` cannot be pickled

    def with_guards(self, guards: Sequence[Guard]) -> RangedSignature:
        other = copy.copy(self)
        other.guards = tuple(guards)
        return other

    def within(self, symbols: Sequence[Symbol]) -> RangedSignature:
        other = copy.copy(self)
        other.symbols = tuple(symbols)
        return other

    def holds(self, leaves: Sequence[Any], spec: Any) -> bool:
        """Whether the sizes of a batch are within the range, whatever else it is."""
        if spec != self.spec:
            return False
        try:
            sizes = self.sizes_of(leaves)
        except SignatureError:
            return False
        return all(sizes[symbol.name] in symbol.sizes for symbol in self.symbols)

    def at(self, sizes: Sizes) -> Signature:
        plain = Signature(())
        plain.names, plain.spec, plain.others = self.names, self.spec, self.others
        plain.attributes = self.attributes
        plain.tensors = self._tensors(require_in_range(self.symbols, sizes))
        return plain

    def templates(self) -> tuple[str, ...]:
        """The lines of a signature, with sizes that vary in braces."""
        found: list[str] = []
        for i, line in enumerate(self.lines()):
            facts = self.tensors[i]
            if facts is None or i not in self._orders:
                # `RangedGraph` fills the lines by `str.format`.
                found.append(line.replace("{", "{{").replace("}", "}}"))
                continue
            shape = self._shape(i, {one.name: f"{{{one.name}}}" for one in self.symbols})
            shown = f"[{', '.join(map(str, shape))}]"
            if ", strides " in line:
                raise CaptureError(
                    f"pass {self.names[i]}.contiguous(): it varies in size, and its memory order "
                    "is not that of its dimensions"
                )
            found.append(line.replace(str(list(facts.shape)), shown, 1))
        return tuple(found)

    def example(self, mode: FakeTensorMode, size: Mapping[str, Any] | None = None) -> Any:
        """A batch of fake tensors; of the sizes in `size`, which may be symbols."""
        return self._example(mode, self._tensors(size or self.hints))

    def example_at(self, sizes: Sizes) -> Any:
        return self.example(FakeTensorMode(), sizes)

    def bytes_of_leaves(self) -> tuple[str, ...]:
        """Bytes of each tensor, as expressions of the sizes."""
        names = {one.name: one.name for one in self.symbols}
        return tuple(
            "*".join([*map(str, self._shape(i, names)), str(facts.dtype.itemsize)])
            for i, facts in enumerate(self.tensors)
            if facts is not None
        )

    def require(self, leaves: list[Any], spec: Any, model: str) -> None:
        if self._check is None:
            self._check = self._compiled()
        if spec == self.spec and self._check(leaves):
            return
        sizes = self.sizes_of(leaves) if spec == self.spec else dict(self.hints)
        for symbol in self.symbols:
            if sizes[symbol.name] not in symbol.sizes:
                raise SignatureError(
                    f"plan for a range that holds it: {model} was planned for {symbol}, and is "
                    f"called with {symbol.name} = {sizes[symbol.name]}"
                )
        Signature.require(self.at(sizes), leaves, spec, model)
        for guard in self.guards:
            if not guard.holds(sizes):
                raise SignatureError(
                    f"make another plan for these sizes: {model} was planned for sizes with "
                    f"{guard.text}, as {guard.op or 'its code'} requires, and is called with "
                    f"{sizes}"
                )
        raise SignatureError(f"{model} was planned for other batches")

    def sizes_of(self, leaves: Sequence[Any]) -> dict[str, int]:
        """The size of each symbol in a batch, from the first place that has it."""
        found: dict[str, int] = {}
        for one in self.places:
            facts, leaf = self._facts(one.leaf), leaves[one.leaf]
            if not isinstance(leaf, Tensor) or leaf.dim() != len(facts.shape):
                raise SignatureError(
                    f"call the model as at capture: {self.names[one.leaf]} was planned as a "
                    f"tensor of {len(facts.shape)} dimensions and is something else now"
                )
            found.setdefault(one.symbol, leaf.shape[one.dim])
        return found

    def _compiled(self) -> Callable[[list[Any]], bool]:
        bound: dict[str, Any] = {"Tensor": Tensor, "same": is_same}
        tests = [self._test_of_leaf(i, bound) for i in range(len(self.tensors))]
        for symbol in self.symbols:
            tests.append(f"{symbol.low} <= {symbol.name} <= {symbol.high}")
            if symbol.multiple > 1:
                tests.append(f"{symbol.name} % {symbol.multiple} == 0")
        tests += [f"({guard.text})" for guard in self.guards]
        return _function(self._reads(), [test for test in tests if test], bound)

    def _reads(self) -> list[str]:
        seen: dict[str, Place] = {}
        for one in self.places:
            seen.setdefault(one.symbol, one)
        return [f"{name} = leaves[{one.leaf}].shape[{one.dim}]" for name, one in seen.items()]

    def _test_of_leaf(self, i: int, bound: dict[str, Any]) -> str:
        if (facts := self.tensors[i]) is None:
            bound[f"other{i}"] = self.others[i]
            return f"same(leaves[{i}], other{i})"
        names = {one.name: one.name for one in self.symbols}
        shape, stride = self._shape(i, names), self._stride(i, names)
        bound[f"facts{i}"] = facts[2:]
        return (
            f"isinstance(t := leaves[{i}], Tensor) and t.shape == {_tuple(shape)} and "
            f"t.stride() == {_tuple(stride)} and "
            f"(t.dtype, t.device, t.requires_grad) == facts{i}"
        )

    def _tensors(self, size: Mapping[str, Any]) -> list[TensorFacts | None]:
        changed = list(self.tensors)
        for i in self._orders:
            shape, stride = self._shape(i, size), self._stride(i, size)
            changed[i] = self._facts(i)._replace(shape=shape, stride=stride)
        return changed

    def _facts(self, i: int) -> TensorFacts:
        facts = self.tensors[i]
        assert facts is not None
        return facts

    def _shape(self, i: int, size: Mapping[str, Any]) -> Any:
        facts = self._facts(i)
        own = {one.dim: size[one.symbol] for one in self.places if one.leaf == i}
        shape = tuple(own.get(dim, n) for dim, n in enumerate(facts.shape))
        return torch.Size(shape) if all(type(n) is int for n in shape) else shape

    def _stride(self, i: int, size: Mapping[str, Any]) -> tuple[Any, ...]:
        if i not in self._orders:
            return self._facts(i).stride
        shape, step = self._shape(i, size), 1
        stride: list[Any] = [1] * len(shape)
        for dim in self._orders[i]:
            stride[dim] = step
            is_text = isinstance(shape[dim], str) or isinstance(step, str)
            step = f"{step}*{shape[dim]}" if is_text else step * shape[dim]
        return tuple(stride)

    def _order(self, i: int) -> list[int]:
        """The dimensions of a tensor without gaps, the one next to each other in memory first."""
        facts = self.tensors[i]
        if facts is None:
            raise CaptureError(f"{self.names[i]} is not a tensor, so it has no size that varies")
        shape, stride = facts[:2]
        # Along a size of 1, the stride says nothing: the last dimension then is the innermost.
        order = sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim))
        step = 1
        for dim in order:
            if shape[dim] != 1 and stride[dim] != step:
                raise CaptureError(
                    f"pass {self.names[i]}.contiguous(): it varies in size and has gaps in "
                    f"memory, strides {list(stride)}"
                )
            step *= shape[dim]
        return order


def _function(
    reads: Sequence[str], tests: Sequence[str], bound: dict[str, Any]
) -> Callable[[list[Any]], bool]:
    body = "\n        and ".join(tests)
    lines = "".join(f"        {line}\n" for line in reads)
    source = (
        "def fits(leaves):\n    try:\n"
        f"{lines}    except (AttributeError, IndexError):\n        return False\n"
        f"    return bool(\n        {body}\n    )\n"
    )
    space = dict(bound)
    exec(compile(source, "<remat sizes>", "exec"), space)
    return space["fits"]


def _tuple(entries: Sequence[Any]) -> str:
    return f"({''.join(f'{entry}, ' for entry in entries)})"


def places_in(
    batch: Any, model: nn.Module, dynamic: Dynamic
) -> tuple[tuple[Symbol, ...], tuple[Place, ...]]:
    """The sizes of a batch, (args, kwargs, target), that vary, and where they are."""
    signature = Signature(batch)
    leaf_of = {name: i for i, name in enumerate(signature.names)}
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    positions = [one.name for one in parameters if one.kind in kinds]
    symbols, places = list[Symbol](), list[Place]()
    for argument, dims in _as_mapping(dynamic, "dynamic").items():
        names = [f"args[{argument}]"]  # names under which a signature may have it
        if not isinstance(argument, int):
            at = positions.index(argument) if argument in positions else None
            names = [argument, f"kwargs[{argument!r}]", f"args[{at}]"]
        i = next((leaf_of[one] for one in names if one in leaf_of), None)
        facts = None if i is None else signature.tensors[i]
        if i is None or facts is None:
            raise CaptureError(
                f"name one of {', '.join([*positions, 'target'])}, or {', '.join(leaf_of)}: "
                f"dynamic names {argument!r}, which is not a tensor of the batch"
            )
        for dim, entry in _as_mapping(dims, f"dynamic of {argument!r}").items():
            if type(dim) is not int or not 0 <= dim < len(facts.shape):
                raise CaptureError(
                    f"dynamic names dimension {dim!r} of {argument!r}, which has "
                    f"{len(facts.shape)} dimensions"
                )
            symbols.append(as_symbol(entry, f"{argument} dimension {dim}", facts.shape[dim]))
            places.append(Place(i, dim, symbols[-1].name))
    return require_one_range(symbols), tuple(places)


def _as_mapping(given: Any, what: str) -> Mapping[Any, Any]:
    if not isinstance(given, Mapping):
        raise CaptureError(
            'give sizes by argument and dimension, such as {"tokens": {1: ("seq", 16, 2048)}}: '
            f"{what} is {given!r}"
        )
    return cast("Mapping[Any, Any]", given)


def signature_over(plain: Signature, env: Environment) -> RangedSignature:
    """That of a call inside a step traced over a range: `plain` has symbols for sizes."""
    symbol_of = {str(symbol.name): symbol for symbol in env.symbols}
    places: list[Place] = []
    for i, facts in enumerate(plain.tensors):
        for dim, size in enumerate(facts.shape if facts else ()):
            text = env.text(size)
            if text in symbol_of:
                places.append(Place(i, dim, text))
            elif not text.isdigit():
                _refuse_size(plain.names[i], text)
    for name, other in zip(plain.names, plain.others, strict=True):
        if isinstance(other, torch.SymInt) and not env.text(other).isdigit():
            _refuse_size(name, env.text(other))
    if missing := symbol_of.keys() - {one.symbol for one in places}:
        _refuse_size("no argument", ", ".join(sorted(missing)))
    at_hints = [facts and _at_hints(facts, env) for facts in plain.tensors]
    found = RangedSignature(plain.example_of(at_hints), env.symbols, places, env.hints)
    found.firsts = plain.firsts
    return found


def _at_hints(facts: TensorFacts, env: Environment) -> TensorFacts:
    shape = torch.Size(env.value(n, env.hints) for n in facts.shape)
    return facts._replace(shape=shape, stride=tuple(env.value(n, env.hints) for n in facts.stride))


def _refuse_size(name: str, text: str) -> None:
    raise CaptureError(
        "leave out blocks, to plan the whole model over the range; or leave out dynamic, and pad "
        f"batches to one size: {name} of a block has the size {text}, and a block is planned over "
        "the sizes of the batch that its own arguments have"
    )


def ranged_signature(model: nn.Module, batch: Any, dynamic: Dynamic) -> RangedSignature:
    """The signature of the batches that ``dynamic=`` asks for, from one of them."""
    symbols, places = places_in(batch, model, dynamic)
    if not symbols:
        raise CaptureError("leave out dynamic for a plan of one size: it names no dimension")
    # A traced size that is equal to one of these would look as if it were that one. Sizes that vary
    # are none of them: ranks whose batches differ in these trace the same step.
    varying = {(one.leaf, one.dim) for one in places}
    fixed = {n for t in (*model.parameters(), *model.buffers()) for n in t.shape}
    for i, leaf in enumerate(pytree.tree_leaves(batch)):
        if isinstance(leaf, Tensor):
            fixed |= {n for dim, n in enumerate(leaf.shape) if (i, dim) not in varying}
    return RangedSignature(batch, symbols, places, generic_sizes(symbols, fixed))
