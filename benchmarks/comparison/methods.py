"""What people do today to make a step fit, each as a change of a model for one step.

A method takes a trainee and an amount. It gives what is called in place of the model, and a
context in which a step of it runs.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition, get_default_op_list
from torch._inductor.compile_fx import select_decomp_table
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from benchmarks.comparison.models import Trainee

SHARES = (1.0, 0.7, 0.55, 0.4, 0.2, 0.1)
"""Values of torch's activation_memory_budget."""
COMPILERS = {"aot": "aot_eager_decomp_partition", "inductor": "inductor"}


class DoesNotApplyError(Exception):
    """The method cannot be used on this model."""


@dataclass(frozen=True)
class Variant:
    """What is called in the model's place, and the context of each step."""

    call: Callable[..., Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def eager(trainee: Trainee) -> Variant:
    """Nothing is recomputed."""
    return Variant(trainee.model)


def checkpointed(trainee: Trainee, every: int) -> Variant:
    """`torch.utils.checkpoint` around every n-th block."""
    return _around(trainee, trainee.blocks[::every], {})


def selective(trainee: Trainee) -> Variant:
    """Each block checkpointed, but for the ops that torch's partitioner counts as heavy."""
    heavy = {
        overload
        for packet in get_default_op_list().compute_intensive_ops
        for overload in (getattr(packet, name) for name in packet.overloads())
    }

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in heavy else CheckpointPolicy.PREFER_RECOMPUTE

    context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    return _around(trainee, trainee.blocks, {"context_fn": context_fn})


def sequential(trainee: Trainee) -> Variant:
    """`checkpoint_sequential` over as many segments as the root of the blocks' number."""
    if trainee.chain is None:
        raise DoesNotApplyError("its blocks are no chain")
    parent_path, _, name = trainee.chain.rpartition(".")
    parent = trainee.model.get_submodule(parent_path)
    blocks = parent.get_submodule(name)
    segments = max(1, round(math.sqrt(len(list(blocks.children())))))
    in_segments = _InSegments(list(blocks.children()), segments)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        parent._modules[name] = nn.ModuleList([in_segments])
        try:
            yield
        finally:
            parent._modules[name] = blocks

    return Variant(trainee.model, context)


class _InSegments(nn.Module):
    def __init__(self, blocks: list[nn.Module], segments: int) -> None:
        super().__init__()
        self.blocks, self.segments = nn.Sequential(*blocks), segments

    def forward(self, x: Any) -> Any:
        return checkpoint_sequential(self.blocks, self.segments, x, use_reentrant=False)


def around(model: nn.Module, options: Mapping[nn.Module, Mapping[str, Any]]) -> Variant:
    """A checkpoint around each of the modules, with its options."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        for module, given in options.items():
            module.forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False, **given
            )
        try:
            yield
        finally:
            for module in options:
                del module.forward

    return Variant(model, context)


def _around(trainee: Trainee, paths: tuple[str, ...], options: dict[str, Any]) -> Variant:
    modules = (trainee.model.get_submodule(path) for path in paths)
    return around(trainee.model, dict.fromkeys(modules, options))


class KeepAll(CustomPartitionerFn):
    """Keeps everything that backward reads; gradients of compiled steps are compared with it."""

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        """Torch's own partition that recomputes nothing."""
        return default_partition(gm, joint_inputs, num_fwd_outputs=kwargs["num_fwd_outputs"])

    def uuid(self) -> None:
        """None, so that nothing made with it is cached."""

    def __deepcopy__(self, memo: dict[int, Any]) -> KeepAll:
        return self


def compiled(trainee: Trainee, compiler: str, share: float) -> Variant:
    """`torch.compile` at a value of `activation_memory_budget`; 1 is plain `torch.compile`."""
    context = functools.partial(
        functorch_config.patch, activation_memory_budget=share, enable_autograd_cache=False
    )
    options: dict[str, Any] = (
        {"options": {"fx_graph_cache": False}} if compiler == "inductor" else {}
    )
    return Variant(torch.compile(trainee.model, backend=COMPILERS[compiler], **options), context)


def compiled_keeping_all(trainee: Trainee) -> Variant:
    """`torch.compile` with Inductor, nothing recomputed."""
    options = {"fx_graph_cache": False, "custom_partitioner_fn": KeepAll()}
    context = functools.partial(functorch_config.patch, enable_autograd_cache=False)
    return Variant(torch.compile(trainee.model, options=options), context)


def decomposed_keeping_all(trainee: Trainee) -> Variant:
    """The step as the eager-like compiler runs it, nothing recomputed."""
    backend = aot_autograd(
        fw_compiler=lambda gm, _: make_boxed_func(gm), partition_fn=default_partition,
        decompositions=select_decomp_table,
    )  # fmt: skip
    context = functools.partial(functorch_config.patch, enable_autograd_cache=False)
    return Variant(torch.compile(trainee.model, backend=backend), context)
