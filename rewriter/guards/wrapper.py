"""Whether a planned module is wrapped as its plan counts: buckets, groups of parameters, policies.

Wrappers come after the plan, so this is looked at when a step runs.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from remat.formats import bytes_text
from remat.graph_capture.distributed.dtensors import (
    has_dtensors,
    parameter_groups_in,
    parameter_groups_of,
    sharded_state_of,
)
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.errors import DeviceError, RewriteError
from remat.graph_capture.torch_private.core import active_ddp_module


def sharding_around(model: nn.Module) -> Sharding:
    """How a model is wrapped whose forward runs; none where that has no `Sharding`."""
    if (ddp := active_ddp_module()) is not None:
        return NO_SHARDING if has_dtensors(model) else _sharding_of_ddp(ddp)
    groups = parameter_groups_of(model)
    if len(groups) != 1 or len(groups[0].modules) > 1:
        return NO_SHARDING
    try:
        return _sharding_of_group(groups[0])
    except DeviceError:  # as on one rank
        return NO_SHARDING


def _sharding_of_group(group: Any) -> Sharding:
    shards, replicas = _mesh_sizes(group)
    after, policy = group.post_forward_mesh_info, group.mp_policy
    is_copy = not hasattr(group.mesh_info, "shard_mesh_size")
    names = (_short(one) if one else "" for one in (policy.param_dtype, policy.reduce_dtype))
    every: dict[str, Any] = dict(zip(("param_dtype", "reduce_dtype"), names, strict=True))
    every["gradient_sync"] = group.reduce_grads
    if is_copy:
        return Sharding("replicate", replicas, **every)
    return Sharding(
        "fsdp2", shards * replicas, replicas=replicas, cpu_offload=_is_offloaded(group),
        reshard_after_forward=False if after is None else after.shard_mesh_size, **every,
    )  # fmt: skip


def _mesh_sizes(group: Any) -> tuple[int, int]:
    names = ("shard_mesh_size", "replicate_mesh_size")
    shards, replicas = (getattr(group.mesh_info, name, 1) for name in names)
    return shards, replicas


def _is_offloaded(group: Any) -> bool:
    return type(group.offload_policy).__name__ == "CPUOffloadPolicy"


def _sharding_of_ddp(ddp: Any) -> Sharding:
    """What `remat.Sharding` has to be told of a `DistributedDataParallel`."""
    n_ranks = max(2, ddp.process_group.size())  # buckets of one rank are as large
    return Sharding(
        "ddp", n_ranks, bucket_views=ddp.gradient_as_bucket_view,
        gradient_sync=ddp.require_backward_grad_sync,
    )  # fmt: skip


@dataclass
class ToldWrapper:
    """What was told of how `model` will be wrapped, its blocks at `paths` first."""

    model: weakref.ref[nn.Module]
    sharding: Sharding
    accumulates: bool
    paths: Sequence[str] = ()
    is_seen: bool = field(default=False, init=False)

    def require(self, module: nn.Module) -> None:
        """Raise `RewriteError` in a step of `module`, the model or a block, that holds more bytes
        than its plan counts; warn where no sharding was told."""
        ddp = active_ddp_module()
        if ddp is not None:
            self._require_ddp(ddp)
        elif self.sharding.kind != "none":
            self._require_groups(module)
        self.is_seen = True

    def _require_ddp(self, ddp: Any) -> None:
        # Each step asks: texts are made where one is said.
        if self.sharding.kind == "none":
            self._warn(ddp, "its buckets")
        elif not self.sharding.has_buckets:
            self._refuse(
                f"plan with sharding={_text(_sharding_of_ddp(ddp))}",
                "DistributedDataParallel is around it",
            )
        elif self.sharding.bucket_views and not ddp.gradient_as_bucket_view:
            self._refuse(
                "pass gradient_as_bucket_view=True to DistributedDataParallel, or plan without "
                "bucket_views=True",
                "gradients are held beside its buckets",
            )
        elif not (ddp.require_backward_grad_sync or self._counts_unsynced):
            self._warn(ddp, "what no_sync() adds up beside them")

    @property
    def _counts_unsynced(self) -> bool:
        # Between steps gradients are None, so that no_sync() makes no views of buckets.
        is_beside = self.accumulates and not self.sharding.bucket_views
        return is_beside or not self.sharding.gradient_sync

    def _warn(self, ddp: Any, uncounted: str) -> None:
        if self.is_seen:
            return
        size_bytes = sum(p.nbytes for p in ddp.module.parameters() if p.requires_grad)
        warnings.warn(
            f"plan with sharding={_text(_sharding_of_ddp(ddp))}, or for a budget that is "
            f"{bytes_text(size_bytes)} lower: the budget does not count {uncounted}, as "
            f"DistributedDataParallel is around {self._kind}",
            stacklevel=6,
        )

    def _say_unwrapped(self) -> None:
        names = {"fsdp2": "fully_shard", "replicate": "replicate"}
        wrapper = names.get(self.sharding.kind, "DistributedDataParallel")
        warnings.warn(
            f"call {wrapper} on {self._kind} before it trains: it was planned for "
            f"{_text(self.sharding)}, nothing wraps it, and its gradients stay on this rank",
            stacklevel=6,
        )

    @property
    def _kind(self) -> str:
        model = self.model()
        return "it" if model is None else type(model).__name__

    def _require_groups(self, module: nn.Module) -> None:
        if self.sharding.gradient_sync and not all(
            g.reduce_grads for g in parameter_groups_of(module)
        ):
            self._refuse(
                "plan with remat.Sharding(..., gradient_sync=False)",
                "set_requires_gradient_sync(False) holds whole gradients",
            )
        if self.is_seen or (model := self.model()) is None:
            return
        # Parameters that a wrapper has gathered are no DTensors while forward runs.
        is_wrapped = any(has_dtensors(one) or sharded_state_of(one) for one in (model, module))
        if _is_one_of_ranks() and not is_wrapped:
            self._say_unwrapped()
            return
        if self.sharding.has_buckets and any(map(sharded_state_of, (module, model))):
            self._refuse("plan with sharding=remat.Sharding('fsdp2', ...)", "fully_shard wraps it")
        for path, otherwise in self._otherwise(model):
            self._refuse(
                f"wrap {path or 'the model'} as planned, or plan for what wraps it "
                "(docs/distributed.md)", otherwise
            )  # fmt: skip

    def _otherwise(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Modules that are wrapped otherwise than told, by their paths, and how."""
        blocks = [(path, model.get_submodule(path)) for path in self.paths]
        wrapped = [path for path, block in blocks if sharded_state_of(block) is not None]
        is_root_wrapped = sharded_state_of(model) is not None
        if not (wrapped or is_root_wrapped):  # by one around both, or a step on one rank
            return
        if not is_root_wrapped and not _has_groups_around(model, blocks):
            yield "", "its blocks alone are wrapped"
        for path, block in blocks:
            if path not in wrapped:
                yield path, f"{path} is not wrapped by itself"
            yield from ((path, f"{path} {how}") for how in self._of_groups(block, is_root=False))
        yield from (("", f"its root {how}") for how in self._of_groups(model, is_root=True))

    def _of_groups(self, module: nn.Module, *, is_root: bool) -> Iterator[str]:
        for group in parameter_groups_of(module):
            if len(group.modules) > 1:
                yield f"is in a group of {len(group.modules)} modules"
            pairs = _told_and_got(self.sharding, group, is_root=is_root)
            yield from (f"has {name}={got}, not {told}" for name, told, got in pairs if told != got)

    def _refuse(self, remedy: str, otherwise: str) -> None:
        raise RewriteError(
            f"{remedy}: {self._kind} was planned for {_text(self.sharding)}, and {otherwise}, so a "
            "step would not take the memory that was planned"
        )


def _told_and_got(
    sharding: Sharding, group: Any, *, is_root: bool
) -> Iterator[tuple[str, Any, Any]]:
    """What was told, and what a group of FSDP2's has: by name, both."""
    (shards, replicas), after = _mesh_sizes(group), group.post_forward_mesh_info
    yield "world_size", sharding.world_size, shards * replicas
    yield "replicas", sharding.replicas if sharding.kind == "fsdp2" else replicas, replicas
    own = _short(group.fsdp_params[0].orig_dtype) if group.fsdp_params else ""
    policy, cast_to = group.mp_policy, sharding.param_dtype or own
    if cast_to == _short(policy.param_dtype or own):  # else a block refuses what it is given
        reduced = _short(policy.reduce_dtype or policy.param_dtype or own)
        yield "reduce_dtype", sharding.reduce_dtype or cast_to, reduced
    yield "cpu_offload", sharding.cpu_offload, _is_offloaded(group)
    keep = sharding.reshard_after_forward
    if sharding.kind != "fsdp2" or (is_root and keep is None):
        return
    told = sharding.shard_ranks if keep in (None, True) else keep
    yield "reshard_after_forward", told, False if after is None else after.shard_mesh_size


def _is_one_of_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _has_groups_around(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether all parameters are in blocks, or others are in a group of a module around."""
    inside = {id(p) for _, block in blocks for p in block.parameters()}
    state = next((one for _, block in blocks if (one := sharded_state_of(block))), None)
    groups = [
        g
        for one in (state._state_ctx.all_states if state else ())
        for g in parameter_groups_in(one)
    ]
    holders = {id(one._module_info.module) for group in groups for one in group.fsdp_params}
    held = ((m, p) for m in model.modules() for p in m._parameters.values() if p is not None)
    own = [module for module, p in held if id(p) not in inside]
    return not own or any(id(module) in holders for module in own)


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _text(sharding: Sharding) -> str:
    views = ", bucket_views=True" if sharding.bucket_views else ""
    sync = "" if sharding.gradient_sync else ", gradient_sync=False"
    return f"remat.Sharding({sharding.kind!r}, {sharding.world_size}{views}{sync})"
