"""Saving the random stream where an op draws from it, and drawing the same again.

These are plain functions as fx targets: the higher-order ops that torch has for this fail under
user dispatch modes. A step leaves the stream as an eager step leaves it. Each device has a stream
of its own.

Another thread may draw from the same stream at any moment, and torch has no lock for a state and
the draw from it. So an op draws again from a generator of its own, if it takes one: the stream of
the process is neither read nor moved. And the state notes where the stream was after the first
draw. A second draw that ends elsewhere may have begun elsewhere, as another thread drew meanwhile:
that is an error. How far an op moves the stream is known from its second draws. A first draw that
moves it otherwise is made anew, so the error is rare: each draw has its own numbers in any case.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.errors import RandomStreamError
from remat.rewriter.graphs.rng_states import (
    Words,
    bring_up_to_date,
    moved,
    note_of,
    parted,
    save_rng_state,
    set_rng_state,
    takes_note,
    write_note,
)

_drawing = threading.RLock()
"""Held while a state and the draw from it must belong together: plans in two threads take turns."""
TRIES = 20
"""First draws that are made anew beside another thread that draws."""
_OTHERS = (
    "another thread drew from torch's default generator at that moment. Give that thread a "
    "torch.Generator of its own, or plan with the module that draws kept (keep='its.path'), so "
    "that it draws once"
)
_moves: dict[Any, int | None] = {}
"""How far an op moves the stream; None for one that does not always move it as far."""


def draw_noting(
    state: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run `op`, which will draw again from `state`: that is brought up to date, and gets its note.

    The first three have no names: `op` may have arguments of the same, as `aten.randn` has.
    """
    if not takes_note(state, device):
        return op(*args, **kwargs)
    key = _key(op, args, kwargs)
    with _drawing:
        for _ in range(TRIES):
            bring_up_to_date(state, device)
            result = op(*args, **kwargs)
            after = save_rng_state(device)
            if _moves.get(key) in (None, moved(state, after, device)):
                write_note(state, after, device)
                return result
            del result  # there is room for one
    raise RandomStreamError(f"{op} cannot draw alone: {_OTHERS}")


def drawn(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The op that a node runs and its arguments, also where it draws by one of the above."""
    if node.target in (draw_noting, run_with_rng_state):
        return node.args[2], node.args[3:]
    return node.target, node.args


def run_with_rng_state(
    state: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run `op` with a generator in `state`; the stream of `device` stays as it is.

    Raises
    ------
    RandomStreamError : another thread drew between `state` and the first run of `op`.
    """
    is_noted = takes_note(state, device)
    bare, note = parted(state, device) if is_noted else (state, None)
    form = form_with_generator(op)
    if form is None:
        result, after = _draw_from_default(bare, device, op, args, kwargs)
    else:
        generator = torch.Generator(device)
        generator.set_state(bare)
        del bare  # there may be no room for it beside what is drawn
        result, after = form(*args, **kwargs, generator=generator), generator.get_state()
    if note is not None:
        _require_note(note, after, op, device)
        _learn(_key(op, args, kwargs), moved(state, after, device))
    return result


def _draw_from_default(
    bare: Tensor, device: str, op: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Tensor]:
    """For ops that take no generator: put the stream back as it was; what they drew, and up to."""
    with _drawing:
        now = save_rng_state(device)
        set_rng_state(bare, device)
        try:
            return op(*args, **kwargs), save_rng_state(device)
        finally:
            set_rng_state(now, device)


@functools.cache
def form_with_generator(op: Callable[..., Any]) -> Callable[..., Any] | None:
    """The overload of `op` that takes a generator, None where there is none."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    name = op._overloadname
    names = ("generator",) if name == "default" else (f"{name}_generator",)
    known = op.overloadpacket.overloads()
    forms = [op, *(getattr(op.overloadpacket, one) for one in names if one in known)]
    return next((form for form in forms if _takes_generator(form)), None)


def _takes_generator(op: Any) -> bool:
    return any(one.name == "generator" for one in op._schema.arguments)


def _require_note(note: Words, after: Tensor, op: Any, device: str) -> None:
    if note.any() and (note != note_of(after, device)).any():
        raise RandomStreamError(f"{op} cannot draw again what it drew in forward: {_OTHERS}")


def _key(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By what an op is known to move the stream."""
    plain = [(a.shape, a.dtype) if isinstance(a, Tensor) else a for a in args]
    return op, repr((plain, kwargs) if kwargs else plain)


def _learn(key: Any, moved_by: int) -> None:
    """Note how far an op moves the stream; nothing is said of one that moves it now so, now so."""
    _moves[key] = moved_by if _moves.setdefault(key, moved_by) == moved_by else None
