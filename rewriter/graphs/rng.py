"""Saving the random stream where an op draws from it, and drawing the same again.

These are plain functions as fx targets: the higher-order ops that torch has for this fail under
user dispatch modes. A step leaves the stream as an eager step leaves it. Each device has a stream
of its own. States are tensors on the host; that of a CUDA device has 16 bytes and counts for
nothing.

Another thread may draw from the same stream at any moment, and torch has no lock for a state and
the draw from it. So on a CPU an op draws again from a generator of its own: the stream of the
process is neither read nor moved. And the state notes where the stream was after the first draw.
A second draw that ends elsewhere may have begun elsewhere, as another thread drew meanwhile: that
is an error. How far an op moves the stream is known from its second draws. A first draw that moves
it otherwise is made anew, so the error is rare: each draw has its own numbers in any case.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from remat.graph_capture.devices.device_table import is_cuda
from remat.graph_capture.errors import RandomStreamError

Words = NDArray[np.uint32]

_drawing = threading.RLock()
"""Held while a state and the draw from it must belong together: plans in two threads take turns."""
_STATE_BYTES = 5056
"""Of a CPU's generator, whose words of 32 bits stand in 64 each; the upper half is not read."""
_NOTE = slice(7, 11, 2)
"""Upper halves of the first two words, in units of 32 bits: where a state has its note."""
_PLACE, _BLOCK = slice(16, 24), 624
"""Where a state says how many words of its block are drawn, and how many a block has."""
TRIES = 20
"""First draws that are made anew beside another thread that draws."""
_OTHERS = (
    "another thread drew from torch's default generator at that moment. Give that thread a "
    "torch.Generator of its own, or plan with the module that draws kept (keep='its.path'), so "
    "that it draws once"
)
_moves: dict[Any, int | None] = {}
"""Words that an op moves the stream on by; None for one that does not always by as many."""


def save_rng_state(device: str = "cpu") -> Tensor:
    """State of the default generator of `device`: uint8, of shape (5056,) for the CPU."""
    return torch.cuda.get_rng_state(device) if is_cuda(device) else torch.get_rng_state()


def set_rng_state(state: Tensor, device: str = "cpu") -> None:
    """Put the default generator of `device` into `state`."""
    if is_cuda(device):
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def draw_noting(
    state: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run `op`, which will draw again from `state`: that is brought up to date, and gets its note.

    The first three have no names: `op` may have arguments of the same, as `aten.randn` has.
    """
    if not _takes_note(state, device):
        return op(*args, **kwargs)
    key = _key(op, args, kwargs)
    with _drawing:
        for _ in range(TRIES):
            # Held in the state itself, as there is no room for another.
            state.numpy()[:] = torch.get_rng_state().numpy()
            result = op(*args, **kwargs)
            after = torch.get_rng_state()
            if _moves.get(key) in (None, _moved(state, after)):
                state.numpy().view(np.uint32)[_NOTE] = _note_of(after)
                return result
            del result  # there is room for one
    raise RandomStreamError(f"{op} cannot draw alone: {_OTHERS}")


def drawn(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The op that a node runs and its arguments, also where it draws by one of the above."""
    if node.target in (draw_noting, run_with_rng_state):
        return node.args[2], node.args[3:]
    return node.target, node.args


def _takes_note(state: Tensor, device: str) -> bool:
    return not is_cuda(device) and state.nbytes == _STATE_BYTES


def run_with_rng_state(
    state: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run `op` with a generator in `state`; the stream of `device` stays as it is.

    Raises
    ------
    RandomStreamError : another thread drew between `state` and the first run of `op`.
    """
    form = None if is_cuda(device) else form_with_generator(op)
    if form is None:
        return _draw_from_default(state, device, op, args, kwargs)
    bare, note = _parted(state)
    generator = torch.Generator(device)
    generator.set_state(bare)
    del bare  # there may be no room for it beside what is drawn
    result = form(*args, **kwargs, generator=generator)
    after = generator.get_state()
    _require_note(note, after, op)
    _learn(_key(op, args, kwargs), _moved(state, after))
    return result


def _draw_from_default(
    state: Tensor, device: str, op: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """For ops that take no generator, and on a CUDA device: put the stream back as it was."""
    bare, note = _parted(state) if _takes_note(state, device) else (state, None)
    with _drawing:
        now = save_rng_state(device)
        set_rng_state(bare, device)
        try:
            result = op(*args, **kwargs)
            after = save_rng_state(device)
        finally:
            set_rng_state(now, device)
    if note is not None:
        _require_note(note, after, op)
    return result


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


def _parted(state: Tensor) -> tuple[Tensor, Words]:
    """A state without its note, and the note."""
    bare = state.clone()
    words = bare.numpy().view(np.uint32)
    note = words[_NOTE].copy()
    words[_NOTE] = 0
    return bare, note


def _note_of(state: Tensor) -> Words:
    """Two words that stand for a state; not both zero, as they are where there is no note."""
    return np.array([hash(state.numpy().tobytes()) | 1], dtype=np.int64).view(np.uint32)


def _require_note(note: Words, after: Tensor, op: Any) -> None:
    if note.any() and (note != _note_of(after)).any():
        raise RandomStreamError(f"{op} cannot draw again what it drew in forward: {_OTHERS}")


def _key(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By what an op is known to move the stream."""
    plain = [(a.shape, a.dtype) if isinstance(a, Tensor) else a for a in args]
    return op, repr((plain, kwargs) if kwargs else plain)


def _moved(before: Tensor, after: Tensor) -> int:
    """How many words the stream moved on, modulo those of a block."""
    return (_place(after) - _place(before)) % _BLOCK


def _place(state: Tensor) -> int:
    return int(state.numpy()[_PLACE].view(np.uint64)[0])


def _learn(key: Any, moved: int) -> None:
    """Note how far an op moves the stream; nothing is said of one that moves it now so, now so."""
    _moves[key] = moved if _moves.setdefault(key, moved) == moved else None
