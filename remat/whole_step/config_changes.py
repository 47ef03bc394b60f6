"""Configs of a whole step, and what one choice makes of one: where a search begins and looks next.

A config that the host is too small for is changed until it fits: states go to NVMe, fewer of them
are on the host at once, gradients stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from remat.graph_capture.graph import Tier
from remat.whole_step.microbatch import Layer, Microbatch
from remat.whole_step.planned_step import PlannedStep, Residence, Short, StepTask, planned_step
from remat.whole_step.step_config import StepConfig

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


def config_that_fits(
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


def saving_most(task: StepTask, config: StepConfig) -> StepConfig:
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


def changed_configs(task: StepTask, config: StepConfig) -> Iterator[StepConfig]:
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
