"""The tensors that a plan relies on: those a module holds now, and those that backward reads again.

Places are read directly: `named_parameters` takes as long as fifty small ops.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from remat.graph_capture.distributed.dtensors import parameter_groups_of
from remat.graph_capture.errors import RewriteError, StateChangedError
from remat.graph_capture.tracing.signature import first_places

_Slot = tuple[str, nn.Module, str]  # path, module, name


def named_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, then buffers, in the order of a trace; shared ones under every name."""
    buffers = module.named_buffers(remove_duplicate=False)
    return [*module.named_parameters(remove_duplicate=False), *buffers]


class LiveState:
    """The state of a module by the modules and places that held it when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters, self._no_parameters = _slots(model, "_parameters")
        self._buffers, self._no_buffers = _slots(model, "_buffers")
        self.names = [path for path, _, _ in (*self._parameters, *self._buffers)]
        self._modules = [(m, _children(m), _held(m)) for m in model.modules()]

    def read(self) -> list[Tensor] | None:
        """As `named_state`; None if a module has other children, or a place came or went."""
        for module, children, held in self._modules:
            if _children(module) != children or _held(module) != held:
                return None
        state = [m._parameters[name] for _, m, name in self._parameters]
        state += [m._buffers[name] for _, m, name in self._buffers]
        empty = [m._parameters[name] for _, m, name in self._no_parameters]
        empty += [m._buffers[name] for _, m, name in self._no_buffers]
        is_other = any(one is not None for one in empty) or any(one is None for one in state)
        return None if is_other else state  # pyright: ignore[reportReturnType]


def _slots(model: nn.Module, table: str) -> tuple[list[_Slot], list[_Slot]]:
    filled, empty = list[_Slot](), list[_Slot]()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in getattr(module, table).items():
            slot = (f"{path}.{name}".lstrip("."), module, name)
            (empty if tensor is None else filled).append(slot)
    return filled, empty


def _children(module: nn.Module) -> tuple[Any, ...]:
    return tuple(module._modules.values())


def _held(module: nn.Module) -> tuple[str, ...]:
    return (*module._parameters, *module._buffers)


_Versions = list[tuple[int, int]]  # writes to each parameter and its part on this rank


class UnshardedParameters:
    """Notices parameters that FSDP2 left whole after backward, and that an optimizer changed."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._kept: list[tuple[Any, _Versions]] = []

    def require_fresh(self, module: nn.Module) -> None:
        self._groups = parameter_groups_of(module)
        # With set_reshard_after_backward(False) a forward after an optimizer's step would read old
        # parameters. All ranks raise, or none.
        for group, versions in self._kept:
            if _versions(group) != versions:
                raise StateChangedError(
                    "call set_reshard_after_backward(True) before the last backward of each "
                    f"optimizer step: with False, the parameters of {type(module).__name__} "
                    "stayed whole, and forward would use them from before the update"
                )

    def note_backward(self) -> None:
        kept = [group for group in self._groups if not group.reshard_after_backward]
        self._kept = [(group, _versions(group)) for group in kept]

    def note_sharded(self) -> None:
        # Pipelines shard whole groups at a step's end: the next forward gathers those anew.
        self._kept = [(group, versions) for group, versions in self._kept if not group.is_sharded]


def shards_in(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """What FSDP2 holds of parameters between steps: each module that has one, by what name."""
    for module in model.modules():
        for one in (one for group in parameter_groups_of(module) for one in group.fsdp_params):
            info = one._module_info
            yield info.module, info.param_name, one.sharded_param
            for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                yield shared, name, one.sharded_param


def _versions(group: Any) -> _Versions:
    parameters = [one.sharded_param for one in group.fsdp_params]
    return [(p._version, p._local_tensor._version) for p in parameters]


# A write through ``.data`` or NumPy leaves no sign on a tensor that backward reads again. So its
# bits are added up when forward ends and when backward begins: all of them at the first steps and
# while that takes little, else some, others at each step.

WHOLE_STEPS = 3  # after so many steps, only what costs little is compared
_SHARE = 0.01  # of a step's time, that comparisons may take
LEAST_US = 100.0  # they may always take this long
BYTES_A_US, _TENSOR_US = 8000.0, 3.0  # added up in a us; us that each tensor takes
LINE_BYTES = 64  # least that is read
_FEW_BYTES = 1024  # so many are copied sooner than they are added up
_KINDS = (np.uint64, np.uint32, np.uint16, np.uint8)
_PLAIN = (Tensor, torch.nn.Parameter)

_Words = np.ndarray[Any, Any]
_Bits = int | bytes | None


class _Sample(NamedTuple):
    """One of how many tensors is looked at in a step, and of it one of how many words."""

    of_tensors: int
    of_words: int
    number: int


class _Noted(NamedTuple):
    name: str
    tensor: weakref.ref[Tensor]
    version: int
    storage: int
    bits: _Bits


class RecomputeInputs:
    """The tensors that backward reads to make values again, by their places among the inputs."""

    def __init__(self, places: Sequence[int], step_us: float) -> None:
        self.places = tuple(places)
        self._allowed_us = max(LEAST_US, _SHARE * step_us) / 2  # forward and backward
        self._words: dict[tuple[int, int], _Words] = {}
        self._step = 0

    def noted(
        self, names: Sequence[str], inputs: Sequence[Any],
        constants: Iterable[tuple[str, Tensor]] = (),
    ) -> tuple[_Sample, list[_Noted]]:  # fmt: skip
        """What is to be so still when backward begins: those inputs, and all of the constants."""
        known = [*((names[i], inputs[i]) for i in self.places), *constants]
        # Tensors of inference mode have no version.
        pairs = [(n, one) for n, one in known if type(one) in _PLAIN and not one.is_inference()]
        self._step += 1
        part = self._part([tensor.nbytes for _, tensor in pairs])
        noted: list[_Noted] = []
        for i, (name, tensor) in enumerate(pairs):
            bits = self._bits(tensor, part) if (i + part.number) % part.of_tensors == 0 else None
            # Weak, as a tensor that nothing else needs may go before backward.
            weak, storage = weakref.ref(tensor), tensor.untyped_storage()._cdata
            noted.append(_Noted(name, weak, tensor._version, storage, bits))
        return part, noted

    def _part(self, sizes: Sequence[int]) -> _Sample:
        us = sum(sizes) / BYTES_A_US + _TENSOR_US * len(sizes)
        if self._step <= WHOLE_STEPS or us <= self._allowed_us:
            return _Sample(1, 1, self._step)
        most = max(1.0, self._allowed_us / 2 / _TENSOR_US)
        of_tensors = max(1, math.ceil(len(sizes) / most))
        lines = self._allowed_us / 2 * BYTES_A_US / LINE_BYTES
        return _Sample(of_tensors, max(1, int(sum(sizes) / of_tensors / 8 / lines)), self._step)

    def _bits(self, tensor: Tensor, part: _Sample) -> _Bits:
        """None where the bits cannot be read, or not at little cost."""
        if not tensor.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return None
        if not tensor.is_cpu:
            # Reading a sum back makes the host wait for the device.
            return _added_on_device(tensor) if part.number <= WHOLE_STEPS else None
        key = tensor.data_ptr(), tensor.nbytes
        if (words := self._words.get(key)) is None:
            if not all(key):  # empty, or without memory
                return None
            if len(self._words) > 2 * len(self.places):  # each batch may lie elsewhere
                self._words.clear()
            words = self._words[key] = _words_at(*key)
        if tensor.nbytes <= _FEW_BYTES:
            return words.tobytes()
        if part.of_words > 1:
            words = words[part.number % part.of_words :: part.of_words]  # others at each step
        return int(np.add.reduce(words))

    def require(self, noted: tuple[_Sample, list[_Noted]], kind: str) -> None:
        part, tensors = noted
        for one in tensors:
            if (tensor := one.tensor()) is not None and not self._is_same(tensor, one, part):
                raise RewriteError(
                    f"change {one.name} after backward, or give the step a copy, clone(): it was "
                    f"changed between forward and backward of the rewritten {kind}, which "
                    "recomputes values from it"
                )

    def _is_same(self, tensor: Tensor, one: _Noted, part: _Sample) -> bool:
        if tensor._version != one.version:
            return False
        if one.bits is not None:
            return self._bits(tensor, part) == one.bits
        # Elsewhere its bits are unknown. FSDP frees and gathers the same one anew.
        return tensor.untyped_storage()._cdata == one.storage


def _added_on_device(tensor: Tensor) -> _Bits:
    if tensor.is_meta or not tensor.numel():
        return None
    whole = tensor.detach().as_strided((tensor.numel(),), (1,))  # dense: its memory is one range
    return int(whole.view(torch.uint8).sum(dtype=torch.int64))


def _words_at(address: int, n_bytes: int) -> _Words:
    """The memory as whole numbers, to be read only while a tensor is known to lie there."""
    # The widest words that fill it, as they are added up the quickest.
    kind = next(kind for kind in _KINDS if not n_bytes % np.dtype(kind).itemsize)
    memory: Any = (ctypes.c_char * n_bytes).from_address(address)
    return np.frombuffer(memory, dtype=kind)


def first_other_identity(
    leaves: Sequence[Any], as_captured: Sequence[int], counts: Callable[[int], bool]
) -> tuple[int, int] | None:
    """The first leaf that is another one's tensor and was not, or the reverse; and that other one.

    `as_captured`: the first leaf of the same tensor, by leaf. `counts`: whether it matters.
    """
    for i, (was, now) in enumerate(zip(as_captured, first_places(leaves), strict=True)):
        if was == now:
            continue
        if was != i:
            return i, was
        if leaves[i].requires_grad or counts(i) or counts(now):  # one gradient, the sum of both
            return i, now
    return None


def first_shared(
    inputs: Sequence[Any], written: Sequence[int], n_state: int
) -> tuple[int, int] | None:
    """Places of a written input and of one that shares it; the first `n_state` are the module's."""
    of_written = {_memory(inputs[i]): i for i in written}
    is_batch_written = any(i >= n_state for i in written)  # only the batch is another one
    for i in range(0 if is_batch_written else n_state, len(inputs)):
        one, other = inputs[i], of_written.get(_memory(inputs[i]), i)
        if other != i and one is not inputs[other] and n_state <= max(i, other):
            return other, i
    return None


def _memory(value: Any) -> int:
    # What has no storage gets a number of its own.
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return -id(value)
    return value.untyped_storage().data_ptr() or -id(value)
