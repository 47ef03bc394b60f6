"""Settings brought into the tiers that there are: state goes to NVMe until the host has room."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from remat.graph_capture.links import Tier
from remat.graph_capture.optimizer_step.microbatch import Microbatch
from remat.solver.whole_step.planned_step import PlannedStep, Short, StepTask, planned_step
from remat.solver.whole_step.setting import Setting

TRIES = 12
"""How often a setting is changed for the host's sake before it is given up."""


def update_order(microbatch: Microbatch) -> list[int]:
    """Groups in the order in which backward makes their gradients whole."""
    given = [at for layer in reversed(microbatch.layers) for at in layer.gives]
    return [at for at in given if microbatch.groups[at].trained]


def with_state_on_nvme(microbatch: Microbatch, setting: Setting, count: int) -> Setting:
    """The setting with the states of `count` groups on NVMe.

    These are the first that are updated, or are spread evenly over the updates, so that one is
    read while the host updates others.
    """
    movable = [at for at in update_order(microbatch) if setting.state[at] != "device"]
    count = min(count, len(movable))
    evenly = [i * len(movable) // count for i in range(count)]
    places = evenly if setting.spread else range(count)
    below = {movable[place] for place in places}
    state: list[Tier] = [
        tier if tier == "device" else "nvme" if at in below else "host"
        for at, tier in enumerate(setting.state)
    ]
    return msgspec.structs.replace(setting, state=tuple(state))


def on_nvme(setting: Setting) -> int:
    """How many groups have their state on NVMe."""
    return setting.state.count("nvme")


def fitted(
    task: StepTask, setting: Setting, name: str, limit_us: float = float("inf")
) -> PlannedStep | Short:
    """The setting planned, with as little changed as the host asks for.

    Where the host lacks room, states go to NVMe, in fewer slots if need be; without one, gradients
    stay on the device. What then still lacks room is named. `limit_us` is as of `planned_step`.
    """
    found = planned_step(task, setting, name, limit_us)
    for _ in range(TRIES):
        if isinstance(found, PlannedStep) or found.tier != "host":
            break
        changed = _relieved(task, setting, found)
        if changed is None:
            break
        setting = changed
        found = planned_step(task, setting, name, limit_us)
    return found


def _relieved(task: StepTask, setting: Setting, short: Short) -> Setting | None:
    """The setting with less on the host; None where nothing more can go."""
    microbatch, order = task.microbatch, update_order(task.microbatch)
    states = sorted(task.update.state_bytes(microbatch.groups[at]) for at in order)
    over_bytes = short.need_bytes - task.links.host_bytes
    usual_bytes = states[len(states) // 2] if states else 0
    if task.links.write is not None and usual_bytes:
        count = on_nvme(setting) + -(-over_bytes // usual_bytes)
        changed = with_state_on_nvme(microbatch, setting, count)
        if changed != setting and _nvme_has_room(task, changed):
            return changed
        if on_nvme(setting) and setting.slots > 1:
            return msgspec.structs.replace(setting, slots=setting.slots - 1)
    kept = more_gradients_kept(microbatch, setting)
    return None if kept == setting else kept


def _nvme_has_room(task: StepTask, setting: Setting) -> bool:
    groups = zip(task.microbatch.groups, setting.state, strict=True)
    need_bytes = sum(task.update.state_bytes(group) for group, tier in groups if tier == "nvme")
    return need_bytes <= task.links.nvme_bytes


def more_gradients_kept(microbatch: Microbatch, setting: Setting) -> Setting:
    """The setting with the gradients of one more group on the device, the largest first."""
    if len(setting.passes) == 1:
        return setting
    order = gradients_by_size(microbatch)
    rest = [at for at in order if at not in setting.kept_gradients]
    kept = (*setting.kept_gradients, *rest[:1])
    return msgspec.structs.replace(setting, kept_gradients=kept)


def gradients_by_size(microbatch: Microbatch) -> list[int]:
    """Groups with gradients, the largest first; of equal ones, the first that is updated."""
    order: Sequence[int] = update_order(microbatch)
    return sorted(order, key=lambda at: -microbatch.groups[at].gradient_bytes)
