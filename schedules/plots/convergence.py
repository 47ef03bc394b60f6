"""How a solve went: its best schedule and its bound over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from remat.schedules.views.palette import ROLES, cycled

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Moment(Protocol):
    """What a picture needs of `remat.solver.Progress`."""

    @property
    def seconds(self) -> float:
        """Seconds since the solve began."""
        ...

    @property
    def best_overhead(self) -> float | None:
        """Overhead of the best schedule so far; None before there is one."""
        ...

    @property
    def bound_overhead(self) -> float:
        """No schedule has less overhead."""
        ...


def draw_convergence(
    ax: Axes, told: Sequence[Moment] | Mapping[str, Sequence[Moment]], *, title: str = ""
) -> Axes:
    """Draw best overhead and bound against seconds.

    Parameters
    ----------
    told : what a solver reported, in order: ``told = []``, then
        ``remat.solver.solve(..., progress=told.append)``. Or several such lists by name.
    """
    runs = dict(told) if isinstance(told, Mapping) else {"best schedule": told}
    colours = cycled(list(runs)) if len(runs) > 1 else dict.fromkeys(runs, ROLES["plan"])
    for name, moments in runs.items():
        best = [(m.seconds, 100 * m.best_overhead) for m in moments if m.best_overhead is not None]
        ax.plot(
            [x for x, _ in best], [y for _, y in best],
            drawstyle="steps-post", color=colours[name], label=name,
        )  # fmt: skip
        bound = colours[name] if len(runs) > 1 else ROLES["bound"]
        title_of_bound = f"bound of {name}" if len(runs) > 1 else "bound"
        ax.plot(
            [m.seconds for m in moments], [100 * max(m.bound_overhead, 0.0) for m in moments],
            drawstyle="steps-post", ls=":", color=bound, label=title_of_bound,
        )  # fmt: skip
    ax.set(xlabel="seconds", ylabel="overhead (%)", title=title)
    ax.set_ylim(bottom=0)
    ax.legend(fontsize="small", frameon=False)
    return ax
