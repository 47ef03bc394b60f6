"""States of torch's random streams, as tensors on the host with room for a note.

A note says where a stream was after the first draw from a state. On a CPU the state has room of its
own: its words of 32 bits stand in 64 each. That of a CUDA device is a seed and an offset, of 8
bytes each, so it is kept with 8 bytes more.
"""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remat.graph_capture.devices.device_table import is_cuda

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class StateForm:
    """Where things stand in the state of a kind of device.

    Attributes
    ----------
    torch_bytes : what torch's own state has. kept_bytes : with room for the note.
    note : the two words of the note, in units of 32 bits.
    place : the bytes that say how far the stream is. block : after how many it begins anew.
    """

    torch_bytes: int
    kept_bytes: int
    note: slice
    place: slice
    block: int


OF_CPU = StateForm(5056, 5056, slice(7, 11, 2), slice(16, 24), 624)
"""The upper halves of the first two words are not read; a block has 624 words."""
OF_CUDA = StateForm(16, 24, slice(4, 6), slice(8, 16), 1 << 64)


_one_at_a_time = threading.RLock()
"""Torch's reading of a state locks the generator, and then makes a tensor of Python's. If Python
collects garbage there, another thread may run. If that one asks for the lock, it waits for it with
Python's own in its hands, and both wait for ever."""


def form_of(device: str) -> StateForm:
    """The form of the states of `device`."""
    return OF_CUDA if is_cuda(device) else OF_CPU


def save_rng_state(device: str = "cpu") -> Tensor:
    """State of the default generator of `device`: uint8, of shape (5056,), on CUDA (24,)."""
    if not is_cuda(device):
        return _torchs_state(device)
    kept = np.zeros(OF_CUDA.kept_bytes, np.uint8)
    kept[: OF_CUDA.torch_bytes] = _torchs_state(device).numpy()
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
    """Put the default generator of `device` into `state`."""
    with _one_at_a_time:
        if is_cuda(device):
            torch.cuda.set_rng_state(state[: OF_CUDA.torch_bytes], device)
        else:
            torch.set_rng_state(state)


def takes_note(state: Tensor, device: str) -> bool:
    """Whether a state has room for a note."""
    return state.nbytes == form_of(device).kept_bytes


def bring_up_to_date(state: Tensor, device: str) -> None:
    """Make `state` that of now, in its own memory, as there may be no room for another."""
    state.numpy()[:] = save_rng_state(device).numpy()


def write_note(state: Tensor, after: Tensor, device: str) -> None:
    """Note in `state` that the stream was at `after` once it was drawn from."""
    state.numpy().view(np.uint32)[form_of(device).note] = note_of(after, device)


def parted(state: Tensor, device: str) -> tuple[Tensor, Words]:
    """A state as torch takes it, without its note; and the note, of zeros where there is none."""
    form, bare = form_of(device), state.clone()
    words = bare.numpy().view(np.uint32)
    note = words[form.note].copy()
    words[form.note] = 0
    return bare[: form.torch_bytes], note


def note_of(state: Tensor, device: str) -> Words:
    """Two words that stand for a state; not both zero, as they are where there is no note."""
    held = state.numpy()[: form_of(device).torch_bytes].tobytes()
    return np.array([hash(held) | 1], dtype=np.int64).view(np.uint32)


def moved(before: Tensor, after: Tensor, device: str) -> int:
    """How far the stream moved, modulo the size of a block."""
    form = form_of(device)
    return (_place(after, form) - _place(before, form)) % form.block


def _place(state: Tensor, form: StateForm) -> int:
    return int(state.numpy()[form.place].view(np.uint64)[0])
