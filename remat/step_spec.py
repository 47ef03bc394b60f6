"""What is asked of a plan: a training step, a budget, and how to plan the one within the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from remat.budgets import Budget, parse_budget
from remat.checks import Batch
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.graph import Optimizer
from remat.graph_capture.tracing.option_pairs import PAIRED, require_compatible
from remat.schedules.value_report.globs import Globs, as_globs
from remat.solver.table import TAKE_CHUNKS

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer as TorchOptimizer

    from remat.graph_capture.costs.cache import Profile
    from remat.graph_capture.devices.memory import LowerTiers
    from remat.graph_capture.sizes.symbols import Dynamic
    from remat.graph_capture.tracing.recipe import Split


@dataclass(frozen=True)
class StepSpec:
    """A training step and how to plan it, checked once; `options` are those of the solver."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    budget: str | SupportsIndex = ""
    host: str | SupportsIndex | None = None
    nvme: str | None = None
    loss_fn: Callable[..., Any] | None = None
    target: Any = None
    optimizer: Optimizer = "none"
    accumulate: bool = False
    optimizer_in_backward: TorchOptimizer | None = None
    microbatches: int | None = None
    sharding: Sharding = NO_SHARDING
    group: ProcessGroup | None = None
    blocks: str | None = None
    profile: Profile | str | Path | None = None
    solver: str = "auto"
    time_limit_s: float = 60.0
    keep: Globs = ()
    recompute: Globs = ()
    check: bool | None = None
    audit: bool = True
    verbose: bool = True
    compile: bool = False
    cuda_graphs: bool = False
    float_inputs: Sequence[str] = ()
    outputs: Sequence[str | int] | None = None
    split: Split | None = None
    dynamic: Dynamic | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> StepSpec:
        """The spec of a call; other names are options of the solver, or a `RematError`."""
        from remat.graph_capture.tracing.recipe import check_arguments
        from remat.option_checks import require_dynamic, require_options
        from remat.rewriter.user_module.module import original_of

        known: dict[str, Any] = {k: value for k, value in given.items() if k in _FIELDS}
        of_solver = {name: value for name, value in given.items() if name not in _FIELDS}
        given_to_step = (known.get(name) for name in ("kwargs", "loss_fn", "target"))
        check_arguments(known.get("args", ()), *given_to_step)
        require_options(known)
        known["model"] = original_of(known["model"])
        known["options"] = {**known.get("options", {}), **of_solver}
        spec = cls(**known)
        require_compatible(**spec.asked | spec.reduced_before_updates)
        require_dynamic(spec.model, spec.dynamic, may_be_auto=False)
        return spec

    @property
    def asked(self) -> dict[str, bool]:
        """By option that not all others, or not all models, go with, whether it is asked for."""
        names = (*PAIRED, "keep", "recompute")
        found = {name: bool(getattr(self, name)) for name in names if name in _FIELDS}
        found["sharding"] = self.sharding.kind != "none"
        found["split"] = self.split not in (None, "none")
        found["solver"] = self.solver != "auto"
        return found | {name: getattr(self, name) is not None for name in _OBJECTS}

    @property
    def reduced_before_updates(self) -> dict[str, bool]:
        """What a table of pairs need not hold against a model whose blocks are sharded: gradients
        of each are whole when its backward ends. Nor against a whole step, which reduces them."""
        is_by_part = self.blocks is not None and self.sharding.kind == "fsdp2"
        if not (is_by_part or self.microbatches is not None):
            return {}
        return {"sharding": False, "group": False}

    @property
    def parsed_budget(self) -> Budget:
        return self.parsed(self.budget)

    def parsed(self, budget: str | SupportsIndex) -> Budget:
        asked = parse_budget(budget)
        # Inductor's code asks the allocator for other sizes than eager's ops.
        return dataclasses.replace(asked, is_allocated=True) if self.compile else asked

    @property
    def known_profile(self) -> Profile | None:
        from remat.graph_capture.costs.cache import as_profile

        return as_profile(self.profile)

    @property
    def tiers(self) -> LowerTiers | None:
        from remat.graph_capture.capture_api import tiers_for

        return tiers_for(self.model, None, self.host, self.nvme)

    @property
    def batch(self) -> Batch:
        from remat.graph_capture.distributed.dtensors import inputs_cast

        args, kwargs = inputs_cast(self.args, self.kwargs, self.sharding)
        return Batch(args, kwargs, self.loss_fn, self.target, self.optimizer, self.accumulate)

    @property
    def of_trace(self) -> dict[str, Any]:
        names = ("args", "kwargs", "loss_fn", "target", "optimizer", "accumulate", "outputs")
        return {name: getattr(self, name) for name in names}

    @property
    def of_solve(self) -> dict[str, Any]:
        return {
            "solver": self.solver, "time_limit_s": self.time_limit_s,
            "keep": as_globs(self.keep), "recompute": as_globs(self.recompute), **self.options,
        }  # fmt: skip

    @property
    def may_keep_all(self) -> bool:
        """Whether a step that runs every op once is what a solve would give, where it fits."""
        return self.solver in TAKE_CHUNKS and not self.recompute

    def replace(self, **changed: Any) -> StepSpec:
        return dataclasses.replace(self, **changed)


_FIELDS = {one.name for one in dataclasses.fields(StepSpec)}
_OBJECTS = (  # asked by all but None
    "host", "nvme", "group", "optimizer_in_backward", "blocks", "outputs",
)  # fmt: skip
_DEFAULTS = {
    one.name: one.default
    for one in dataclasses.fields(StepSpec)
    if one.default is not dataclasses.MISSING
}


def is_default(name: str, value: Any) -> bool:
    """Whether a value says no more than leaving the option out."""
    default = _DEFAULTS.get(name, dataclasses.MISSING)
    # Equal numbers of two files are two objects; other values are not compared, as tensors may be.
    return value is default or (type(value) is type(default) is float and value == default)
