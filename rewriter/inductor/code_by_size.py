"""A family of schedules by Inductor: code for each size of the range that is met."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict

from torch import nn

from remat.formats import budget_text, bytes_text
from remat.graph_capture.errors import BudgetError, option
from remat.graph_capture.sizes.at_sizes import trace_at
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.symbols import Sizes
from remat.graph_capture.tracing.trace import trace_recipe
from remat.graph_capture.tracing.traced_step import Trace
from remat.rewriter.checking.audit import Audits
from remat.rewriter.compiled import compile_step
from remat.rewriter.graphs.updating import Updates
from remat.rewriter.inductor.compiler import code_peak_bytes
from remat.rewriter.user_module.module import RematModule, make_module
from remat.rewriter.user_module.ranged import as_planned_over
from remat.schedules.family import Family, sizes_text
from remat.schedules.schedule import Schedule

MOST_SIZES = 16  # whose code is kept; a size that comes back after so many others is compiled again


class CodeBySize:
    """The compiled modules of a family, each for one size: Inductor writes sizes into its code."""

    def __init__(
        self, model: nn.Module, family: Family, traced: Trace, graph: RangedGraph | None,
        updates: Updates | None, audit: Audits,
    ) -> None:  # fmt: skip
        self.links = graph.base.links if graph else None
        self.model, self.family, self.traced = model, family, traced
        self.updates = updates
        self.audit: Audits = audit
        self._modules: OrderedDict[tuple[int, ...], RematModule] = OrderedDict()

    def at(self, sizes: Sizes) -> RematModule:
        """`BudgetError` where the code of no schedule keeps to the budget at these sizes."""
        key = tuple(sizes.values())
        if key not in self._modules:
            if len(self._modules) == MOST_SIZES:
                self._drop_oldest()
            self._modules[key] = self._made(sizes)
        self._modules.move_to_end(key)
        return self._modules[key]

    def _drop_oldest(self) -> None:
        self._modules.popitem(last=False)
        warnings.warn(
            "pad batches to fewer sizes, or leave out compile=True, whose code is for one size: "
            f"{self.family.model} was called with more than {MOST_SIZES} sizes, so the code that "
            "was used longest ago is dropped",
            stacklevel=8,
        )

    def _made(self, sizes: Sizes) -> RematModule:
        peaks: list[int] = []
        # Code holds more than ops, or less: those behind recompute more.
        for member in self.family.members[self.family.number_at(**sizes) :]:
            traced, schedule = planned_at(self.model, self.traced, member.schedule, sizes)
            peaks.append(code_peak_bytes(traced, schedule))
            if peaks[-1] <= self.family.budget_bytes:
                step = compile_step(traced, schedule, by_inductor=True, links=self.links)
                return make_module(
                    self.model, schedule, traced.recipe, step, traced.python_state,
                    updates=self.updates, audit=self.audit,
                )  # fmt: skip
        raise BudgetError(
            f"give {option('budget', budget_text(min(peaks)))}, or leave out compile=True: at "
            f"{sizes_text(sizes)} the lowest peak of Inductor's code is {bytes_text(min(peaks))}, "
            f"above the budget of {bytes_text(self.family.budget_bytes)}"
        )


def planned_at(
    model: nn.Module, traced: Trace, schedule: Schedule, sizes: Sizes
) -> tuple[Trace, Schedule]:
    """A trace of the range at these sizes, in the chunks that `schedule` has, and `schedule`."""
    # Another trace of the range, as compiling fixes the symbols of one to its hints. Its record
    # serves for AOTAutograd's runtime, which reads sizes when it runs.
    own = trace_at(trace_recipe(model, traced.recipe), sizes)
    return as_planned_over(model, dataclasses.replace(own, compiled=False), schedule)
