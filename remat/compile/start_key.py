"""What a compiled plan depends on, as a key: the same in each process that would plan the same.

The key is made of dynamo's graph, before anything of Inductor runs. It has the ops with their
arguments, what they read of which shapes, and what is around the graph: the options, the forwards
that are open, the machine, the rank, and the releases and settings of torch. Names that differ from
run to run are left out. Prices are not in it: they are kept with the plan, and compared.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._inductor import config as inductor_config

from remat.caches.sources import sources_key
from remat.compile.one_shape import device_of
from remat.compile.options import CompileOptions
from remat.graph_capture.devices.cpu_meter import cpu_title
from remat.graph_capture.devices.device_table import CPU, CUDA, is_cuda
from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.joint.nodes import storage_key
from remat.rewriter.inductor.nodes import place_of

ADDRESS = " at 0x"
"""In the text of an object that says no more than where it lies."""


def start_key(gm: fx.GraphModule, inputs: Sequence[Any], asked: CompileOptions, around: str) -> str:
    """SHA-256 of all that the plan of a graph depends on; empty where that has no lasting text.

    Parameters
    ----------
    inputs : of the graph, real or fake. around : what is known of the graphs before this one.
    """
    digest = hashlib.sha256()
    surroundings = _surroundings(device_of(inputs))
    parts = (repr(asked), around, *surroundings, *_input_lines(inputs), *_graph_lines(gm))
    for part in parts:
        if ADDRESS in part:
            return ""
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()


def _surroundings(device: str) -> Iterator[str]:
    """Machine, releases and settings."""
    yield f"{cpu_title()} {_title(device)}"
    yield f"{torch.__version__} {torch.version.git_version} {sources_key()}"
    yield f"{inductor_config.get_hash().hex()} {functorch_config.get_hash().hex()}"
    yield f"{torch.is_grad_enabled()} {torch.are_deterministic_algorithms_enabled()}"
    yield f"{torch.get_default_dtype()} {torch.get_float32_matmul_precision()}"
    for kind in (CPU, CUDA):
        yield f"{torch.is_autocast_enabled(kind)} {torch.get_autocast_dtype(kind)}"
    if dist.is_available() and dist.is_initialized():
        yield f"rank {dist.get_rank()} of {dist.get_world_size()}"


def _title(device: str) -> str:
    """What a device is, and how it is set; empty for the CPU, whose title is there anyway."""
    if not is_cuda(device):
        return ""
    meter = meter_of(device)
    return f"{meter.title} {meter.settings} {meter.versions}"


def _input_lines(inputs: Sequence[Any]) -> Iterator[str]:
    """A line for each input, with the first input whose storage it shares."""
    storages: dict[int, int] = {}
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor):
            shared = storages.setdefault(storage_key(value), i)
            yield f"{_tensor_text(value)} in {shared}"
        else:
            yield repr(value)


def _tensor_text(tensor: Tensor) -> str:
    where = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()}"
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else type(tensor).__name__
    return f"{kind} {tensor.dtype} {tensor.device} {tensor.requires_grad} {where}"


def _graph_lines(gm: fx.GraphModule) -> Iterator[str]:
    """A line for each node; graphs that a node runs come with it."""
    number = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        arguments = fx.map_arg((node.args, node.kwargs), number.__getitem__)
        target = node.target if isinstance(node.target, str) else _name_of(node.target)
        yield f"{node.op} {target} {arguments} {place_of(node)[0]}"
        if node.op in ("get_attr", "call_module"):
            yield from _attribute_lines(gm, str(node.target))


def _attribute_lines(gm: fx.GraphModule, target: str) -> Iterator[str]:
    value: Any = functools.reduce(getattr, target.split("."), gm)
    if isinstance(value, fx.GraphModule):
        yield from _graph_lines(value)
    else:
        leaves = pytree.tree_leaves(value)
        yield " ".join(_tensor_text(t) if isinstance(t, Tensor) else repr(t) for t in leaves)


def _name_of(target: Any) -> str:
    """Of a function; of an op with its overload."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    return f"{getattr(target, '__module__', '')}.{name}" if name else repr(target)
