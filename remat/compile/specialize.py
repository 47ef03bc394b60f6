"""What a graph of dynamo's is planned for: one shape, and one device.

A plan is for one shape: where dynamo has a symbol, each size gets a copy with numbers (`numbered`).
DDP's subgraphs are planned before any runs, so they are fixed while dynamo compiles
(`specialized`): asking a symbol's value notes a guard.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from remat.graph_capture.devices.known_devices import CPU, is_cuda
from remat.graph_capture.devices.placement import device_holding, meter_of
from remat.graph_capture.errors import CaptureError, DeviceError
from remat.graph_capture.joint.nodes import copy_of, storage_key
from remat.graph_capture.torch_private.aot import dynamo_config
from remat.graph_capture.torch_private.core import FakeTensor, FakeTensorMode, pytree
from remat.rewriter.inductor.fused_nodes import data_dependent_message
from remat.rewriter.inductor.kernel_costs import for_real

_EXAMPLE = "example_value"  # key of a node's `meta` for what dynamo traced the node with
_SIZED = (Tensor, torch.SymInt)


def has_symbols(gm: fx.GraphModule) -> bool:
    placeholders = gm.graph.find_nodes(op="placeholder")
    return any(_is_symbolic(node.meta.get(_EXAMPLE)) for node in placeholders)


def symbols_of(gm: fx.GraphModule) -> dict[int, str]:
    """What is a symbol, such as ``dimension 1 of tokens``, by the number of its input."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    named: dict[str, str] = {}
    for node in placeholders:
        value = node.meta.get(_EXAMPLE)
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            named.setdefault(str(size), f"dimension {dim} of {_name_of_input(node)}")
    values = [node.meta.get(_EXAMPLE) for node in placeholders]
    return {
        i: named.get(str(value), f"the number {_name_of_input(placeholders[i])}")
        for i, value in enumerate(values)
        if isinstance(value, torch.SymInt) or _items_of(placeholders[i])
    }


def _items_of(node: fx.Node) -> list[fx.Node]:
    """Where a float of Python's is read, which dynamo passes as a tensor of no dimension."""
    return [
        user
        for user in node.users
        if (user.op, user.target) == ("call_method", "item")
        and isinstance(value := user.meta.get(_EXAMPLE), torch.SymFloat)
        and value.node.has_hint()  # taken out of tensors by forward, they have none
    ]


def refuse_data_dependent(gm: fx.GraphModule) -> None:
    given: set[Any] = set()  # an unbacked symbol that comes in has a number at each call
    for node in gm.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get(_EXAMPLE)):
            found = free_unbacked_symbols(value) if isinstance(value, _SIZED) else set[Any]()
            if node.op == "placeholder":
                given |= found
            elif found - given:
                sizes = list(value.shape) if isinstance(value, Tensor) else [value]
                raise CaptureError(data_dependent_message(node.name, sizes))


def _name_of_input(node: fx.Node) -> str:
    return str(node.target).removeprefix("L_").strip("_")  # dynamo calls a caller's ``x`` ``L_x_``


def numbered(
    gm: fx.GraphModule, numbers: Mapping[int, float], given: Sequence[Any]
) -> tuple[fx.GraphModule, list[Any]]:
    """A copy with `numbers`, by input, in place of symbols, and the other inputs as fake ones."""
    made = with_notes(gm)
    placeholders = made.graph.find_nodes(op="placeholder")
    for i, number in numbers.items():
        node = placeholders[i]
        for read in _items_of(node):
            _read_number(read, number)
            made.graph.erase_node(read)
        _read_number(node, number)
        made.graph.erase_node(node)
    for node in made.graph.nodes:
        node.meta.pop(_EXAMPLE, None)  # symbols in it are of dynamo's closed trace
    made.recompile()
    mode = FakeTensorMode(shape_env=ShapeEnv())  # its own: dynamo's knows the inputs by symbols
    others = [value for i, value in enumerate(given) if i not in numbers]
    fake = (mode.from_tensor(x, static_shapes=True) if isinstance(x, Tensor) else x for x in others)
    return made, list(fake)


def with_notes(gm: fx.GraphModule) -> fx.GraphModule:
    made = copy_of(gm)
    made.meta = dict(gm.meta)
    # Dynamo's notes on graph and inputs: by them, Inductor knows parameters.
    made._param_name_to_source = getattr(gm, "_param_name_to_source", None)  # pyright: ignore
    olds, news = (m.graph.find_nodes(op="placeholder") for m in (gm, made))
    for old, new in zip(olds, news, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return made


def specialized(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Inputs with numbers in place of symbols; the graph reads these, in place."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    traced = [node.meta.get(_EXAMPLE) for node in placeholders]
    if not any(map(_is_symbolic, traced)):
        return list(example_inputs)
    _refuse_asked_for(placeholders, traced)  # a symbol that the user has asked for may not be fixed
    for node, value in zip(placeholders, traced, strict=True):
        if isinstance(value, torch.SymInt):
            _read_number(node, int(value))
    gm.recompile()
    bases: dict[int, Tensor] = {}
    pairs = zip(example_inputs, traced, strict=True)
    return [_fixed(value, bases) if _is_fake(value) else given for given, value in pairs]


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor) and _is_symbolic(value)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(n, torch.SymInt) for n in _geometry(value))
    return isinstance(value, torch.SymInt)


def _geometry(tensor: Tensor) -> list[Any]:
    return [*tensor.shape, *tensor.stride(), tensor.storage_offset()]


def _refuse_asked_for(placeholders: Sequence[fx.Node], traced: Sequence[Any]) -> None:
    numbers = [n for t in traced if isinstance(t, Tensor) for n in _geometry(t)]
    symbols = [n for n in [*numbers, *traced] if isinstance(n, torch.SymInt)]
    given = [getattr(node.meta.get("grapharg"), "example", None) for node in placeholders]
    # `mark_dynamic` notes its dimensions on the tensor.
    is_marked = any(getattr(value, "_dynamo_dynamic_indices", ()) for value in given)
    is_known = all(n.node.has_hint() for n in symbols)
    # With dynamic=True, that is False.
    if dynamo_config.assume_static_by_default and is_known and not is_marked:
        return
    shapes = [list(t.shape) for t in traced if _is_fake(t)]
    raise CaptureError(
        "leave out dynamic=True and torch._dynamo.mark_dynamic, to plan each shape that comes, or "
        "set torch._dynamo.config.optimize_ddp = False: a size of the inputs is symbolic, "
        f"{(shapes or [symbols])[0]}, and DDP cuts the model into subgraphs that are planned "
        "together for one shape"
    )


def _read_number(node: fx.Node, value: float) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)


def _fixed(fake: FakeTensor, bases: dict[int, Tensor]) -> Tensor:
    # Taking a number from a symbol notes a guard, so dynamo compiles again for another shape.
    shape, stride = [int(n) for n in fake.shape], [int(n) for n in fake.stride()]
    offset, key = int(fake.storage_offset()), storage_key(fake)
    with fake.fake_mode, torch.no_grad():
        if key not in bases:  # inputs that share a storage still do
            size_bytes = int(fake.untyped_storage().nbytes())
            bases[key] = torch.empty(size_bytes, dtype=torch.uint8, device=fake.device)
        made = torch.empty(0, dtype=fake.dtype, device=fake.device)
        made.set_(bases[key].untyped_storage(), offset, shape, stride)  # pyright: ignore
    return made.requires_grad_(fake.requires_grad)


def device_of_inputs(inputs: Iterable[Any]) -> str:
    """``cpu``, or the one CUDA device that holds inputs; `DeviceError` for any other."""
    tensors = [given for given in inputs if isinstance(given, Tensor)]
    device = device_holding(tensors)
    if others := sorted({str(tensor.device) for tensor in tensors} - {CPU, device}):
        on_cuda = [device] if is_cuda(device) else []
        raise DeviceError(
            "compile separately what runs on each device, or compile without a budget: backend "
            '"remat" plans a graph for a CPU or one CUDA device, and this one has inputs on '
            f"{', '.join((*on_cuda, *others))}"
        )
    return device


@functools.cache
def libraries_bytes(device: str) -> int:
    """Bytes that libraries such as cuBLAS keep on a device from their first call on."""
    meter = meter_of(device)
    with for_real(meter):
        return meter.library_bytes()
