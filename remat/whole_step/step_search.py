"""The fastest plan of a whole optimizer step over device, host and NVMe, by a search over configs.

Also called: heterogeneous memory training, offloaded training. Parameters, gradients and the
optimizer's state are values of one graph with the activations (`step_graph.py`), so
that order, recomputation and copies are weighed against each other.
Papers: the fixed configs of `NAMED_SYSTEMS` are points of this space, with their sources there.
Solves: which head or MLPs run in chunks, the order of microbatches (passes), what each layer saves,
how many layers have that on the host, where states live, where gradients are added, what stays on
the device between uses. Copies of each config are placed on the known trace (`planned_step.py`),
and `simulate` judges it.
Optimal: within the configs that it tries, which are limited by their number; the bound says how
far the best may be from any plan whatever.
Cost: a start for each order, then a climb by one choice at a time; up to `most` plans are judged,
each in time near-linear in the ops of the step.
Shortcomings: all layers of a pass but the unequal ones save alike; parameters do not live on NVMe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from remat.budgets import parse_budget
from remat.formats import budget_text
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Tier, TrainingGraph
from remat.schedules.derived import fastest_us, in_chunks, unchunked
from remat.schedules.schedule import ChunkedRegion
from remat.schedules.simulate import gap_of
from remat.whole_step.microbatch import Layer, Microbatch
from remat.whole_step.planned_step import PlannedStep, Residence, Short, StepTask, planned_step
from remat.whole_step.step_config import NAMED_SYSTEMS, Pass, StepConfig, full_recompute

_TRIES = 12  # how often a config is changed for the host's sake before it is given up


def _update_order(microbatch: Microbatch) -> list[int]:
    """Groups in the order in which backward makes their gradients whole."""
    given = [at for layer in reversed(microbatch.layers) for at in layer.gives]
    return [at for at in given if microbatch.groups[at].trained]


def _with_state_on_nvme(task: StepTask, config: StepConfig, count: int) -> StepConfig:
    """With the states of `count` groups on NVMe, or those that fit: the first updated or spread."""
    movable = [at for at in _update_order(task.microbatch) if config.state[at] != "device"]
    sizes = [task.update.state_bytes(task.microbatch.groups[at]) for at in movable]
    # If spread out, one state is read while the host updates others.
    ways = (
        [i * len(movable) // n for i in range(n)] if config.spread else range(n)
        for n in range(min(count, len(movable)), -1, -1)
    )
    fit = (way for way in ways if sum(sizes[k] for k in way) <= task.links.nvme_bytes)
    below = {movable[k] for k in next(fit)}
    state: list[Tier] = [
        tier if tier == "device" else "nvme" if at in below else "host"
        for at, tier in enumerate(config.state)
    ]
    return replace(config, state=tuple(state))


def _fitted(
    task: StepTask, config: StepConfig, name: str, limit_us: float = float("inf")
) -> PlannedStep | Short:
    """The config planned, with as little changed as the host asks for; or what it lacks."""
    found = planned_step(task, config, name, limit_us)
    for _ in range(_TRIES):
        if isinstance(found, PlannedStep) or found.tier != "host":
            break
        changed = _relieved(task, config, found)
        if changed is None:
            break
        config = changed
        found = planned_step(task, config, name, limit_us)
    return found


def _relieved(task: StepTask, config: StepConfig, short: Short) -> StepConfig | None:
    microbatch, order = task.microbatch, _update_order(task.microbatch)
    states = sorted(task.update.state_bytes(microbatch.groups[at]) for at in order)
    over_bytes = short.need_bytes - task.links.host_bytes
    # An estimate of how many states make enough room: the median state is the usual layer's.
    usual_bytes = states[len(states) // 2] if states else 0
    # First move states, then hold fewer of them on the host at once.
    if task.links.write is not None and usual_bytes:
        below = config.state.count("nvme")
        count = below + -(-over_bytes // usual_bytes)
        changed = _with_state_on_nvme(task, config, count)
        if changed != config:
            return changed
        if below and config.slots > 1:
            return replace(config, slots=config.slots - 1)
    # Gradients kept on the device take no room on the host.
    kept = _more_gradients_kept(microbatch, config)
    return None if kept == config else kept


def _more_gradients_kept(microbatch: Microbatch, config: StepConfig) -> StepConfig:
    if len(config.passes) == 1:  # one pass adds up its own gradients
        return config
    rest = [at for at in _gradients_by_size(microbatch) if at not in config.kept_gradients]
    return replace(config, kept_gradients=(*config.kept_gradients, *rest[:1]))


def _gradients_by_size(microbatch: Microbatch) -> list[int]:
    """Groups with gradients, the largest first; of equal ones, the first that is updated."""
    return sorted(_update_order(microbatch), key=lambda at: -microbatch.groups[at].gradient_bytes)


_Order = tuple[int, ...]  # microbatches of each pass


def orders(microbatches: int) -> list[_Order]:
    """Ways to cut microbatches into passes: equal ones, and small ones before a larger last one."""
    found: dict[_Order, None] = {}
    for size in range(1, microbatches + 1):
        if microbatches % size == 0:
            found[(size,) * (microbatches // size)] = None
    # A large last pass completes gradients slowly, so updates hide behind it; small passes before
    # it hold few activations.
    for size in (1, 2):
        for last in range(size + 1, microbatches):
            if (microbatches - last) % size == 0:
                found[(*(size,) * ((microbatches - last) // size), last)] = None
    return list(found)


def _ladder(layer: Layer) -> list[int]:
    """Options of a layer that save less and less and take more and more time."""
    found = list[int]()
    for i, option in enumerate(layer.options):
        if not found or option.saved_bytes < layer.options[found[-1]].saved_bytes:
            found.append(i)
    return found


def _options_at(microbatch: Microbatch, limit_bytes: int) -> tuple[int, ...]:
    """The fastest option of each layer that saves at most so much; else the least of it."""
    found = list[int]()
    for layer in microbatch.layers:
        steps = _ladder(layer)
        fitting = (i for i in steps if layer.options[i].saved_bytes <= limit_bytes)
        found.append(next(fitting, steps[-1]))
    return tuple(found)


def _enriched(task: StepTask, config: StepConfig) -> StepConfig:
    """The config with as much saved as fits: in the passes before the last, then in it."""
    sizes = sorted({o.saved_bytes for one in task.microbatch.layers for o in one.options})[::-1]
    are_equal = len({one.microbatches for one in config.passes}) == 1
    # Equal passes save alike. A larger last pass holds more, so it is filled separately.
    for places in ((True, True),) if are_equal else ((True, False), (False, True)):
        low, high = 0, len(sizes) - 1
        # Sizes fall: the first that fits saves most.
        while low < high:
            middle = (low + high) // 2
            richer = _with_options(config, _options_at(task.microbatch, sizes[middle]), places)
            few = richer.passes[:2] + richer.passes[2:][-1:]  # the passes between equal the first
            if Residence(task, replace(richer, passes=few)).peak_bytes <= task.budget_bytes:
                high = middle
            else:
                low = middle + 1
        config = _with_options(config, _options_at(task.microbatch, sizes[low]), places)
    return config


def _with_options(config: StepConfig, options: tuple[int, ...], ends: Sequence[bool]) -> StepConfig:
    is_asked = [*[ends[0]] * (len(config.passes) - 1), ends[1]]
    passes = zip(config.passes, is_asked, strict=True)
    changed = (replace(one, options=options) if asked else one for one, asked in passes)
    return replace(config, passes=tuple(changed))


_SHARES = (1, 2, 8)  # what is saved changes in all layers, in half of them or in an eighth
_PARTS = 4  # hosting goes up and down by this part of the layers
_COUNTS = (1, 4)  # by how many groups a choice of groups grows or shrinks


def _neighbours(task: StepTask, config: StepConfig) -> Iterator[StepConfig]:
    microbatch = task.microbatch
    # Saving more comes first, since the device's time matters most.
    yield from _saving_otherwise(microbatch, config)
    yield from _hosting_otherwise(microbatch, config)
    yield from _updating_otherwise(microbatch, config)
    yield from _resting_otherwise(task, config)
    yield replace(config, keeping="stream" if config.keeping == "near" else "near")


def _saving_otherwise(microbatch: Microbatch, config: StepConfig) -> Iterator[StepConfig]:
    """More or less saved: in all passes, the first ones or the last, in all layers or a part."""
    n_passes = len(config.passes)
    passes = [range(n_passes)]
    if n_passes > 1:
        passes += [range(n_passes - 1), range(n_passes - 1, n_passes)]
    for step in (-1, 1):
        for which in passes:
            for part in _SHARES:
                changed = list(config.passes)
                for at in which:
                    layers = _next_layers(microbatch, changed[at].options, part, step)
                    options = _moved_along(microbatch, changed[at].options, layers, step)
                    changed[at] = replace(changed[at], options=options)
                if tuple(changed) != config.passes:
                    yield replace(config, passes=tuple(changed))


def _next_layers(microbatch: Microbatch, options: Sequence[int], part: int, step: int) -> list[int]:
    """One layer of so many, those first that save least for less time, or most for more."""
    layers = microbatch.layers
    saved = [layer.options[i].saved_bytes for layer, i in zip(layers, options, strict=True)]
    # The last layer, which turns, saves nothing.
    able = [at for at, layer in enumerate(layers) if len(layer.options) > 1 and not layer.turns]
    # On ties the last layer, whose values are held for the shortest time.
    able.sort(key=lambda at: (-step * saved[at], -at))
    return able[: max(len(able) // part, 1)]


def _moved_along(
    microbatch: Microbatch, options: Sequence[int], layers: Sequence[int], step: int
) -> tuple[int, ...]:
    """Options in which those layers save one step more (-1) or less (1), where there is one."""
    found = list(options)
    for at in layers:
        steps = _ladder(microbatch.layers[at])
        place = steps.index(found[at]) + step if found[at] in steps else -1
        if 0 <= place < len(steps):
            found[at] = steps[place]
    return tuple(found)


def _hosting_otherwise(microbatch: Microbatch, config: StepConfig) -> Iterator[StepConfig]:
    most = len(microbatch.layers) - 1
    part = max(most // _PARTS, 1)
    for which in ({*range(len(config.passes))}, {len(config.passes) - 1}):
        # Hosting more makes room on the device, so a config that uses it is tried along with it.
        for step, richer in ((part, True), (part, False), (-part, False)):
            passes = list(config.passes)
            for at in which:
                one = passes[at]
                hosted = min(max(one.hosted + step, 0), most)
                layers = range(hosted) if richer else range(0)
                options = _moved_along(microbatch, one.options, layers, -1)
                passes[at] = replace(one, hosted=hosted, options=options)
            if tuple(passes) != config.passes:
                yield replace(config, passes=tuple(passes))


def _updating_otherwise(microbatch: Microbatch, config: StepConfig) -> Iterator[StepConfig]:
    if len(config.passes) > 1:
        yield _more_gradients_kept(microbatch, config)
        yield replace(config, kept_gradients=config.kept_gradients[:-1])
        if config.updates == "host":  # otherwise the host adds nothing
            sums: Tier = "host" if config.sums == "device" else "device"
            yield replace(config, sums=sums)
        largest = tuple(_gradients_by_size(microbatch)[: len(config.kept_gradients) + _COUNTS[-1]])
        yield replace(config, kept_gradients=largest)
    # The device makes all updates already.
    if config.updates == "device":
        return
    for count in (*_COUNTS, *(-one for one in _COUNTS)):
        yield replace(config, device_updates=max(config.device_updates + count, 0))


def _resting_otherwise(task: StepTask, config: StepConfig) -> Iterator[StepConfig]:
    if below := config.state.count("nvme"):
        for slots in (config.slots + 1, config.slots - 1):
            yield replace(config, slots=max(slots, 1))
        other = replace(config, spread=not config.spread)
        yield _with_state_on_nvme(task, other, below)
        for count in (1, 2, 4, -1, -2):
            if below + count > 0:
                yield _with_state_on_nvme(task, config, below + count)
    for count in _COUNTS:
        yield _on_device(task.microbatch, config, config.state.count("device") + count)
        yield _on_device(task.microbatch, config, max(config.state.count("device") - count, 0))


def _on_device(microbatch: Microbatch, config: StepConfig, count: int) -> StepConfig:
    """The config with the last `count` groups that are updated wholly on the device."""
    above = set(_update_order(microbatch)[::-1][:count])
    state: list[Tier] = [
        "device" if at in above else "host" if tier == "device" else tier
        for at, tier in enumerate(config.state)
    ]
    return replace(config, state=tuple(state))


_SOLVER = "whole_step"
_MOST = 200  # plans that are judged in one search
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


class _Found(NamedTuple):
    """Of the graph in these chunks: its layers, and the outcome.

    Without a plan, `enough` has sizes of tiers, as they are printed, with which one was found.
    """

    task: StepTask
    result: StepResult
    chunks: tuple[ChunkedRegion, ...] = ()
    enough: tuple[Short, ...] = ()

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Of two, the lower is better: by time, or without a plan by what would do."""
        if (plan := self.result.plan) is not None:
            return False, False, plan.simulation.time_us
        short = self.result.short
        assert short is not None
        return True, short.tier == "device", short.need_bytes


_TaskOf = Callable[[TrainingGraph], StepTask]
_GROWTHS = (1.0, 1.0, 1.0, 1.1, 1.2, 1.5, 2.0, 4.0)
"""A room that is too small grows by this at least: other room, other configs, other needs."""


def fastest_in_chunks(
    graph: TrainingGraph, task_of: _TaskOf, microbatches: int,
    progress: Callable[[str], None] = lambda _: None,
) -> _Found:  # fmt: skip
    """As of `plan_whole_step`, with one of the graph's regions in chunks where that is faster."""
    best = _searched(graph, task_of, microbatches, _MOST, progress)
    if best.result.short is None:
        return best
    progress("looking for room that is enough")
    return best._replace(enough=_enough(graph, task_of, microbatches, best.result.short))


def _enough(
    graph: TrainingGraph, task_of: _TaskOf, microbatches: int, short: Short | None
) -> tuple[Short, ...]:
    rooms, starts = dict[str, int](), len(orders(microbatches))  # a plan, not the fastest
    for growth in _GROWTHS:
        if short is None:
            break
        need_bytes = max(short.need_bytes, int(growth * rooms.get(short.tier, 0)))
        rooms[short.tier] = parse_budget(budget_text(need_bytes)).size_bytes
        found = _searched(graph, lambda one: task_of(one).with_rooms(rooms), microbatches, starts)
        if found.result.plan is not None:
            return tuple(Short(tier, size_bytes) for tier, size_bytes in sorted(rooms.items()))
        short = found.result.short
    return ()


def _searched(
    graph: TrainingGraph, task_of: _TaskOf, microbatches: int, most: int,
    progress: Callable[[str], None] = lambda _: None,
) -> _Found:  # fmt: skip
    task = task_of(unchunked(graph))
    best = _Found(task, plan_whole_step(task, microbatches, most=most, progress=progress))
    saved_us = graph.time_us - fastest_us(graph)
    bound_us = least_step_us(task, microbatches, saved_us)
    for region in graph.regions:
        for choice in region.choices:
            chunks = (ChunkedRegion(region.name, choice.chunks, choice.exact),)
            task = task_of(in_chunks(graph, chunks))
            result = plan_whole_step(
                task, microbatches, most=most, known=best.result, progress=progress
            )
            if (found := _Found(task, result, chunks)).rank >= best.rank:
                break  # more of them take longer still
            best = found
    return best._replace(result=dataclasses.replace(best.result, lower_bound_us=bound_us))


def plan_whole_step(
    task: StepTask, microbatches: int, *, most: int = _MOST, known: StepResult | None = None,
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
        found = [search.take(_fitted(task, config, name)) for config in configs]
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
                found.append(_enriched(task, above))
            found.append(_enriched(task, below))
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
        found = self.take(_fitted(self.task, config, _SOLVER, best_us))
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
            others = _neighbours(self.task, now)
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
