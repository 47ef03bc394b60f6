"""What is asked of a plan: the one place of the planning options.

Each field of `Request` is an option of every verb that plans, with the flag and the help that
stand at the field (`remat/cli/verb.py` reads them).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from remat.budgets import parse_budget
from remat.graph_capture.devices.known_devices import CPU, check_device, device_table, is_in_table
from remat.graph_capture.devices.memory import LowerTiers, lower_tiers
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding, ShardingKind
from remat.graph_capture.errors import DeviceError
from remat.graph_capture.graph import Optimizer
from remat.solver import TABLE, make_solver
from remat.solver.stopping import DEFAULT_GAP

if TYPE_CHECKING:
    from remat.graph_capture.costs.profile import Profile

NO_BUDGET = ""
"""The budget of a request that asks for no solve."""


@dataclass(frozen=True)
class Request:
    """What to plan for, on what, and how long to try.

    The metadata of a field is what the command line shows of it: its help and, where they are
    not the usual ones, its flag, its metavar and the least value that it takes.
    """

    budget: str = field(
        default=NO_BUDGET,
        metadata={
            "help": "to solve for: 8GiB, 512MiB, 60% of the unmodified peak, auto (what is free) "
            "or min; repeatable in sweep and compare"
        },
    )
    host: str = field(
        default="",
        metadata={
            "help": "memory of the host that values may move to: 120GiB, or auto for nine tenths "
            "of what is free; on a CPU files stand for it; in sweep several, such as 0,8GiB,16GiB"
        },
    )
    nvme: str = field(
        default="",
        metadata={
            "help": "a folder on NVMe, and how much of its drive lies below --host: "
            "/mnt/nvme:200GiB",
            "metavar": "FOLDER:SIZE",
        },
    )
    solver: str = field(
        default="auto",
        metadata={"help": f"one of {', '.join(TABLE)}; repeatable in sweep and compare"},
    )
    order: Literal["fixed", "free"] = field(
        default="fixed",
        metadata={"help": "of first computations: fixed keeps the captured one, free tries others"},
    )
    time_limit_s: float = field(
        default=60.0,
        metadata={
            "flag": "--time-limit",
            "help": "seconds to search for a plan; in sweep and compare for all budgets of a "
            "solver together, in fit at each size",
            "min": 0.0,
        },
    )
    gap: float = field(
        default=DEFAULT_GAP,
        metadata={
            "help": "end the search at a plan that is proved to be within this part of the best, "
            "for solvers that prove one",
            "min": 0.0,
        },
    )
    keep: tuple[str, ...] = field(
        default=(),
        metadata={"help": "modules never to recompute; repeatable", "metavar": "GLOB"},
    )
    recompute: tuple[str, ...] = field(
        default=(),
        metadata={"help": "modules always to recompute; repeatable", "metavar": "GLOB"},
    )
    split: Literal["none", "exact", "tolerance"] | None = field(
        default=None,
        metadata={
            "help": "let a linear head with its cross-entropy run in chunks: exact if that gives "
            "eager's bits, tolerance also if a sum has another order; default: exact for "
            "large heads; heads that cannot be chunked stay whole, without a warning"
        },
    )
    optimizer: Optimizer = field(
        default="none",
        metadata={"help": "count this optimizer's state as resident; Adam's is that of adamw"},
    )
    optimizer_in_backward: bool = field(
        default=False,
        metadata={
            "help": "plan with updates during backward, as optimizer_in_backward= makes them, by "
            "the --optimizer; nothing is run"
        },
    )
    accumulate: bool = field(
        default=False, metadata={"help": "count accumulated gradients as resident"}
    )
    device: str = field(
        default=CPU,
        metadata={
            "help": f"cpu or cuda, measured here; or modelled: {', '.join(device_table().devices)}"
        },
    )
    shard: ShardingKind = field(
        default="none",
        metadata={"help": "plan one rank of this data parallelism, without running it"},
    )
    world_size: int = field(default=1, metadata={"help": "ranks of --shard", "min": 1})
    shard_blocks: str = field(
        default="",
        metadata={
            "help": "modules that fsdp2 or replicate wraps by themselves, such as blocks.*",
            "metavar": "GLOB",
        },
    )
    replicas: int = field(
        default=1, metadata={"help": "of fsdp2: shard groups that hold the same", "min": 1}
    )
    reshard_after_forward: str = field(
        default="",
        metadata={
            "help": "of fsdp2: yes, no to keep parameters whole, or the number of ranks that share "
            "them until backward; left out, yes for all but the root",
            "metavar": "yes|no|RANKS",
        },
    )
    bucket_views: bool = field(
        default=False,
        metadata={"help": "of ddp and zero1: gradients are views of the buckets"},
    )
    param_dtype: str = field(
        default="",
        metadata={"help": "of fsdp2 and replicate: what a mixed precision policy casts to"},
    )
    reduce_dtype: str = field(
        default="", metadata={"help": "of fsdp2 and replicate: what gradients are summed in"}
    )
    cpu_offload: bool = field(
        default=False,
        metadata={"help": "of fsdp2: parameters, gradients and optimizer state are on the host"},
    )
    states_over: int = field(
        default=0,
        metadata={
            "help": "of fsdp2 and zero1: ranks that share one optimizer state",
            "min": 0,
            "show_default": "all that share parameters",
        },
    )
    profile: Profile | Path | None = field(
        default=None,
        metadata={"help": "costs kept by remat profile, to use as they are", "metavar": "FILE"},
    )
    measure_again: bool = field(
        default=False,
        metadata={"help": "measure ops anew, also those whose costs are kept from before"},
    )

    @property
    def sharding(self) -> Sharding:
        """How the step is spread over ranks.

        Raises
        ------
        DeviceError : the options do not go together.
        """
        return Sharding(
            self.shard, self.world_size, self.shard_blocks, self.replicas,
            _resharding(self.reshard_after_forward), self.bucket_views, self.param_dtype,
            self.reduce_dtype, self.cpu_offload, self.states_over,
        )  # fmt: skip

    @property
    def solving(self) -> dict[str, Any]:
        """What `solve` is asked beside the budget, the solver and the time limit."""
        return {
            "keep": self.keep, "recompute": self.recompute, "order": self.order, "gap": self.gap,
        }  # fmt: skip

    @property
    def is_run_here(self) -> bool:
        """Whether the plan is one of the very step that can run on this machine, alone."""
        is_here = not is_in_table(self.device) and self.sharding == NO_SHARDING
        return is_here and not self.optimizer_in_backward

    def tiers(self, device: str | None = None, *, is_here: bool | None = None) -> LowerTiers | None:
        """What may be used below the device; `device` is of a kept graph, else the one asked for.

        Raises
        ------
        BudgetError, FileError : as of `lower_tiers`.
        """
        return lower_tiers(
            self.host or None, self.nvme or None, device or self.device, is_here=is_here
        )

    def checked(self, *, is_kept: bool = False) -> Request:
        """The same with its profile read, refused before anything runs if a part is unknown.

        Parameters
        ----------
        is_kept : whether it is for a graph of a file, which names its own device.

        Raises
        ------
        BudgetError, DeviceError, SolverError, ProfileError : a field cannot be read, or names
            what is not there. FileError : the profile's file cannot be read, or a folder not
            written.
        """
        if self.budget != NO_BUDGET:
            parse_budget(self.budget)
        check_device(self.device)
        if not is_kept:
            self.tiers()
        known = self.read_profile()
        make_solver(self.solver, order=self.order, gap=self.gap)
        sharding = self.sharding
        if self.optimizer_in_backward and sharding != NO_SHARDING:
            raise DeviceError(
                "--optimizer-in-backward plans a step on one rank: wrappers for several take "
                "gradients first. Leave out --shard, or --optimizer-in-backward"
            )
        return replace(self, profile=known)

    def read_profile(self) -> Profile | None:
        """The profile itself, or the one in the file that is named.

        Raises
        ------
        ProfileError : the file holds none. FileError : it cannot be read.
        """
        if self.profile is None:
            return None
        # Profiles import torch, which a request does without.
        from remat.graph_capture.costs.profile import as_profile

        return as_profile(self.profile)


def _resharding(text: str) -> bool | int | None:
    """What `fully_shard` takes: a truth, a number of ranks, or None where nothing is said."""
    if text in ("", "yes", "no"):
        return {"": None, "yes": True, "no": False}[text]
    if not text.isdecimal():
        raise DeviceError(
            f"--reshard-after-forward {text} is neither yes, no nor a number of ranks: leave it "
            "out for what fully_shard does"
        )
    return int(text)
