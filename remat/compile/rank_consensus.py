"""What one rank has chosen for a graph, for the ranks that follow it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from remat.budgets import auto_bytes
from remat.compile.compile_options import CompileOptions
from remat.compile.plan_search import Candidate
from remat.formats import bytes_text
from remat.graph_capture.errors import BudgetError
from remat.ranks.one_plan import OnePlan
from remat.rewriter.inductor.partition import FusedStep
from remat.schedules.schedule import Schedule


class AgreedPlan(msgspec.Struct, frozen=True):
    """A schedule, or one for each subgraph; None is torch's own cut. A gap of None is unproved."""

    budget_bytes: int
    schedules: tuple[Schedule | None, ...]
    gaps: tuple[float | None, ...]

    @classmethod
    def of(cls, budget_bytes: int, found: Sequence[Candidate | None]) -> AgreedPlan:
        """None in `found` stands for a subgraph without gradients."""
        schedules = tuple(one.schedule if one else None for one in found)
        return cls(budget_bytes, schedules, tuple(one.gap if one else 0.0 for one in found))

    def of_subgraph(self, k: int) -> tuple[Schedule | None, float | None]:
        return self.schedules[k], self.gaps[k]


def plan_key(asked: CompileOptions, steps: Sequence[FusedStep | None]) -> str:
    """The same on ranks that have the same steps to plan and are asked the same."""
    # A rank with another shape, as of the last batch of an epoch, has a plan of its own.
    text = f"{asked} {[step and step.graph.hash for step in steps]}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def require_within(
    one: OnePlan,
    asked: CompileOptions,
    device: str,
    budget_bytes: int,
    peak_bytes: int,
    held_bytes: int,
) -> None:
    """Raise `BudgetError` for the plan of another rank that takes more than this rank may."""
    # The least peak is no limit.
    if asked.parsed.kind == "min":
        return
    if asked.parsed.kind == "auto":
        # What is free here can be less than on the rank that planned.
        budget_bytes = auto_bytes(device) + held_bytes
    if peak_bytes <= budget_bytes:
        return
    raise BudgetError(
        f"the plan that rank {one.leader} has made for all ranks takes {bytes_text(peak_bytes)} on "
        f"this rank, above its budget of {bytes_text(budget_bytes)}: give the least that any rank "
        f'has to all, such as options={{"budget": "{budget_bytes // 2**20}MiB"}}'
    )
