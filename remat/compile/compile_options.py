"""Options of ``torch.compile(model, backend="remat", options=...)``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remat.budgets import Budget, parse_budget
from remat.graph_capture.errors import BudgetError, SolverError
from remat.solver import solver_class
from remat.solver.reductions.pin_globs import Globs
from remat.solver.stopping import DEFAULT_GAP
from remat.solver.table import check_number


@dataclass(frozen=True)
class CompileOptions:
    """What is asked of a compiled step.

    Attributes
    ----------
    budget : on its peak: bytes, ``"8GiB"``, ``"auto"``, ``"min"``, or ``"60%"`` of the peak that
        the step has as torch compiles it.
    solver : a name of `remat.solver`'s table.
    gap : a schedule is proved to this part of the best, where the solver can; costs of kernels
        that are generated are no more exact than the default.
    time_limit_s : for each solve. replays : most candidates whose code is generated and replayed;
        each takes a solve.
    calls : forwards of each graph that run before the first backward, where a model is called
        more than once for a loss. Each leaves what backward needs.
    keep, recompute : globs over module paths, as `remat.solve` takes them.
    warm : whether a plan that an earlier process has kept is taken, and this one's is kept.
    verbose : as of `remat.rematerialize`.
    """

    budget: Any
    solver: str = "auto"
    gap: float = DEFAULT_GAP
    time_limit_s: float = 10.0
    replays: int = 8
    calls: int = 1
    keep: Globs = ()
    recompute: Globs = ()
    warm: bool = True
    verbose: bool = True

    @property
    def parsed(self) -> Budget:
        return parse_budget(self.budget)


def read_options(given: Mapping[str, Any] | None, **others: Any) -> CompileOptions:
    """Check what came to the backend, and fill in what is left out."""
    unknown = [name for name, value in others.items() if value is not None]
    if unknown:
        raise SolverError(
            f"torch.compile(backend='remat') takes no {unknown[0]}: give options=dict(budget=...)"
        )
    asked = dict(given or {})
    names = [field.name for field in dataclasses.fields(CompileOptions)]
    for name in asked:
        # Options of `remat.rematerialize`, which a hint of the nearest name would not explain.
        if name in ("host", "nvme"):
            raise SolverError(
                f"backend 'remat' takes no {name}: Inductor's code copies nothing to the host and "
                f"back. Leave {name} out, or take remat.rematerialize(model, ..., host=...), which "
                "runs eager's kernels"
            )
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise SolverError(
                f"backend 'remat' has no option {name!r}: {hint}Its options are {', '.join(names)}"
            )
    if "budget" not in asked:
        raise BudgetError(
            'backend "remat" needs a budget: torch.compile(model, backend="remat", '
            'options={"budget": "8GiB"}); or "60%", "auto", "min", or bytes'
        )
    options = CompileOptions(**asked)
    _check(options)
    return options


def _check(options: CompileOptions) -> None:
    parse_budget(options.budget)
    solver_class(options.solver)
    check_number("time_limit_s", options.time_limit_s)
    check_number("gap", options.gap)
    for name in ("warm", "verbose"):
        is_on: Any = getattr(options, name)
        if not isinstance(is_on, bool):
            raise SolverError(f"{name} must be True or False, not {is_on!r}")
    for name in ("replays", "calls"):
        count: Any = getattr(options, name)
        # True is an int.
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise SolverError(f"{name} must be 1 or more, not {count!r}")
