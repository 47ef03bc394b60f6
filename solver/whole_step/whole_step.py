"""The fastest plan of a whole optimizer step over device, host and NVMe, by a search over settings.

Also called: heterogeneous memory training, offloaded training. Parameters, gradients and the
optimizer's state are values of one graph with the activations (`graph_capture/optimizer_step`), so
that order, recomputation and copies are weighed against each other.
Papers: the fixed settings of `named_systems` are points of this space, with their sources there.
Solves: the order of microbatches (passes), what each layer saves, how many layers have that on the
host, where states live, where gradients are added, what stays on the device between uses. Copies of
each setting are placed on the known trace (`streams`), and `simulate` judges it.
Optimal: within the settings that it tries, which are limited by their number; the bound says how
far the best may be from any plan whatever.
Cost: a start for each order, then a climb by one choice at a time; up to `most` plans are judged,
each in time near-linear in the ops of the step.
Shortcomings: all layers of a pass but the unequal ones save alike; parameters do not live on NVMe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from remat.graph_capture.errors import SolverError
from remat.schedules.simulate import gap_of
from remat.solver.whole_step.fitting import fitted
from remat.solver.whole_step.moves import changes
from remat.solver.whole_step.named_systems import NAMED_SYSTEMS
from remat.solver.whole_step.planned_step import PlannedStep, Short, StepTask
from remat.solver.whole_step.setting import Setting
from remat.solver.whole_step.starts import orders, starts

SOLVER = "whole_step"
MOST = 200
"""Plans that are judged in one search."""
STARTS = 2
"""From how many of the orders the search climbs: the first often stays best."""
Outcome = PlannedStep | Short | str
"""Of a named system: its plan, what it lacks, or why its bits are not eager's."""
OTHER_DRAWS = (
    "microbatches would draw random numbers by turns, and eager's draw one after the other"
)


@dataclass(frozen=True)
class StepResult:
    """What a search found.

    Attributes
    ----------
    plan : the fastest that fits; None where none does. short : then, the tier that was nearest
        to enough, and the least that was found to do.
    lower_bound_us : no plan of this step, in any order, takes less. judged : plans that were.
    systems : each named system, what it lacks, or why it is left out.
    """

    plan: PlannedStep | None
    short: Short | None
    lower_bound_us: float
    judged: int
    systems: dict[str, Outcome]

    @property
    def gap(self) -> float | None:
        """The plan's time over the bound, minus one; None without a plan or a bound."""
        return gap_of(self.plan.simulation.time_us, self.lower_bound_us) if self.plan else None


def plan_whole_step(
    task: StepTask, microbatches: int, *, most: int = MOST,
    progress: Callable[[str], None] = lambda _: None,
) -> StepResult:  # fmt: skip
    """Search for the fastest plan, and judge the named systems beside it.

    Parameters
    ----------
    microbatches : in one optimizer step. most : plans to judge, which limits the search.
    progress : told what comes next.

    Raises
    ------
    SolverError : there is no microbatch, or no plan may be judged.
    """
    if microbatches < 1 or most < 1:
        raise SolverError(
            f"a step has one microbatch or more, and a search judges one plan or more; asked for "
            f"are {microbatches} microbatches and {most} plans"
        )
    search, systems = StepSearch(task, microbatches, most, progress), dict[str, Outcome]()
    for name, system in NAMED_SYSTEMS.items():
        progress(f"judging {system.title}")
        setting = task.feasible(system.setting(task.microbatch, microbatches))
        if task.microbatch.draws and not setting.is_batch_major:
            systems[name] = OTHER_DRAWS
            continue
        systems[name] = search.take(fitted(task, setting, name))
    search.run()
    short = None if search.best else _nearest(search.shorts)
    return StepResult(search.best, short, least_step_us(task, microbatches), search.judged, systems)


def least_step_us(task: StepTask, microbatches: int) -> float:
    """A time that no plan of the step beats, in any order: the device's work, or NVMe's.

    The device computes each microbatch once. State that is on NVMe as the step begins, since
    neither device nor host can hold it, comes up once to be updated, and goes back down.
    """
    microbatch, links = task.microbatch, task.links
    device_us = microbatches * microbatch.least_us
    resting_bytes = sum(
        group.parameter_bytes + task.update.state_bytes(group) for group in microbatch.groups
    )
    below_bytes = max(resting_bytes - links.host_bytes - task.budget_bytes, 0)
    ways = [way for way in (links.read, links.write) if way is not None]
    return max(device_us, *(below_bytes / way.bytes_per_us for way in ways), 0.0)


def _nearest(shorts: Sequence[Short]) -> Short | None:
    """What was nearest to fitting: settings that fit the device lack room on the host alone."""
    on_host = [one for one in shorts if one.tier == "host"]
    return min(on_host or shorts, key=lambda one: one.need_bytes, default=None)


@dataclass
class StepSearch:
    """One search: the best so far, and what was tried.

    Attributes
    ----------
    best : the fastest plan. judged : how many were. shorts : what others lacked.
    times_us : of each setting that was judged. became : what it was changed to, to fit.
    """

    task: StepTask
    microbatches: int
    most: int
    progress: Callable[[str], None]
    best: PlannedStep | None = None
    judged: int = 0
    shorts: list[Short] = field(default_factory=list[Short])
    times_us: dict[Setting, float] = field(default_factory=dict[Setting, float])
    became: dict[Setting, Setting] = field(default_factory=dict[Setting, Setting])

    def run(self) -> None:
        """A start for each order, then a climb from the best of them."""
        self.progress("saving as much as fits")
        found = [start for order in orders(self.microbatches) for start in starts(self.task, order)]
        found.sort(key=self._device_us)
        times = [(self.offer(start), k) for k, start in enumerate(found)]
        for time_us, k in sorted(times)[:STARTS]:
            if time_us < float("inf"):
                self._climb(self.became[found[k]])

    def offer(self, setting: Setting) -> float:
        """Judge a setting, and return its time.

        Infinite if it does not fit, or if what the device computes alone takes longer than the
        best plan.
        """
        if setting in self.times_us:
            return self.times_us[setting]
        best_us = self.best.simulation.time_us if self.best else float("inf")
        if self.judged >= self.most or self._device_us(setting) >= best_us:
            return float("inf")
        self.judged += 1
        found = self.take(fitted(self.task, setting, SOLVER, best_us))
        if isinstance(found, Short):
            self.times_us[setting] = float("inf")
            return float("inf")
        self.times_us[setting] = self.times_us[found.setting] = found.simulation.time_us
        self.became[setting] = found.setting
        return found.simulation.time_us

    def take(self, found: PlannedStep | Short) -> PlannedStep | Short:
        """Keep a plan if it is the best yet, or what one lacks; return it."""
        if isinstance(found, Short):
            self.shorts.append(found)
        elif self.best is None or found.simulation.time_us < self.best.simulation.time_us:
            self.best = found
            self.progress(
                f"judged {self.judged} plans, best {found.simulation.time_us / 1e6:.2f} s"
            )
        return found

    def _climb(self, now: Setting) -> None:
        """Change one choice at a time for as long as that helps."""
        time_us = self.times_us[now]
        changed: Setting | None = now
        while changed is not None and self.judged < self.most:
            better = (
                one for one in changes(self.task.microbatch, now) if self.offer(one) < time_us
            )
            changed = next(better, None)
            if changed is not None:
                now, time_us = self.became[changed], self.times_us[changed]

    def _device_us(self, setting: Setting) -> float:
        """Time of what the device computes, with what it computes again."""
        microbatch, total_us = self.task.microbatch, 0.0
        for one in setting.passes:
            layers = zip(microbatch.layers, one.options, strict=True)
            again_us = sum(layer.options[option].extra_us for layer, option in layers)
            total_us += one.microbatches * (microbatch.least_us + again_us)
        return total_us
