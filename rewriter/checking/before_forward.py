"""What a forward may write, as it is before it: put back after a forward that nobody asked for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.over_ranks.dtensors import local_part
from remat.graph_capture.python_state.hidden import stream
from remat.graph_capture.python_state.places import Cell, Entry, Slot
from remat.graph_capture.tracing.untouched import OF_TORCH, ModuleAttributes
from remat.rewriter.checking.outcomes import same
from remat.rewriter.graphs.rng_states import save_rng_state, set_rng_state
from remat.rewriter.guards.forward import Guards


class BeforeForward:
    """Buffers, batch, random streams and Python's state that forward may write.

    Parameters
    ----------
    guards : of the plan. They know the places in Python's state that forward reaches.
    written : tensors that the planned forward writes to. others : that it only reads.

    Attributes
    ----------
    attributes : those of all modules. devices : whose random streams it knows.
    """

    def __init__(self, guards: Guards, written: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        model = guards.step
        self.attributes = ModuleAttributes(model, but=OF_TORCH - {"training"})
        self._state = guards.python_state
        places = [*self._state.places, *(one.place for one in guards.settled)]
        self._places = [(place, place.now()) for place in places]
        distinct = {id(tensor): tensor for tensor in written}
        parts = [local_part(tensor.detach()) for tensor in distinct.values()]
        self._tensors = [(tensor, tensor.clone()) for tensor in parts]
        read = {id(t): t for t in others if id(t) not in distinct and not t.is_inference()}
        self._versions = [(tensor, tensor._version) for tensor in read.values()]
        self._streams = {name: save_rng_state(name) for name in (CPU, device_of(model))}
        self.devices = tuple(self._streams)
        self._others = random.getstate(), np.random.get_state()
        self._own = [stream(one.text, one.owner) for one in self._state.streams]

    def written_else(self) -> list[str]:
        """What says that a tensor was written to that the planned forward only reads."""
        moved = [tensor for tensor, version in self._versions if tensor._version != version]
        return [f"tensor of shape {list(tensor.shape)}" for tensor in moved]

    def forget(self) -> None:
        """Let go of the copies of tensors and of random streams: nothing is put back any more."""
        self._tensors, self._streams = [], {}

    def put_back(self) -> None:
        """Leave everything as it was. What is as it was already is not written to."""
        with torch.no_grad():
            for tensor, before in self._tensors:
                if not same(tensor, before):
                    tensor.copy_(before)
        for device, state in self._streams.items():
            if not torch.equal(save_rng_state(device), state):
                set_rng_state(state, device)
        random.setstate(self._others[0])
        np.random.set_state(self._others[1])
        self.attributes.restore()
        self._put_back_places()

    def _put_back_places(self) -> None:
        for place, before in self._places:
            # What makes an object at each look sees for itself whether anything is to be done.
            if not isinstance(place, (Entry, Cell, Slot)) or place.now() is not before:
                place.put(before)
        for _, space, names in self._state.watched:
            for name in space.keys() & names:
                del space[name]
        for one in filter(None, self._own):
            one.put_back()


def device_of(model: nn.Module) -> str:
    """Where a model is, as `torch` names it; ``cpu`` for one without tensors."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return CPU if tensor is None else str(tensor.device)
