"""Modules around a model that do more than its forward, which no graph of a step can hold.

They are told by their names, since their classes take long to load, or are not installed.
"""

from __future__ import annotations

from torch import nn

from remat.graph_capture.errors import CaptureError

_AFTER = "plan the model that it was made of, {inside}, and wrap what you get: {wrapped}"
_WAYS_OUT = {
    "DistributedDataParallel": (
        _AFTER.format(
            inside=".module of it", wrapped="DistributedDataParallel(remat.plan_cache(model, ...))"
        ),
        "its gradients would be reduced in the first step alone",
    ),
    "FullyShardedDataParallel": (
        "plan the model that it was made of, and shard what you get by fully_shard "
        "(docs/distributed.md)",
        "it gathers and reduces by hooks outside of a plan",
    ),
    "ShardedDataParallel": (
        _AFTER.format(inside=".module of it", wrapped="DistributedDataParallel(...)"),
        "its gradients would be reduced in the first step alone",
    ),
    "DataParallel": (
        _AFTER.format(
            inside=".module of it", wrapped="DistributedDataParallel(remat.plan_cache(model, ...))"
        ),
        "it copies the model to other devices at each step",
    ),
    "DeepSpeedEngine": (
        _AFTER.format(
            inside=".module of it",
            wrapped="deepspeed.initialize(model=remat.plan_cache(model, ...))",
        ),
        "its backward and step would not be those of a plan",
    ),
    "OptimizedModule": (
        "use the module that it was made of, ._orig_mod of it. For code by Inductor give "
        'compile=True, or plan with torch.compile(model, backend="remat")',
        "torch.compile's code cannot be traced",
    ),
}
"""By the name of a wrapper's class: what to do, and why it is refused."""


def refuse_wrappers(model: nn.Module) -> None:
    """Raise `CaptureError` for a model that is wrapped already, or a part of it is."""
    for path, module in model.named_modules():
        place = path or "the model"
        if hasattr(type(module), "_remat_original_module"):
            raise CaptureError(
                f"{place} follows a plan already: leave it at that, or put its original back "
                "(.original_module of it) and plan the whole"
            )
        for kind in type(module).__mro__:
            if kind.__name__ in _WAYS_OUT:
                way_out, why = _WAYS_OUT[kind.__name__]
                by = "torch.compile" if kind.__name__ == "OptimizedModule" else kind.__name__
                found = f"{place} is wrapped by {by}"
                raise CaptureError(f"{found}: {way_out}. Planned as it is, {why}")
