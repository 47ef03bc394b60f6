"""What a climb tries next: the settings that differ from one by a single choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from remat.graph_capture.links import Tier
from remat.graph_capture.optimizer_step.microbatch import Microbatch
from remat.solver.whole_step.fitting import (
    gradients_by_size,
    more_gradients_kept,
    on_nvme,
    update_order,
    with_state_on_nvme,
)
from remat.solver.whole_step.setting import Setting
from remat.solver.whole_step.starts import ladder

SHARES = (1, 2, 8)
"""What is saved changes in all layers, in half of them or in an eighth."""
PARTS = 4
"""Hosting goes up and down by this part of the layers."""
COUNTS = (1, 4)
"""By how many groups a choice of groups grows or shrinks."""


def changes(microbatch: Microbatch, setting: Setting) -> Iterator[Setting]:
    """Settings one choice away; those that save more come first, since the device's time leads."""
    yield from _saving_otherwise(microbatch, setting)
    yield from _hosting_otherwise(microbatch, setting)
    yield from _updating_otherwise(microbatch, setting)
    yield from _resting_otherwise(microbatch, setting)
    yield msgspec.structs.replace(
        setting, keeping="stream" if setting.keeping == "near" else "near"
    )


def _saving_otherwise(microbatch: Microbatch, setting: Setting) -> Iterator[Setting]:
    """More or less saved: in all passes, the first ones or the last, in all layers or a part.

    Layers that save the least are the first to save more, and the other way round; of equal ones
    the last, whose values are held for the shortest time.
    """
    n_passes = len(setting.passes)
    passes = [range(n_passes)]
    if n_passes > 1:
        passes += [range(n_passes - 1), range(n_passes - 1, n_passes)]
    for step in (-1, 1):
        for which in passes:
            for part in SHARES:
                changed = list(setting.passes)
                for at in which:
                    layers = _next_layers(microbatch, changed[at].options, part, step)
                    options = _moved_along(microbatch, changed[at].options, layers, step)
                    changed[at] = msgspec.structs.replace(changed[at], options=options)
                if tuple(changed) != setting.passes:
                    yield msgspec.structs.replace(setting, passes=tuple(changed))


def _next_layers(microbatch: Microbatch, options: Sequence[int], part: int, step: int) -> list[int]:
    """One layer of so many, those first that save least for less time, or most for more."""
    layers = microbatch.layers
    saved = [layer.options[i].saved_bytes for layer, i in zip(layers, options, strict=True)]
    able = [at for at, layer in enumerate(layers) if len(layer.options) > 1 and not layer.turns]
    able.sort(key=lambda at: (-step * saved[at], -at))
    return able[: max(len(able) // part, 1)]


def _moved_along(
    microbatch: Microbatch, options: Sequence[int], layers: Sequence[int], step: int
) -> tuple[int, ...]:
    """Options in which those layers save one step more (-1) or less (1), where there is one."""
    found = list(options)
    for at in layers:
        steps = ladder(microbatch.layers[at])
        place = steps.index(found[at]) + step if found[at] in steps else -1
        if 0 <= place < len(steps):
            found[at] = steps[place]
    return tuple(found)


def _hosting_otherwise(microbatch: Microbatch, setting: Setting) -> Iterator[Setting]:
    """More or fewer layers whose saved values are on the host meanwhile.

    More of them make room on the device, so that with this choice one that fills it is tried too.
    """
    most = len(microbatch.layers) - 1
    part = max(most // PARTS, 1)
    for which in ({*range(len(setting.passes))}, {len(setting.passes) - 1}):
        for step, richer in ((part, True), (part, False), (-part, False)):
            passes = list(setting.passes)
            for at in which:
                one = passes[at]
                hosted = min(max(one.hosted + step, 0), most)
                layers = range(hosted) if richer else range(0)
                options = _moved_along(microbatch, one.options, layers, -1)
                passes[at] = msgspec.structs.replace(one, hosted=hosted, options=options)
            if tuple(passes) != setting.passes:
                yield msgspec.structs.replace(setting, passes=tuple(passes))


def _updating_otherwise(microbatch: Microbatch, setting: Setting) -> Iterator[Setting]:
    """Gradients added elsewhere or kept, and more or fewer updates on the device."""
    if len(setting.passes) > 1:
        yield more_gradients_kept(microbatch, setting)
        yield msgspec.structs.replace(setting, kept_gradients=setting.kept_gradients[:-1])
        if setting.updates == "host":
            sums: Tier = "host" if setting.sums == "device" else "device"
            yield msgspec.structs.replace(setting, sums=sums)
        largest = tuple(gradients_by_size(microbatch)[: len(setting.kept_gradients) + COUNTS[-1]])
        yield msgspec.structs.replace(setting, kept_gradients=largest)
    if setting.updates == "device":
        return
    for count in (*COUNTS, *(-one for one in COUNTS)):
        yield msgspec.structs.replace(
            setting, device_updates=max(setting.device_updates + count, 0)
        )


def _resting_otherwise(microbatch: Microbatch, setting: Setting) -> Iterator[Setting]:
    """States elsewhere between steps, and more or fewer slots for those on NVMe."""
    below = on_nvme(setting)
    if below:
        for slots in (setting.slots + 1, setting.slots - 1):
            yield msgspec.structs.replace(setting, slots=max(slots, 1))
        other = msgspec.structs.replace(setting, spread=not setting.spread)
        yield with_state_on_nvme(microbatch, other, below)
        for count in (1, 2, 4, -1, -2):
            if below + count > 0:
                yield with_state_on_nvme(microbatch, setting, below + count)
    for count in COUNTS:
        yield _on_device(microbatch, setting, setting.state.count("device") + count)
        yield _on_device(microbatch, setting, max(setting.state.count("device") - count, 0))


def _on_device(microbatch: Microbatch, setting: Setting, count: int) -> Setting:
    """The setting with the last `count` groups that are updated wholly on the device."""
    above = set(update_order(microbatch)[::-1][:count])
    state: list[Tier] = [
        "device" if at in above else "host" if tier == "device" else tier
        for at, tier in enumerate(setting.state)
    ]
    return msgspec.structs.replace(setting, state=tuple(state))
