"""`autograd.Function`s that no trace enters: one op forward and one backward, of the user's code.

Their kernels are Triton's, NumPy's or an extension's. Each call is tried on made data, which shows
what it returns, saves and writes to. A call that gives the same bits twice, and moves nothing else,
may be recomputed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import sys
from collections.abc import Callable, Generator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from remat.graph_capture.costs.op_times import sample_tensor
from remat.graph_capture.errors import CaptureError, RewriteError
from remat.graph_capture.joint.nodes import TRIALS, storage_key
from remat.graph_capture.torch_private.core import (
    SINGLE_LEVEL_SETUP,
    DisableTorchFunction,
    as_outside_of_ops,
    calls_of_functions,
    disable_current_modes,
    make_contiguous_strides_for,
    pytree,
)
from remat.graph_capture.tracing.nested_backward import differentiates
from remat.graph_capture.tracing.recipe import autocast_state
from remat.graph_capture.tracing.trials import (
    MODULES,
    copies_of,
    differ,
    reason_against,
    what_moves,
)

_NAMESPACE = "remat_function"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum, type)


@contextlib.contextmanager
def opaque_functions(kinds: frozenset[type[Function]]) -> Generator[None]:
    """Have calls of these recorded as ops."""
    opaque = {kind for kind in kinds if not differentiates(kind)}

    def stand_in(kind: type[Function]) -> dict[str, Any]:
        return _recorded(kind) if kind in opaque else {}

    with calls_of_functions(stand_in) if opaque else contextlib.nullcontext():
        yield


class _Context:
    """What the user's code has as `ctx`, beside what it sets itself."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad, self.saved_tensors = needs_input_grad, tuple[Any, ...]()
        self.marks: dict[str, Any] = {"dirty": (), "constant": (), "materializes": True}

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None: ...

    def mark_dirty(self, *tensors: Any) -> None:
        self.marks["dirty"] = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.marks["constant"] = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.marks["materializes"] = value


_OWN = frozenset(vars(_Context(())))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a function but for the tensors that it is given."""

    kind: type[Function]
    leaves: tuple[Any, ...]  # of all arguments, None in place of each tensor
    at: tuple[int, ...]  # the places of tensors among them
    flags: tuple[bool, ...]  # whether these require grad, which code asks
    spec: Any
    needs: tuple[bool, ...]
    autocast: tuple[Any, ...]

    @property
    def text(self) -> str:
        """The same in each process: of objects, their class."""
        leaves = [one if isinstance(one, _PLAIN) else type(one).__qualname__ for one in self.leaves]
        return repr((leaves, self.at, self.flags, self.needs, self.autocast))

    def forward(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self.leaves)
        for i, tensor, flag in zip(self.at, tensors, self.flags, strict=True):
            leaves[i] = tensor.detach().requires_grad_(flag)
        args = pytree.tree_unflatten(leaves, self.spec)
        ctx = _Context(self.needs)
        # Not what `calls_of_functions` has in place of it.
        forward = type.__getattribute__(self.kind, "forward")
        with self._as_called():
            if (setup := _own_setup(self.kind)) is None:
                output = forward(ctx, *args)
            else:
                output = forward(*args)
                setup(ctx, args, output)
        kept = {name: one for name, one in vars(ctx).items() if name not in _OWN}
        return output, ctx.saved_tensors, kept, ctx.marks

    def backward(self, saved: tuple[Any, ...], kept: dict[str, Any], grads: Sequence[Any]) -> Any:
        ctx = _Context(self.needs)
        ctx.saved_tensors = saved
        vars(ctx).update(kept)
        with torch.no_grad():
            found = self.kind.backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        return [one if needed else None for one, needed in zip(found, self.needs, strict=False)]

    @contextlib.contextmanager
    def _as_called(self) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device, is_on, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled=is_on))
            yield


def _record(kind: type[Function], args: tuple[Any, ...]) -> tuple[Any, Callable[[Any], None]]:
    """What a call returns, and what keeps the rest in its `ctx`."""
    leaves, spec = pytree.tree_flatten(args)
    at = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    if any(isinstance(size, torch.SymInt) for i in at for size in leaves[i].shape):
        raise CaptureError(
            f"leave dynamic out: {kind.__name__} cannot be traced, so it is planned for one size"
        )
    for leaf in leaves:
        if isinstance(leaf, nn.Module) or getattr(leaf, "__closure__", None):
            raise CaptureError(
                f"pass tensors alone to {kind.__name__}: it cannot be traced, and is called with "
                f"code ({type(leaf).__name__}), whose parameters no op shows"
            )
    # Autograd sees the tensors among the arguments, and none in lists.
    own = {id(arg) for arg in args if isinstance(arg, Tensor)}
    tensors = [leaves[i] if id(leaves[i]) in own else leaves[i].detach() for i in at]
    needs = tuple(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    others = tuple(None if i in at else leaf for i, leaf in enumerate(leaves))
    flags = tuple(leaves[i].requires_grad for i in at)
    call = _Call(kind, others, at, flags, spec, needs, autocast_state())
    op = _forward_op(call, tensors)
    (output, saved, kept, marks), written = op(tensors)
    dirty = {id(one) for one in marks["dirty"]}
    in_place = dict[int, Tensor]()
    for i, new in zip(op.written, written, strict=True):
        tensors[i].data.copy_(new)  # later readers see it, as in eager
        if id(new) in dirty:
            in_place[id(new)] = tensors[i]
    output, saved, kept = pytree.tree_map(
        lambda one: in_place.get(id(one), one), (output, saved, kept)
    )

    def keep(ctx: Any) -> None:
        ctx.mark_dirty(*in_place.values())
        ctx.mark_non_differentiable(*marks["constant"])
        ctx.set_materialize_grads(marks["materializes"])
        flat, ctx.spec = pytree.tree_flatten((saved, kept))
        ctx.is_tensor = [isinstance(one, Tensor) for one in flat]
        ctx.save_for_backward(*(one for one in flat if isinstance(one, Tensor)))
        ctx.rest = [one for one in flat if not isinstance(one, Tensor)]
        ctx.call, ctx.op = call, op

    return output, keep


class _Recorded(Function):
    """The backward of a call, for autograd."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call, saved, pattern = ctx.call, ctx.saved_tensors, [one is not None for one in grads]

        def run(given: list[Tensor]) -> Any:
            tensors, rest = iter(given), iter(ctx.rest)
            flat = [next(tensors if is_tensor else rest) for is_tensor in ctx.is_tensor]
            passed = [next(tensors) if is_given else None for is_given in pattern]
            return call.backward(*pytree.tree_unflatten(flat, ctx.spec), passed)

        given = [*saved, *(one for one in grads if one is not None)]
        key = repr((pattern, call.needs, [_Layout.of(one) for one in given]))
        if key not in ctx.op.backwards:
            name = f"{ctx.op.name}_backward" + (f"_{n}" if (n := len(ctx.op.backwards)) else "")
            ctx.op.backwards[key] = _Op(name, call.kind, run, given)
        op = ctx.op.backwards[key]
        gradients, written = op(given)
        for i, new in zip(op.written, written, strict=True):
            given[i].data.copy_(new)
        return tuple(gradients)


_ASKED = ("_backward_cls", "clear_saved_tensors_on_access", "boxed_grads_call")
"""What autograd asks a class for at a call, beside its code."""


def _recorded(kind: type[Function]) -> dict[str, Any]:
    """What stands in for the class in one call."""
    keeps = list[Callable[[Any], None]]()

    def forward(*args: Any) -> Any:
        output, keep = _record(kind, args)
        keeps.append(keep)
        return output

    def set_up(ctx: Any, *_: Any) -> None:
        keeps.pop()(ctx)

    def forward_with_ctx(ctx: Any, *args: Any) -> Any:
        output = forward(*args)
        set_up(ctx)
        return output

    asked = {name: getattr(_Recorded, name) for name in _ASKED if hasattr(_Recorded, name)}
    if _own_setup(kind) is None:
        return {**asked, "forward": forward_with_ctx}
    return {**asked, "forward": forward, "setup_context": set_up}


def _own_setup(kind: type[Function]) -> Any:
    """Its setup_context, whatever `calls_of_functions` has in place of it; None for torch's."""
    found = type.__getattribute__(kind, "setup_context")
    return None if found is SINGLE_LEVEL_SETUP else found


class _View(NamedTuple):
    """A tensor as a part of the storage of another: of what an op is given, then what it makes."""

    source: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from where the other begins

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        base = tensors[self.source]
        if (tuple(base.shape), base.stride(), 0) == (self.size, self.stride, self.offset):
            return base
        whole = base.numel() == math.prod(self.size) and self.offset == 0
        if whole and base.is_contiguous() and self.stride == make_contiguous_strides_for(self.size):
            return base.view(self.size)  # which the trace can write through
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class _Layout(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    elements: int  # of its storage

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        offset: Any = tensor.storage_offset()
        place = tuple(tensor.shape), tensor.stride(), offset
        return cls(*place, tensor.dtype, tensor.device, elements)

    def made(self) -> Tensor:
        flat = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        return flat.as_strided(self.size, self.stride, self.offset)


class _Op:
    """The user's code in one direction, for one layout of what it is given."""

    def __init__(
        self, name: str, kind: type[Function], run: Callable[[list[Tensor]], Any],
        given: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.name, self._run = name, run
        self.backwards = dict[str, _Op]()
        with disable_current_modes(), DisableTorchFunction(), torch.no_grad():
            made = [sample_tensor(one, 1) for one in given]  # none a view of another, as sources
            tracer = sys.gettrace()
            sys.settrace(None)  # what this code reads, each step reads anew
            try:
                with what_moves([kind.__module__]):
                    why = self._try(made, kind)
            finally:
                sys.settrace(tracer)
        self.op = self._defined(len(given)) if self.layouts else None
        if self.op is not None:
            TRIALS[self.op], MODULES[self.op] = why, kind.__module__

    def _try(self, given: list[Tensor], kind: type[Function]) -> str:
        """Find what it writes to and makes. Why it must not run twice, if that shows."""
        copies = copies_of(given)
        try:
            first = pytree.tree_leaves(self._run(copies))
        except Exception as error:
            raise CaptureError(
                "make its kernel an op, with torch.library.custom_op, register_fake and "
                f"register_autograd: {self.name.rpartition('_')[0]} can neither be traced nor run "
                f"on made data ({type(error).__name__}: {error})"
            ) from error
        written = {storage_key(a) for a, b in zip(given, copies, strict=True) if differ(a, b)}
        written |= self._written_for_ones(given)
        self.written = tuple(i for i, one in enumerate(given) if storage_key(one) in written)
        # What a first run fills, such as a cache, does not count.
        with what_moves([kind.__module__]) as moved:
            again, self.leaves, self.spec, made = self._described(given, [])
        self.layouts = [_Layout.of(one) for one in made]
        pairs = list(zip(first, again, strict=False))  # what is written is last of `again` alone
        for one, other in pairs:
            if not isinstance(one, Tensor) and not _is_same(one, other):
                raise CaptureError(
                    "keep a tensor, with ctx.save_for_backward: "
                    f"{self.name.rpartition('_')[0]} keeps {one!r} for backward, and {other!r} for "
                    "the same data, which no op can carry"
                )
        return reason_against(pairs, moved)

    def _written_for_ones(self, given: list[Tensor]) -> set[int]:
        """Losses look whether the gradient that arrives is 1, and write over theirs if not."""
        ones = [one.clone().fill_(1) if one.is_floating_point() else one for one in given]
        before = copies_of(ones)
        with contextlib.suppress(Exception):  # what they may not be, is no gradient
            self._run(ones)
        trios = zip(given, ones, before, strict=True)
        return {storage_key(one) for one, now, then in trios if differ(now, then)}

    def _described(
        self, given: Sequence[Tensor], expected: Sequence[Any]
    ) -> tuple[list[Any], list[Any], Any, list[Tensor]]:
        """What a run returns; that with views in place of tensors; its tree; and what it makes.
        `expected` : such views, for tensors that are of one storage in a step."""
        inside = list(given)
        for i, copy in zip(self.written, copies_of([given[i] for i in self.written]), strict=True):
            inside[i] = copy
        leaves, spec = pytree.tree_flatten((self._run(inside), [inside[i] for i in self.written]))
        bases, made, described = list(given), list[Tensor](), list[Any]()
        sources: dict[int, list[int]] = {}
        for i, one in enumerate(given):
            if i not in self.written:
                sources.setdefault(storage_key(one), []).append(i)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                described.append(leaf)
                continue
            known = sources.get(storage_key(leaf), [])
            hint = expected[len(described)] if len(described) < len(expected) else None
            is_made = isinstance(hint, _View) and hint.source >= len(given)
            # The same bytes as other numbers; or code that makes it, or takes it, as values are.
            if known and (
                bases[known[0]].dtype != leaf.dtype or (is_made and known[0] < len(given))
            ):
                leaf, known = leaf.clone(), []
            if not known:
                known = sources[storage_key(leaf)] = [len(bases)]
                bases.append(leaf)
                made.append(leaf)
            at = hint.source if isinstance(hint, _View) and hint.source in known else known[0]
            offset: Any = leaf.storage_offset() - bases[at].storage_offset()
            described.append(_View(at, tuple(leaf.shape), leaf.stride(), offset))
        return leaves, described, spec, made

    def _defined(self, number: int) -> Any:
        taken = ", ".join(f"Tensor t{i}" for i in range(number))
        given = ", ".join("Tensor" for _ in self.layouts)
        returned = given if len(self.layouts) == 1 else f"({given})"
        _library.define(f"{self.name}({taken}) -> {returned}")
        _library.impl(self.name, self._computed, "CompositeExplicitAutograd")
        _library._register_fake(self.name, self._faked)
        return getattr(getattr(torch.ops, _NAMESPACE), self.name).default

    def _computed(self, *given: Tensor) -> Any:
        versions = [one._version for one in given]
        with as_outside_of_ops():
            _, leaves, _, made = self._described(given, self.leaves)
        pairs = zip(leaves, self.leaves, strict=False)
        is_same = (
            versions == [one._version for one in given]
            and len(leaves) == len(self.leaves)
            and all(_is_same(*pair) for pair in pairs)
        )
        if not is_same or [_Layout.of(one) for one in made] != self.layouts:
            raise RewriteError(
                f"plan again: {self.name} returns, keeps or writes something else than at planning "
                f"({leaves} for {self.leaves})"
            )
        return made[0] if len(made) == 1 else tuple(made)

    def _faked(self, *_: Tensor) -> Any:
        made = tuple(layout.made() for layout in self.layouts)
        return made[0] if len(made) == 1 else made

    def __call__(self, given: Sequence[Tensor]) -> Any:
        """In a trace: what the code returns, and what it has written."""
        made = self.op(*given) if self.op else ()
        every = [*given, *(made if isinstance(made, (tuple, list)) else (made,))]
        views = {one: one.of(every) for one in self.leaves if isinstance(one, _View)}
        leaves = [views[one] if isinstance(one, _View) else one for one in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def _forward_op(call: _Call, given: Sequence[Tensor]) -> _Op:
    """The op of a call, tried once for each layout of what it is given."""
    layouts = [_Layout.of(one) for one in given]
    text = repr((call.kind.__module__, call.kind.__qualname__, call.text, layouts))
    known = _OPS.setdefault(text, [])
    for other, op in known:
        if other == call:
            return op
    number = f"_{len(known)}" if known else ""  # objects of one class, which no text tells apart
    name = f"{call.kind.__name__}_{hashlib.sha256(text.encode()).hexdigest()[:8]}{number}"
    op = _Op(name, call.kind, call.forward, given)
    known.append((call, op))
    return op


_OPS: dict[str, list[tuple[_Call, _Op]]] = {}
