"""The simulator: what a schedule needs, step by step, in bytes and in time.

With `simulator.py` this is short, knows no solver, and is slow enough to be obviously right.
Every peak, time, overhead and gap that `remat` prints comes from `simulate`. Solvers keep faster
books of their own; each of their schedules is judged here once before it leaves `solver/`.
"""

from __future__ import annotations

from remat.graph_capture.graph import LINK_NAMES, LOWER_TIERS, Links, Tier, TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.schedule import Schedule
from remat.schedules.simulation import Copy, Simulation
from remat.schedules.simulator import ScheduleReplay


def simulate(graph: TrainingGraph, schedule: Schedule, links: Links | None = None) -> Simulation:
    """Replay `schedule` over `graph` and check every rule.

    While an op runs, all of these are live: what is resident, every value that has not been
    freed, the op's inputs, outputs and workspace. An output that was live already keeps its copy;
    the second copy that the run makes of it counts only while the op runs. A region that the
    schedule runs in chunks has the ops of that choice of `graph`.

    Parameters
    ----------
    links : of other rates than those of `graph`, for what a schedule takes with them.

    Raises
    ------
    ScheduleError : the schedule was made for another graph, or a step breaks a rule (an input
        is not live, a pinned op is computed twice, an output of the step is lost, a tier is full,
        ...). The message names the step and the op.
    """
    graph = graph_of_schedule(graph, schedule)
    schedule.check_made_for(graph)
    replay, steps = ScheduleReplay(graph, schedule, links or graph.links), schedule.steps
    live_bytes, clock_us = list[int](), list[float]()
    below: dict[Tier, list[int]] = {tier: [] for tier in LOWER_TIERS}
    peak_bytes, peak_step, at_peak, workspace = replay.bytes["device"], 0, tuple[str, ...](), 0
    for i, step in enumerate(steps):
        live_bytes.append(replay.step(i, step))
        clock_us.append(replay.clocks.now["device"])
        for tier, bytes_there in below.items():
            bytes_there.append(replay.bytes[tier])
        if live_bytes[-1] > peak_bytes:
            peak_bytes, peak_step, at_peak = live_bytes[-1], i, tuple(replay.live["device"])
            workspace = replay.workspace_bytes
    replay.check_end(len(steps))
    # The last copy may end after the last op.
    time_us = max(replay.clocks.now.values())
    return Simulation(
        peak_bytes=replay.peak_bytes["device"],
        peak_step=peak_step,
        time_us=time_us,
        overhead=overhead_of(time_us, graph.base_us),
        live_bytes=tuple(live_bytes),
        held_at_peak=tuple(sorted(at_peak, key=lambda name: -replay.size[name])),
        workspace_at_peak_bytes=workspace,
        clock_us=tuple(clock_us),
        stalls=tuple(replay.clocks.stalls),
        copies=tuple(replay.clocks.copies),
        busy_us=replay.clocks.busy,
        moved_bytes=_moved_bytes(replay.clocks.copies),
        host_peak_bytes=replay.peak_bytes["host"],
        nvme_peak_bytes=replay.peak_bytes["nvme"],
        below_bytes={str(tier): tuple(each) for tier, each in below.items() if any(each)},
    )


def _moved_bytes(copies: list[Copy]) -> dict[str, int]:
    return {
        name: sum(copy.size_bytes for copy in copies if copy.link == name) for name in LINK_NAMES
    }


def require_valid(
    graph: TrainingGraph, schedule: Schedule, links: Links | None = None
) -> Simulation:
    """As `simulate`, for the very `graph` that is to be carried out, with regions in chunks."""
    # `simulate` would accept the captured graph too. A hash only says what the schedule was made
    # for: with steps doubled, dropped or moved since then, it would give other gradients than
    # eager, or take more memory than promised.
    schedule.check_made_for(graph)
    return simulate(graph, schedule, links)


def overhead_of(time_us: float, base_us: float) -> float:
    """An overhead, 0 or more; of times of schedules, and of lower bounds on them."""
    return max(time_us / base_us - 1, 0.0) if base_us else 0.0  # a step without costs takes no time


def bound_of(lower_bound_us: float, base_us: float) -> float | None:
    """A lower bound as an overhead; None for a bound of 0 on a step that takes time: no bound."""
    return None if lower_bound_us <= 0 < base_us else overhead_of(lower_bound_us, base_us)


def gap_of(time_us: float, lower_bound_us: float) -> float | None:
    """The time over the lower bound, minus one; None without a bound, which 0 stands for."""
    if lower_bound_us > 0:
        return time_us / lower_bound_us - 1
    return None if time_us > 0 else 0.0  # a step without time is the best there is
