"""Parameters as ranks hold them: parts of DTensors, and in the dtype of a policy of FSDP2.

AOTAutograd gives a DTensor to the graph as its local part and a mesh, and takes a gradient back as
two results. No op reads the mesh, so the local part is described as the parameter here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from remat.graph_capture.distributed.sharding import Sharding
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.torch_private.core import pytree

_LOCAL = "_local_tensor"  # the attribute of a DTensor that holds this rank's part
_FSDP = "FSDPModule"


def is_distributed(tensor: object) -> bool:
    return type(tensor).__name__ == "DTensor"  # told by the name, as importing the class takes long


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return getattr(tensor, _LOCAL) if is_distributed(tensor) else tensor


def dtensor_layout(tensor: Any) -> Any:
    """Where the parts of a DTensor are: its mesh and its placements; None for other tensors."""
    return (tensor.device_mesh, tensor.placements) if is_distributed(tensor) else None


def has_dtensors(model: nn.Module) -> bool:
    return any(map(is_distributed, model.parameters()))


def is_sharded_by_fsdp(model: nn.Module) -> bool:
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return _FSDP in kinds


_STATES = ("FSDPState", "_ReplicateState", "ReplicateState")


def parameter_groups_of(module: nn.Module) -> list[Any]:
    """Of parameters that FSDP2 gathers together."""
    return parameter_groups_in(sharded_state_of(module))


def parameter_groups_in(state: Any) -> list[Any]:
    if state is None:
        return []
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; one before
    found = [state._fsdp_param_group] if several is None else several
    return [group for group in found if group is not None]


def sharded_state_of(module: nn.Module) -> Any:
    if (state_of := getattr(module, "_get_fsdp_state", None)) is not None:
        return state_of()
    # A schedule for one of several sizes shares its hooks with the module that is sharded.
    owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    return next((one for one in owners if type(one).__name__ in _STATES), None)


def describe_parts(gm: fx.GraphModule) -> None:
    """Describe local parts in a joint graph as the DTensors that they are of."""
    for node in gm.graph.find_nodes(op="placeholder"):  # `is_beside_local_part` needs it on a mesh
        node.meta["desc"] = _of_whole(node.meta.get("desc"))
    end = gm.graph.output_node()
    for what in end.meta["desc"]:
        if hasattr(getattr(what, "base", None), "mutated_input"):
            raise CaptureError(
                "write to its local part outside forward, before or after the step: forward "
                f"writes to {what.base.mutated_input.expr()}, a DTensor"
            )
    end.meta["desc"] = [_of_whole(what) for what in end.meta["desc"]]


def is_beside_local_part(description: object) -> bool:
    """Whether it is of the mesh that an input or a result has beside its local part."""
    return hasattr(description, "base") and getattr(description, "attr", _LOCAL) != _LOCAL


def is_mesh(node: fx.Node) -> bool:
    """As one that is cut out of another: no op runs for it."""
    value: Any = node.meta.get("val")
    return type(getattr(value, "real_obj", value)).__name__ == "DeviceMesh"


def _of_whole(description: Any) -> Any:
    is_local = getattr(description, "attr", "") == _LOCAL
    return description.base if is_local else description


# With mixed precision `fully_shard` keeps float32 parameters and casts what it gathers and what is
# put in. So a plan is made of the cast model, which then gets its parameters back.

_MASTER = torch.float32  # what parameters are held in that a policy casts


@contextlib.contextmanager
def parameters_cast(model: nn.Module, sharding: Sharding) -> Generator[None]:
    """Within the block, parameters have the policy's dtype; afterwards they are as before."""
    if not sharding.param_dtype or sharded_state_of(model) is not None:  # cast where it is called
        yield
        return
    dtype = _dtype(sharding.param_dtype)
    # Buffers keep their dtype, as under `fully_shard`.
    floats = (p for p in model.parameters() if p.is_floating_point())
    held = [(p, p.data) for p in floats if not is_distributed(p)]
    own = [(m, *pair) for m in model.modules() for pair in m._parameters.items()]
    split = [(m, name, p) for m, name, p in own if p is not None and is_distributed(p)]
    for path, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != _MASTER:
            raise CaptureError(
                "call model.float() first, or leave out param_dtype here and in the policy: "
                f"parameter {path} is {_short(parameter.dtype)}, and a plan with "
                f"param_dtype={sharding.param_dtype} needs parameters in {_short(_MASTER)}"
            )
    try:
        for parameter, data in held:
            parameter.data = data.to(dtype)
        for module, name, parameter in split:  # as a DTensor's data cannot be set
            data = parameter.detach().to(dtype)
            module._parameters[name] = nn.Parameter(data, parameter.requires_grad)
        yield
    finally:
        for module, name, parameter in split:
            module._parameters[name] = parameter
        for parameter, data in held:
            parameter.data = data


def inputs_cast(
    args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, sharding: Sharding
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the model as the policy casts them: floating point tensors alone."""
    if not sharding.param_dtype:
        return args, dict(kwargs or {})
    return _floats_to(_dtype(sharding.param_dtype), args, kwargs)


def before_cast(
    args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, sharding: Sharding
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that a policy has cast, as the caller still holds them."""
    if not sharding.param_dtype:
        return args, dict(kwargs or {})
    return _floats_to(_MASTER, args, kwargs)


def _floats_to(
    dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return pytree.tree_map(cast, (args, dict(kwargs or {})))


def refuse_floats_cast(args: Any, kwargs: Any, sharding: Sharding) -> None:
    """Refuse, over a range of sizes, a batch that is there twice: as passed, and as cast."""
    leaves = pytree.tree_leaves((args, kwargs))
    if sharding.param_dtype and any(
        isinstance(x, Tensor) and x.is_floating_point() for x in leaves
    ):
        raise CaptureError(
            f"pass floating point inputs in {sharding.param_dtype} and leave out param_dtype, or "
            "leave out dynamic: the policy casts them, and over a range of sizes a plan counts "
            "one copy of the batch"
        )


def require_cast(path: str, dtypes: Mapping[str, torch.dtype], sharding: Sharding) -> None:
    """Raise `CaptureError` for an argument that the policy would cast where block `path` begins."""
    if not sharding.param_dtype:
        return
    dtype = _dtype(sharding.param_dtype)
    for name, found in dtypes.items():
        if found.is_floating_point and found != dtype:
            raise CaptureError(
                f"cast it in the model before the block: block {path} takes {name} in "
                f"{_short(found)}, which fully_shard would cast to {sharding.param_dtype}, so the "
                "plan would be for the wrong dtype"
            )


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
