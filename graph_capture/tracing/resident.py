"""Bytes that live through the whole step, whatever the schedule: `Resident` of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from torch import Tensor, nn

from remat.graph_capture.devices.known_devices import Allocated, allocator_rounding
from remat.graph_capture.distributed.dtensors import is_distributed, local_part
from remat.graph_capture.distributed.sharding import MASTER_BYTES, NO_SHARDING, Sharding
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Optimizer, Resident
from remat.graph_capture.torch_private.core import pytree

# Buffers as large as the parameter that an optimizer keeps.
_STATES_PER_PARAMETER = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2, "adamw-fused": 2}
_ADAMW_STEP_BYTES = 4  # of the step counter, one a parameter


def require_optimizer(optimizer: object) -> None:
    given = f"give the optimizer by name, not as a {type(optimizer).__name__}"
    if isinstance(optimizer, str):
        if optimizer in _STATES_PER_PARAMETER:
            return
        given = f"unknown optimizer {optimizer!r}"
    raise CaptureError(
        f"{given}: choose one of {', '.join(_STATES_PER_PARAMETER)} by what it keeps for a "
        "parameter: momentum one tensor, as Lion and RMSprop do, adamw two, as Adam does; on CUDA "
        "adamw takes one more while it steps, and adamw-fused, made with fused=True, does not"
    )


def resident_bytes(
    model: nn.Module, batch: Any, *, optimizer: Optimizer, accumulate: bool,
    allocated: Allocated = int, sharding: Sharding = NO_SHARDING, is_on_host: bool = False,
) -> Resident:  # fmt: skip
    """Of one rank; a storage shared by two tensors counts once. `accumulate`: gradient buffers
    exist before the step, as they do without `gradient_sync`. `is_on_host`: parameters,
    gradients and state are there."""
    require_optimizer(optimizer)
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    trained_bytes = sum(allocated(_own_bytes(p, sharding)) for p in trained)
    seen: set[int] = set()
    is_held_otherwise = sharding.kind in ("fsdp2", "replicate")  # see `distributed/sharded_step.py`
    parameters_bytes = (
        sum(allocated(_own_bytes(p, sharding)) for p in parameters)
        if is_held_otherwise
        else storage_bytes(parameters, seen, allocated)
    )
    # By default torch updates tensors on CUDA all at once (foreach), and DTensors one by one.
    is_one_by_one = is_held_otherwise or any(map(is_distributed, parameters))
    roots_bytes = 0 if is_one_by_one else _state_bytes(parameters, "momentum", sharding, allocated)
    resident = Resident(
        parameters_bytes,
        buffers_bytes=storage_bytes(model.buffers(), seen, allocated),
        batch_bytes=storage_bytes(pytree.tree_leaves(batch), seen, allocated),
        # Gradients that are views of DDP's buckets count once, as communication.
        gradients_bytes=_gradients_bytes(trained, trained_bytes, accumulate, sharding, allocated),
        optimizer_bytes=_state_bytes(parameters, optimizer, sharding, allocated),
        communication_bytes=trained_bytes if sharding.has_buckets else 0,
        update_bytes=roots_bytes if optimizer == "adamw" else 0,  # of second moments
    )
    if not is_on_host:
        return resident
    on_host = "parameters", "gradients", "optimizer", "update"
    return replace(resident, **dict.fromkeys(map("{}_bytes".format, on_host), 0))


def _gradients_bytes(
    trained: Sequence[Tensor], own_bytes: int, accumulate: bool, sharding: Sharding,
    allocated: Allocated,
) -> int:  # fmt: skip
    if not sharding.gradient_sync:
        each = (p.numel() * sharding.summed_bytes(str(p.dtype)) for p in map(local_part, trained))
        return sum(map(allocated, each))
    return own_bytes if accumulate and not sharding.bucket_views else 0


def resident_of_batch(resident: Resident, batch: Any, device: str) -> Resident:
    batch_bytes = storage_bytes(pytree.tree_leaves(batch), allocated=allocator_rounding(device))
    return replace(resident, batch_bytes=batch_bytes)


def _own_bytes(parameter: Tensor, sharding: Sharding) -> int:
    elements = sharding.shard_elements(local_part(parameter).shape)
    return elements * _held_bytes(parameter, sharding)


def _held_bytes(parameter: Tensor, sharding: Sharding) -> int:
    # A policy casts from float32, which is what a rank holds between steps.
    is_cast = sharding.param_dtype and parameter.is_floating_point()
    return MASTER_BYTES if is_cast else parameter.element_size()


def _state_bytes(
    parameters: Sequence[Tensor], optimizer: Optimizer, sharding: Sharding, allocated: Allocated
) -> int:
    # Of ranks that hold unlike amounts, the one that holds most counts.
    n_ranks = (sharding.states_over or sharding.world_size) if sharding.kind == "zero1" else 1
    most = 0
    for own in _dealt_out(parameters, n_ranks):
        trained = [local_part(p) for p in own if p.requires_grad]
        sizes = [sharding.state_elements(p.shape) * _held_bytes(p, sharding) for p in trained]
        state_bytes = _STATES_PER_PARAMETER[optimizer] * sum(map(allocated, sizes))
        if optimizer in ("adamw", "adamw-fused"):
            state_bytes += allocated(_ADAMW_STEP_BYTES) * len(trained)
        most = max(most, state_bytes)
    return most


def _dealt_out(parameters: Sequence[Tensor], n_ranks: int) -> list[list[Tensor]]:
    ranks: list[list[Tensor]] = [[] for _ in range(n_ranks)]
    elements = [0] * n_ranks
    # As `_partition_parameters` of torch 2.13: the largest first, to the first rank with fewest.
    for parameter in sorted(parameters, key=lambda p: p.numel(), reverse=True):
        rank = elements.index(min(elements))
        ranks[rank].append(parameter)
        elements[rank] += parameter.numel()
    return ranks


def storage_bytes(
    tensors: Iterable[Any], seen: set[int] | None = None, allocated: Allocated = int
) -> int:
    """Bytes of the storages on this rank, each counted once; new ones are added to `seen`."""
    seen = set() if seen is None else seen
    total = 0
    for tensor in (one for one in tensors if isinstance(one, Tensor)):
        storage = local_part(tensor).untyped_storage()  # of a DTensor, only its part is here
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += allocated(storage.nbytes())
    return total


_Slot = tuple[nn.Module, str]  # a place that holds a parameter: the module, and the name in it


class _Shared(dict[str, Any]):
    """A module's parameters; those that another slot holds first are found, but not listed."""

    def __init__(self, own: dict[str, Any], elsewhere: dict[str, _Slot]) -> None:
        super().__init__({name: held for name, held in own.items() if name not in elsewhere})
        self.elsewhere = elsewhere

    def __contains__(self, name: object) -> bool:
        return name in self.elsewhere or super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        if name not in self.elsewhere:
            return super().__getitem__(name)
        module, first = self.elsewhere[name]
        return module._parameters[first]


@contextlib.contextmanager
def tied_as_one(model: nn.Module) -> Generator[None]:
    """List each parameter under its first name alone; it is still found under the others."""
    # As several inputs, autograd would add their gradients after backward. Eager adds them
    # meanwhile: the order of three changes the last bits. A guard holds that they are still tied.
    before = [(module, module._parameters) for module in model.modules()]
    elsewhere: dict[nn.Module, dict[str, _Slot]] = {}
    for (module, name), first in _later_slots(model).items():
        elsewhere.setdefault(module, {})[name] = first
    try:
        for module, slots in elsewhere.items():
            module.__dict__["_parameters"] = _Shared(module._parameters, slots)
        yield
    finally:
        for module, held in before:
            module.__dict__["_parameters"] = held


def _slots(model: nn.Module) -> list[_Slot]:
    """In the order of ``named_parameters``; a shared parameter each time."""
    return [
        (module, name)
        for _, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _later_slots(model: nn.Module) -> dict[_Slot, _Slot]:
    """Every slot of a parameter but its first, with that first one."""
    firsts: dict[int, _Slot] = {}
    pairs = {s: firsts.setdefault(id(s[0]._parameters[s[1]]), s) for s in _slots(model)}
    return {slot: first for slot, first in pairs.items() if first != slot}


def tied_places(model: nn.Module) -> dict[int, int]:
    """Of ``named_parameters(remove_duplicate=False)``, each with the place of its first name."""
    slots = _slots(model)
    later = _later_slots(model)
    place = {slot: i for i, slot in reversed(list(enumerate(slots)))}  # the first place counts
    return {i: place[later[slot]] for i, slot in enumerate(slots) if slot in later}
