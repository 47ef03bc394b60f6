"""DTensors: parameters of which a rank holds a part, as `parallelize_module` makes them.

AOTAutograd traces the ops on local parts, the collectives among them. It gives a DTensor to the
graph as two inputs, the local part and the mesh, and takes a gradient back as two results. The mesh
is no tensor, and no op reads it. So the local part is described as the parameter here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from remat.graph_capture.errors import CaptureError

_LOCAL = "_local_tensor"
"""The attribute of a DTensor that holds this rank's part."""
_FSDP = "FSDPModule"


def is_distributed(tensor: object) -> bool:
    # Told by the name, as importing the class takes long.
    return type(tensor).__name__ == "DTensor"


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


def describe_parts(gm: fx.GraphModule) -> None:
    """Describe local parts in a joint graph as the DTensors that they are of."""
    # A mesh keeps the description of a part: `is_beside_local_part` knows it by that.
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["desc"] = _of_whole(node.meta.get("desc"))
    end = gm.graph.output_node()
    for what in end.meta["desc"]:
        if hasattr(getattr(what, "base", None), "mutated_input"):
            raise CaptureError(
                f"forward writes to {what.base.mutated_input.expr()}, a DTensor: write to its "
                "local part outside forward, before or after the step"
            )
    end.meta["desc"] = [_of_whole(what) for what in end.meta["desc"]]


def is_beside_local_part(description: object) -> bool:
    """Whether it is of the mesh that an input or a result has beside its local part."""
    return hasattr(description, "base") and getattr(description, "attr", _LOCAL) != _LOCAL


def is_mesh(node: fx.Node) -> bool:
    """As one that is cut out of another: no op runs for it."""
    value: Any = node.meta.get("val")
    real = getattr(value, "real_obj", value)
    return type(real).__name__ == "DeviceMesh"


def _of_whole(description: Any) -> Any:
    is_local = getattr(description, "attr", "") == _LOCAL
    return description.base if is_local else description
