"""The fastest plan of a whole optimizer step over device, host and NVMe, by a search over configs.

Also called: heterogeneous memory training, offloaded training. Parameters, gradients and the
optimizer's state are values of one graph with the activations (`step_graph.py`), so
that order, recomputation and copies are weighed against each other.
Papers: the fixed configs of `NAMED_SYSTEMS` are points of this space, with their sources there.
Solves: the order of microbatches (passes), what each layer saves, how many layers have that on the
host, where states live, where gradients are added, what stays on the device between uses
(`config_changes.py`). Copies of each config are placed on the known trace (`planned_step.py`), and
`simulate` judges it. Which head or MLPs run in chunks is chosen around it (`step_planning.py`).
Optimal: within the configs that it tries, which are limited by their number; the bound says how
far the best may be from any plan whatever.
Cost: a start for each order, then a climb by one choice at a time; up to `most` plans are judged,
each in time near-linear in the ops of the step.
Shortcomings: all layers of a pass but the unequal ones save alike; parameters do not live on NVMe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from remat.graph_capture.errors import SolverError
from remat.schedules.simulate import gap_of
from remat.whole_step.config_changes import (
    changed_configs,
    config_that_fits,
    orders,
    saving_most,
)
from remat.whole_step.planned_step import PlannedStep, Residence, Short, StepTask
from remat.whole_step.step_config import NAMED_SYSTEMS, Pass, StepConfig, full_recompute

_SOLVER = "whole_step"
MOST_JUDGED = 200  # plans that are judged in one search
_STARTS = 2  # from how many of the orders the search climbs: the first often stays best
_Outcome = PlannedStep | Short | str
"""Of a named system: its plan, what it lacks, or why its bits are not eager's."""
_OTHER_DRAWS = (
    "microbatches would draw random numbers in turn, and eager draws them one after the other"
)


@dataclass(frozen=True)
class StepResult:
    """What a search found; no plan of the step, in any order, takes less than `lower_bound_us`.

    Without a `plan`, `short` is the tier that was nearest to enough, and the least found to do.
    `start_us` : of the fastest plan that the search began with.
    """

    plan: PlannedStep | None
    short: Short | None
    lower_bound_us: float
    judged: int
    systems: dict[str, _Outcome]
    start_us: float = float("inf")

    @property
    def gap(self) -> float | None:
        return gap_of(self.plan.simulation.time_us, self.lower_bound_us) if self.plan else None

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Of two, the lower is better: by time, or without a plan by what would do."""
        if self.plan is not None:
            return False, False, self.plan.simulation.time_us
        assert self.short is not None
        return True, self.short.tier == "device", self.short.need_bytes


def plan_whole_step(
    task: StepTask, microbatches: int, *, most: int = MOST_JUDGED, known: StepResult | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> StepResult:  # fmt: skip
    """Search for the fastest plan, and judge the named systems beside it.

    `most` plans are judged, which limits the search. `known`: of the same step in other chunks,
    with those systems. Then only what is faster is looked for, if the search begins faster.
    """
    if microbatches < 1 or most < 1:
        raise SolverError(
            f"ask for 1 microbatch and 1 plan or more, not {microbatches} microbatches and {most} "
            "plans"
        )
    # Judge the named systems first: the search then only looks for something faster.
    search, systems = _StepSearch(task, microbatches, most, progress), dict[str, _Outcome]()
    if known is not None:
        systems = known.systems
        search.best, search.judged, search.most = known.plan, known.judged, most + known.judged
    for name, system in NAMED_SYSTEMS.items() if known is None else ():
        progress(f"judging {system.title}")
        configs = [task.feasible(one) for one in system.configs(task.microbatch, microbatches)]
        # Microbatches in one pass would draw in turns.
        if task.microbatch.draws and any(one.microbatches > 1 for one in configs[0].passes):
            systems[name] = _OTHER_DRAWS
            continue
        found = [search.take(config_that_fits(task, config, name)) for config in configs]
        systems[name] = min(found, key=_time_us)
    search.run(float("inf") if known is None else known.start_us)
    # Configs that lack room only on the host fit the device, so they are nearer.
    shorts = [one for one in search.shorts if one.tier == "host"] or search.shorts
    short = None if search.best else min(shorts, key=lambda one: one.need_bytes, default=None)
    bound_us = least_step_us(task, microbatches)
    return StepResult(search.best, short, bound_us, search.judged, systems, search.start_us)


def _time_us(found: PlannedStep | Short) -> float:
    return found.simulation.time_us if isinstance(found, PlannedStep) else float("inf")


def least_step_us(task: StepTask, microbatches: int, saved_us: float = 0.0) -> float:
    """A time that no plan of the step beats, in any order: the device's work, or NVMe's.

    `saved_us` : what chunks save of a microbatch's time, at the most.
    """
    microbatch, links = task.microbatch, task.links
    # The device computes each microbatch once. State that fits neither device nor host starts on
    # NVMe, comes up once and goes back.
    device_us = microbatches * (microbatch.least_us - saved_us)
    # It waits for collectives: each parameter is gathered, each gradient reduced.
    device_us += microbatch.collectives_us(gathers=1, reductions=microbatches)
    resting_bytes = sum(g.parameter_bytes + task.update.state_bytes(g) for g in microbatch.groups)
    below_bytes = max(resting_bytes - links.host_bytes - task.budget_bytes, 0)
    ways = [way for way in (links.read, links.write) if way is not None]
    return max(device_us, *(below_bytes / way.bytes_per_us for way in ways), 0.0)


@dataclass
class _StepSearch:
    """One search: `shorts` is what configs lacked, `became` what each was changed to, to fit."""

    task: StepTask
    microbatches: int
    most: int
    progress: Callable[[str], None]
    best: PlannedStep | None = None
    judged: int = 0
    shorts: list[Short] = field(default_factory=list[Short])
    times_us: dict[StepConfig, float] = field(default_factory=dict[StepConfig, float])
    became: dict[StepConfig, StepConfig] = field(default_factory=dict[StepConfig, StepConfig])
    start_us: float = float("inf")

    def run(self, other_us: float) -> None:
        """`other_us` : of the start of another search, which this one has to beat."""
        self.progress("saving as much as fits")
        task, microbatch, found = self.task, self.task.microbatch, list[StepConfig]()
        for order in orders(self.microbatches):
            # Microbatches in one pass would draw in turns; eager's draw one after the other.
            if microbatch.draws and max(order) > 1:
                continue
            passes = tuple(Pass(count, full_recompute(microbatch)) for count in order)
            below = task.feasible(StepConfig(passes, ("host",) * len(microbatch.groups)))
            above = replace(below, state=("device",) * len(microbatch.groups))
            if Residence(task, above).peak_bytes <= task.budget_bytes:
                found.append(saving_most(task, above))
            found.append(saving_most(task, below))
        # Fastest on the device first: the others are judged only if they can still win.
        found.sort(key=self._device_us)
        times = [(self.offer(start), k) for k, start in enumerate(found)]
        self.start_us = min(times, default=(self.start_us, 0))[0]
        if other_us <= self.start_us < float("inf"):
            return
        for time_us, k in sorted(times)[:_STARTS]:
            if time_us < float("inf"):
                self._climb(self.became[found[k]])

    def offer(self, config: StepConfig) -> float:
        """Judge a config, and return its time; infinite if it does not fit, or cannot be better."""
        if config in self.times_us:
            return self.times_us[config]
        best_us = self.best.simulation.time_us if self.best else float("inf")
        # The device's computations alone bound the time of any plan of this config.
        if self.judged >= self.most or self._device_us(config) >= best_us:
            return float("inf")
        self.judged += 1
        found = self.take(config_that_fits(self.task, config, _SOLVER, best_us))
        if isinstance(found, Short):
            self.times_us[config] = float("inf")
            return float("inf")
        self.times_us[config] = self.times_us[found.config] = found.simulation.time_us
        self.became[config] = found.config
        return found.simulation.time_us

    def take(self, found: PlannedStep | Short) -> PlannedStep | Short:
        if isinstance(found, Short):
            self.shorts.append(found)
        elif self.best is None or found.simulation.time_us < self.best.simulation.time_us:
            self.best, best_s = found, found.simulation.time_us / 1e6
            self.progress(f"judged {self.judged} plans, best {best_s:.2f} s")
        return found

    def _climb(self, now: StepConfig) -> None:
        time_us = self.times_us[now]
        changed: StepConfig | None = now
        while changed is not None and self.judged < self.most:
            # Take the first improvement, since each trial is a simulation.
            others = changed_configs(self.task, now)
            changed = next((one for one in others if self.offer(one) < time_us), None)
            if changed is not None:
                now, time_us = self.became[changed], self.times_us[changed]

    def _device_us(self, config: StepConfig) -> float:
        microbatch, total_us = self.task.microbatch, 0.0
        for one in config.passes:
            layers = zip(microbatch.layers, one.options, strict=True)
            again_us = sum(layer.options[option].extra_us for layer, option in layers)
            total_us += one.microbatches * (microbatch.least_us + again_us)
        return total_us
