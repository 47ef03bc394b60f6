"""What a step or its forward leaves, of eager and of a plan, and the state that is put back."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.devices.meter import Run
from remat.graph_capture.distributed.dtensors import dtensor_layout, is_distributed, local_part
from remat.graph_capture.errors import NotComparedError
from remat.graph_capture.joint.nodes import bits_of
from remat.graph_capture.joint.provenance import path_in_model
from remat.graph_capture.python_state.state_guards import PythonState
from remat.graph_capture.python_state.state_slots import ClosureCell, DictItem, SlotAttr, stream
from remat.graph_capture.python_state.tensor_attributes import with_attributes_of
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.left_out import used_alone
from remat.graph_capture.tracing.outputs import flatten_dataclasses
from remat.graph_capture.tracing.restore import OF_TORCH, ModuleAttributes, streams
from remat.graph_capture.tracing.signature import leaves_with_paths
from remat.graph_capture.tracing.step_module import apply_loss
from remat.rewriter.checking.comparison import Outcome, bitwise_equal
from remat.rewriter.checking.off_device import OffDeviceMemory, Read, takes_no_hooks
from remat.rewriter.compiled import CompiledStep
from remat.rewriter.graphs.rng import save_rng_state, set_rng_state
from remat.rewriter.guards.forward import Guards, constants_of, is_plain

STREAM = "random stream"
_Measure = TypeVar("_Measure")


class OwnBatch:
    """A batch for each run: the user's tensors, cut off from the graphs that made them."""

    def __init__(self, batch: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(batch)
        own: dict[int, Tensor] = {}  # the storages stay the user's: copies would count in the peak
        self.leaves = [_cut_off(leaf, own) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._asked = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]

    def __call__(self) -> Any:
        for leaf, asked in zip(self.leaves, self._asked, strict=True):
            if isinstance(leaf, Tensor) and leaf.requires_grad is not asked:
                # Forward may have written what has a history to it.
                (leaf.detach_() if leaf.grad_fn else leaf).requires_grad_(asked)
        return pytree.tree_unflatten(self.leaves, self._spec)  # anew: forward may take it apart


def _cut_off(tensor: Tensor, own: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in own:  # a tensor that is given twice stays one
        with torch.inference_mode(False):
            # Autograd saves no tensor of inference mode.
            cut = (tensor.clone() if tensor.is_inference() else tensor).detach()
            own[id(tensor)] = with_attributes_of(tensor, cut.requires_grad_(tensor.requires_grad))
    return own[id(tensor)]


@contextlib.contextmanager
def own_parameters(*models: nn.Module) -> Generator[None]:
    """Other parameters over the same storages meanwhile: without hooks, and without gradients."""
    made: dict[int, nn.Parameter] = {}  # no hook runs then, and no gradient is added to
    tables = {id(m._parameters): m._parameters for model in models for m in model.modules()}
    places = [
        (held, name, parameter)
        for held in tables.values()
        for name, parameter in held.items()
        if parameter is not None
        if type(parameter) is nn.Parameter or is_distributed(parameter)
    ]
    try:
        for held, name, parameter in places:
            if id(parameter) not in made:
                other = nn.Parameter(parameter.detach(), parameter.requires_grad)
                made[id(parameter)] = with_attributes_of(parameter, other)
            held[name] = made[id(parameter)]
        yield
    finally:
        for held, name, parameter in places:
            held[name] = parameter


class StepState:
    """The state as it was; `keep_parameters`: forward writes to them, as momentum encoders do."""

    def __init__(
        self, model: nn.Module, batch: Any, device: str, python_state: PythonState | None = None, *,
        keep_parameters: bool = False, elsewhere: OffDeviceMemory | None = None,
    ) -> None:  # fmt: skip
        self.elsewhere = elsewhere
        self.model, self.python_state = model, python_state
        self.attributes = ModuleAttributes(model)
        self.batch = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
        self.buffers = dict(model.named_buffers())
        inputs = ((f"input {i}", t) for i, t in enumerate(self.batch) if t.is_leaf)
        named = (*model.named_parameters(), *inputs)
        self.leaves = {name: tensor for name, tensor in named if tensor.requires_grad}
        parameters = model.parameters() if keep_parameters else ()
        tensors = [*self.buffers.values(), *self.batch, *parameters]
        keep = elsewhere.keep if elsewhere else _in_memory
        self.before = [(t, keep(t)) for t in (local_part(one.detach()) for one in tensors)]
        self.gradients = {name: leaf.grad for name, leaf in self.leaves.items()}
        self.streams = {name: save_rng_state(name) for name in dict.fromkeys((CPU, device))}
        self._others = random.getstate(), np.random.get_state()

    @contextlib.contextmanager
    def put_back(self) -> Generator[None]:
        try:
            yield
        finally:
            self.reset()
            for name, leaf in self.leaves.items():
                leaf.grad = self.gradients[name]

    def reset(self) -> None:
        torch.clear_autocast_cache()  # or a run would find what the one before it has cast
        with torch.no_grad():
            for tensor, read in self.before:
                if not torch.equal(tensor, value := read()):
                    tensor.copy_(value)
                del value
        for device, state in self.streams.items():
            set_rng_state(state, device)
        random.setstate(self._others[0])
        np.random.set_state(self._others[1])
        for leaf in self.leaves.values():
            leaf.grad = None
        self.attributes.restore()
        if self.python_state is not None:
            self.python_state.restore()

    def prepared(self, run: Callable[[], _Measure], accumulate: bool) -> _Measure:
        self.reset()
        if accumulate:
            for leaf in self.leaves.values():
                leaf.grad = torch.zeros_like(leaf)
        return run()

    def outcome(self, run: Run) -> Outcome:
        self.reset()
        found: MutableMapping[str, Any] = self.elsewhere.outcome() if self.elsewhere else {}
        copy = self.elsewhere is None  # else `found` copies what it is given
        for path, leaf in leaves_with_paths(flatten_dataclasses(run())):
            found[f"output{pytree.keystr(path)}"] = _kept(leaf, copy)
        for name, leaf in self.leaves.items():
            found[f"gradient of {name}"] = _kept(leaf.grad, False)
            if is_distributed(leaf):
                found[f"placements of the gradient of {name}"] = str(dtensor_layout(leaf.grad))
            if self.elsewhere:
                leaf.grad = None  # it would be there beside those that are compared
        for name, buffer in self.buffers.items():
            found[f"buffer {name}"] = _kept(buffer, copy)
        for written in self.attributes.written():
            for path, leaf in leaves_with_paths(written.value):
                if isinstance(leaf, Tensor):
                    found[f"attribute {written.text}{pytree.keystr(path)}"] = _kept(leaf, copy)
        for device in self.streams:
            found[_stream_of(device)] = save_rng_state(device)
        found.update({f"{STREAM} of {name}": state for name, state in streams().items()})
        return found


def _stream_of(device: str) -> str:
    return STREAM if device == CPU else f"{STREAM} of {device}"


def _in_memory(tensor: Tensor) -> Read:
    copy = tensor.clone()
    return lambda: copy


def _kept(leaf: Any, copy: bool) -> Any:
    # On the host, so that outcomes take no room on a device.
    return local_part(leaf.detach()).to(CPU, copy=copy) if isinstance(leaf, Tensor) else leaf


class BeforeForward:
    """What forward may write, to be put back: `written`; it only reads `others`."""

    def __init__(self, guards: Guards, written: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        model = guards.step
        self.attributes = ModuleAttributes(model, but=OF_TORCH - {"training"})
        self._state = guards.python_state
        places = [*self._state.places, *(one.place for one in guards.initialised)]
        self._places = [(place, place.now()) for place in places]
        distinct = {id(tensor): tensor for tensor in written}
        parts = [local_part(tensor.detach()) for tensor in distinct.values()]
        self._tensors = [(tensor, tensor.clone()) for tensor in parts]
        # Tensors of inference mode have no version.
        read = {id(t): t for t in others if id(t) not in distinct and not t.is_inference()}
        self._versions = [(tensor, tensor._version) for tensor in read.values()]
        self._streams = {name: save_rng_state(name) for name in (CPU, device_of_model(model))}
        self.devices = tuple(self._streams)
        self._others = random.getstate(), np.random.get_state()
        self._own = [stream(one.text, one.owner) for one in self._state.streams]

    def written_else(self) -> list[str]:
        moved = [tensor for tensor, version in self._versions if tensor._version != version]
        return [f"tensor of shape {list(tensor.shape)}" for tensor in moved]

    def forget(self) -> None:
        self._tensors, self._streams = [], {}

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, before in self._tensors:
                if not bitwise_equal(tensor, before):  # a write would raise the version for nothing
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
            is_kept = isinstance(place, (DictItem, ClosureCell, SlotAttr))
            if not is_kept or place.now() is not before:
                place.put(before)
        for _, space, names in self._state.watched:
            for name in space.keys() & names:
                del space[name]
        for one in filter(None, self._own):
            one.put_back()


def device_of_model(model: nn.Module) -> str:
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return CPU if tensor is None else str(tensor.device)


HASH_BLOCK_BYTES = 1 << 16  # of a tensor that is not contiguous, so much is copied at a time


def fingerprint(tensor: Tensor) -> str:
    found = hashlib.blake2b(digest_size=16)  # J.-P. Aumasson et al., BLAKE2, 2013: needs no copy
    for block in _blocks(tensor.detach()):
        found.update(bits_of(block).cpu().numpy().data)
    return f"{tensor.dtype} {list(tensor.shape)} {found.hexdigest()}"


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    is_whole = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if is_whole or tensor.nbytes <= HASH_BLOCK_BYTES:
        yield tensor
        return
    for part in tensor.unbind(0):  # a contiguous copy of the whole may have no room
        yield from _blocks(part)


class ForwardOutcomes:
    """Forwards of one planned module and of the model that it was made of."""

    def __init__(self, guards: Guards, step: CompiledStep) -> None:
        self._guards, self._step = guards, step

    @property
    def kept_bytes(self) -> int:
        facts = self._step.gradients
        batch_bytes = self._step.graph.resident.batch_bytes if facts.writes_batch else 0
        return batch_bytes + sum(tensor.nbytes for tensor in self._written())

    @property
    def results_bytes(self) -> int:
        made = set(self._step.graph.forward_outputs)
        return sum(value.size_bytes for value in self._step.graph.values if value.name in made)

    def before(self, leaves: list[Any]) -> BeforeForward:
        batch = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        written = [*self._written(), *(batch if self._step.gradients.writes_batch else ())]
        return BeforeForward(self._guards, written, [*(self._guards.live.read() or ()), *batch])

    def _written(self) -> list[Tensor]:
        guards, paths = self._guards, self._step.gradients.written.values()
        state = zip(guards.live.names, guards.live.read() or (), strict=False)
        own = [tensor for name, tensor in state if path_in_model(name) in paths]
        return [*own, *constants_of(self._step.forward)]

    def of_eager(self, before: BeforeForward, leaves: list[Any], keeps_values: bool) -> Outcome:
        try:
            found = self.left(before, leaves, self._run(leaves), keeps_values)
            # The planned forward gives nothing of that name, so such a write is a difference.
            return found | dict.fromkeys(before.written_else(), "in place")
        except RuntimeError as error:
            if takes_no_hooks(error):
                raise NotComparedError("code of the model takes no saved tensor hooks") from error
            raise
        finally:
            before.put_back()

    def left(
        self, before: BeforeForward, leaves: list[Any], output: Any, keeps_values: bool
    ) -> dict[str, Any]:
        keep = _value if keeps_values else _bits
        found = {f"output{at}": keep(leaf) for at, leaf in _by_path(flatten_dataclasses(output))}
        for name, buffer in self._guards.step.named_buffers():
            found[f"buffer {name}"] = keep(buffer)
        names = self._guards.recipe.signature.names
        if self._step.gradients.writes_batch:
            found |= {f"input {n}": keep(t) for n, t in zip(names, leaves, strict=True)}
        for written in before.attributes.written():
            for at, leaf in _by_path(written.value):
                found[f"attribute {written.text}{at}"] = keep(leaf)
        for device in before.devices:
            found[_stream_of(device)] = _bits(save_rng_state(device))
        return found

    def _run(self, leaves: list[Any]) -> Any:
        if self._step.gradients.writes_batch:  # what is written would keep this forward's history
            leaves = OwnBatch(leaves).leaves
        args, kwargs, target = self._guards.batches.tree(leaves)
        with _nothing_saved(), _no_casts_kept():
            recipe = self._guards.recipe
            output = used_alone(self._guards.model.forward(*args, **kwargs), recipe.outputs)
            return apply_loss(recipe.loss_fn, output, target)


def _by_path(tree: Any) -> list[tuple[str, Any]]:
    return [(pytree.keystr(path), leaf) for path, leaf in leaves_with_paths(tree)]


def _bits(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return f"{type(leaf).__name__} {leaf!r}"
    own = local_part(leaf.detach())
    # A sparse tensor's bits cannot be read one after the other.
    return fingerprint(own) if is_plain(own) else f"{type(own).__name__} {list(own.shape)}"


def _value(leaf: Any) -> Any:
    return _kept(leaf, True) if isinstance(leaf, Tensor) else _bits(leaf)


@contextlib.contextmanager
def _nothing_saved() -> Generator[None]:
    """Let autograd record, as the kernels depend on it, and save nothing for a backward."""

    def wanted(_: object) -> NoReturn:
        raise NotComparedError("forward runs a backward of its own, which reads saved tensors")

    with saved_tensors_hooks(lambda _: None, wanted):
        yield


@contextlib.contextmanager
def _no_casts_kept() -> Generator[None]:
    before = torch.is_autocast_cache_enabled()  # the planned forward must find no foreign cast
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
