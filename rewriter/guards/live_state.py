"""Parameters and buffers as a module holds them now, read without walking it at every step.

Walking a module with `named_parameters` takes as long as fifty small ops. Places are read directly.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from remat.graph_capture.errors import StateChangedError

_Slot = tuple[str, nn.Module, str]  # path, module, name


def named_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, then buffers, in the order of a trace; shared ones under every name."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


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
        if any(tensor is not None for tensor in empty) or any(tensor is None for tensor in state):
            return None
        return state  # pyright: ignore[reportReturnType]


def _slots(model: nn.Module, table: str) -> tuple[list[_Slot], list[_Slot]]:
    filled: list[_Slot] = []
    empty: list[_Slot] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in getattr(module, table).items():
            slot = (f"{path}.{name}".lstrip("."), module, name)
            (empty if tensor is None else filled).append(slot)
    return filled, empty


def _children(module: nn.Module) -> tuple[Any, ...]:
    return tuple(module._modules.values())


def _held(module: nn.Module) -> tuple[str, ...]:
    return (*module._parameters, *module._buffers)


_Versions = list[tuple[int, int]]
"""How often each parameter and its part on this rank were written to."""


class UnshardedParameters:
    """Notices parameters that FSDP2 left whole after backward, and that an optimizer changed."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._kept: list[tuple[Any, _Versions]] = []

    def require_fresh(self, module: nn.Module) -> None:
        self._groups = _groups_of(module)
        # With set_reshard_after_backward(False) the next forward gathers nothing, which is meant
        # for batches whose gradients are summed. Over an optimizer's step, which changes the
        # shards, it would go on with the old parameters. Every rank has the same flags and updates:
        # all raise, or none.
        for group, versions in self._kept:
            if _versions(group) != versions:
                raise StateChangedError(
                    f"set_reshard_after_backward(False) left the parameters of "
                    f"{type(module).__name__} whole while their shards were updated, so forward "
                    "would run on those from before: call set_reshard_after_backward(True) before "
                    "the last backward of each optimizer step"
                )

    def note_backward(self) -> None:
        kept = [group for group in self._groups if not group.reshard_after_backward]
        self._kept = [(group, _versions(group)) for group in kept]

    def note_sharded(self) -> None:
        # Schedules of pipelines leave groups whole in each backward, and shard them at the end of a
        # step: the next forward gathers those anew.
        self._kept = [(group, versions) for group, versions in self._kept if not group.is_sharded]


def _groups_of(module: nn.Module) -> list[Any]:
    state_of = getattr(module, "_get_fsdp_state", None)
    if state_of is None:
        return []
    state = state_of()
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; one before
    found = [state._fsdp_param_group] if several is None else several
    return [group for group in found if group is not None]


def _versions(group: Any) -> _Versions:
    parameters = [one.sharded_param for one in group.fsdp_params]
    return [(p._version, p._local_tensor._version) for p in parameters]
