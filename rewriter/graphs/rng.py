"""Saving the random stream where an op draws from it, and drawing the same again.

Plain functions as fx targets: torch's higher-order ops for this fail under user dispatch modes.
Another thread may draw meanwhile, and torch has no lock for a state and its draw. So an op draws
again from a generator of its own, if it takes one, and the state notes where the stream was after
the first draw. A second draw that ends elsewhere is an error. It is rare: a first draw that moves
the stream otherwise than known is made anew.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from remat.graph_capture.devices.known_devices import is_cuda
from remat.graph_capture.errors import RandomStreamError
from remat.graph_capture.torch_private.core import OpOverload

# Where a stream was after the first draw from a state. A CPU's state has room for the note: 32-bit
# words stand in 64 bits. A CUDA device's is a seed and an offset, so it is kept with 8 bytes more.

_Words = NDArray[np.uint32]


class _StateForm(NamedTuple):
    """Where things stand in the state of a kind of device; `kept_bytes` has room for the note."""

    torch_bytes: int
    kept_bytes: int
    note: slice  # two words of 32 bits
    place: slice  # how far the stream is
    block: int  # where that begins anew


_OF_CPU = _StateForm(5056, 5056, slice(7, 11, 2), slice(16, 24), 624)
"""The upper halves of the first two words are not read; a block has 624 words."""
_OF_CUDA = _StateForm(16, 24, slice(4, 6), slice(8, 16), 1 << 64)

_one_at_a_time = threading.RLock()
# Reading a state locks the generator, and then makes a Python tensor. If garbage is collected
# there, another thread may ask for the lock with Python's own in its hands: both wait for ever.


def _form_of(device: str) -> _StateForm:
    return _OF_CUDA if is_cuda(device) else _OF_CPU


def save_rng_state(device: str = "cpu") -> Tensor:
    """State of the default generator of `device`: uint8, of shape (5056,), on CUDA (24,)."""
    if not is_cuda(device):
        return _torchs_state(device)
    kept = np.zeros(_OF_CUDA.kept_bytes, np.uint8)
    if _graph_draws() is None:  # while a CUDA graph is captured, torch refuses to tell
        kept[: _OF_CUDA.torch_bytes] = _torchs_state(device).numpy()
    return torch.from_numpy(kept)


def _torchs_state(device: str) -> Tensor:
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return torch.cuda.get_rng_state(device) if is_cuda(device) else torch.get_rng_state()
        finally:
            if collects:
                gc.enable()


def set_rng_state(state: Tensor, device: str = "cpu") -> None:
    with _one_at_a_time:
        if is_cuda(device):
            torch.cuda.set_rng_state(state[: _OF_CUDA.torch_bytes], device)
        else:
            torch.set_rng_state(state)


def _takes_note(state: Tensor, device: str) -> bool:
    return state.nbytes == _form_of(device).kept_bytes


def _parted(state: Tensor, device: str) -> tuple[Tensor, _Words]:
    """A state as torch takes it, without its note; and the note, zeros where there is none."""
    form, bare = _form_of(device), state.clone()
    words = bare.numpy().view(np.uint32)
    note = words[form.note].copy()
    words[form.note] = 0
    return bare[: form.torch_bytes], note


def _note_of(state: Tensor, device: str) -> _Words:
    held = state.numpy()[: _form_of(device).torch_bytes].tobytes()
    return np.array([hash(held) | 1], dtype=np.int64).view(np.uint32)  # zero means no note


def _moved(before: Tensor, after: Tensor, device: str) -> int:
    form = _form_of(device)
    places = [int(one.numpy()[form.place].view(np.uint64)[0]) for one in (before, after)]
    return (places[1] - places[0]) % form.block


_drawing = threading.RLock()  # a state and its draw belong together: threads take turns
TRIES = 20  # how often a first draw is made anew beside another thread that draws
_OTHERS = (
    "give the other thread a torch.Generator of its own, or plan with the module that draws kept "
    "(keep='its.path'), so that it draws once: another thread drew from torch's default generator"
)
_moves: dict[Any, int | None] = {}  # by op; None where that varies


def draw_noting(
    state: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run `op`, which will draw again from `state`: that is brought up to date and noted."""
    if (captured := _graph_draws()) is not None:
        captured.note(state)
        return op(*args, **kwargs)
    if not _takes_note(state, device):  # by place: aten.randn has arguments of these names
        return op(*args, **kwargs)
    key = _key(op, args, kwargs)
    with _drawing:
        for _ in range(TRIES):
            state.numpy()[:] = save_rng_state(device).numpy()  # there may be no room for another
            result = op(*args, **kwargs)
            after = save_rng_state(device)
            # Another thread drew in between if the stream moved otherwise than this op moves it.
            if _moves.get(key) in (None, _moved(state, after, device)):
                if (noted := getattr(_of_thread, "noted", None)) is not None:
                    noted.append(StreamPlace.of(state))
                state.numpy().view(np.uint32)[_form_of(device).note] = _note_of(after, device)
                return result
            del result  # there is room for one
    raise RandomStreamError(f"{_OTHERS}, and {op} must draw alone")


def drawn(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    if node.target in (draw_noting, run_with_rng_state):  # both take state and device first
        return node.args[2], node.args[3:]
    return node.target, node.args


def run_with_rng_state(
    state: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run `op` with a generator in `state`; the stream of `device` stays as it is."""
    if (captured := _graph_draws()) is not None:
        return captured.draw(state, op, args, kwargs)
    bare, note = _parted(state, device) if _takes_note(state, device) else (state, None)
    form = form_with_generator(op)
    if form is None:  # so the stream of the process is neither read nor moved
        result, after = _draw_from_default(bare, device, op, args, kwargs)
    else:
        generator = torch.Generator(device)
        generator.set_state(bare)
        del bare  # there may be no room for it beside what is drawn
        result, after = form(*args, **kwargs, generator=generator), generator.get_state()
    if note is not None:
        if note.any() and (note != _note_of(after, device)).any():
            raise RandomStreamError(f"{_OTHERS}, so {op} cannot draw again what it drew in forward")
        _learn(_key(op, args, kwargs), _moved(state, after, device))
    return result


def _draw_from_default(
    bare: Tensor, device: str, op: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Tensor]:
    with _drawing:
        now = save_rng_state(device)
        set_rng_state(bare, device)
        try:
            return op(*args, **kwargs), save_rng_state(device)
        finally:
            set_rng_state(now, device)


@functools.cache
def form_with_generator(op: Callable[..., Any]) -> Callable[..., Any] | None:
    if not isinstance(op, OpOverload):
        return None
    name = op._overloadname
    names = ("generator",) if name == "default" else (f"{name}_generator",)
    known = op.overloadpacket.overloads()
    forms = [op, *(getattr(op.overloadpacket, one) for one in names if one in known)]
    has_it = (form for form in forms if any(a.name == "generator" for a in form._schema.arguments))
    return next(has_it, None)


def _learn(key: Any, moved_by: int) -> None:
    # None from then on of an op that moves it now so far, now otherwise.
    _moves[key] = moved_by if _moves.setdefault(key, moved_by) == moved_by else None


def _key(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain = [(a.shape, a.dtype) if isinstance(a, Tensor) else a for a in args]
    return op, repr((plain, kwargs) if kwargs else plain)


# A CUDA graph holds no state: each replay reads those of the generators that it knows, and moves
# the stream as its ops did. So each second draw has a generator of its own, which is put, before a
# replay, as far from where forward began as the first draw was in a step that was not captured.
# While a graph is captured, a saved state holds that distance alone.

_of_thread = threading.local()


class StreamPlace(NamedTuple):
    """A state of a CUDA device's generator."""

    seed: int
    offset: int

    @classmethod
    def of(cls, state: Tensor) -> StreamPlace:
        return cls(*state.numpy()[: _OF_CUDA.torch_bytes].view(np.int64).tolist())

    @classmethod
    def now(cls, device: torch.device) -> StreamPlace:
        return cls.of(_torchs_state(str(device)))

    def write(self, state: Tensor) -> None:
        state.numpy()[: _OF_CUDA.torch_bytes] = np.array(self, np.int64).view(np.uint8)


class FirstDraws:
    """By how much the stream has moved since forward began, at each draw that is made again."""

    def __init__(self) -> None:
        self.moves: list[int] = []

    @contextlib.contextmanager
    def noted(self, began: StreamPlace) -> Generator[None]:
        """Within it forward runs, and is not captured."""
        _of_thread.noted = places = list[StreamPlace]()
        try:
            yield
        finally:
            _of_thread.noted = None
        self.moves = [place.offset - began.offset for place in places]


class GraphDraws:
    """The draws that one CUDA graph makes again, `n_again` of them."""

    def __init__(self, device: torch.device, n_again: int, first: FirstDraws) -> None:
        self._default = torch.cuda.default_generators[device.index or 0]
        self._own = [self._default.clone_state() for _ in range(n_again)]
        self._first, self._left = iter(first.moves), iter(self._own)
        self._moves: list[int] = []

    @contextlib.contextmanager
    def captured(self, graph: torch.cuda.CUDAGraph) -> Generator[None]:
        """Within it `graph` is captured."""
        for one in self._own:
            graph.register_generator_state(one)
        _of_thread.captured = self
        try:
            yield
        finally:
            _of_thread.captured = None

    def note(self, state: Tensor) -> None:
        StreamPlace(0, next(self._first)).write(state)

    def draw(self, state: Tensor, op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._moves.append(StreamPlace.of(state).offset)
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(next(self._left))
        try:
            return op(*args, **kwargs)
        finally:
            self._default.graphsafe_set_state(before)

    def put(self, began: StreamPlace) -> None:
        """Make ready for a replay in a step whose forward began at `began`."""
        for own, moved_by in zip(self._own, self._moves, strict=True):
            state = torch.empty(_OF_CUDA.torch_bytes, dtype=torch.uint8)
            StreamPlace(began.seed, began.offset + moved_by).write(state)
            own.set_state(state)


def _graph_draws() -> GraphDraws | None:
    return getattr(_of_thread, "captured", None)
