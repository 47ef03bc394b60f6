"""Where the search for a whole step begins: orders of microbatches, each saving as much as fits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from remat.graph_capture.optimizer_step.microbatch import Layer, Microbatch
from remat.solver.whole_step.named_systems import full_recompute
from remat.solver.whole_step.planned_step import StepTask, device_peak_bytes
from remat.solver.whole_step.setting import Pass, Setting

Order = tuple[int, ...]
"""Microbatches of each pass."""


def orders(microbatches: int) -> list[Order]:
    """Ways to cut microbatches into passes: equal ones, and small ones before a larger last one.

    A large last pass makes gradients whole slowly, so that updates hide behind it; small passes
    before it hold few activations.
    """
    found: dict[Order, None] = {}
    for size in range(1, microbatches + 1):
        if microbatches % size == 0:
            found[(size,) * (microbatches // size)] = None
    for size in (1, 2):
        for last in range(size + 1, microbatches):
            if (microbatches - last) % size == 0:
                found[(*(size,) * ((microbatches - last) // size), last)] = None
    return list(found)


def ladder(layer: Layer) -> list[int]:
    """Options of a layer that save less and less and take more and more time."""
    found = list[int]()
    for i, option in enumerate(layer.options):
        if not found or option.saved_bytes < layer.options[found[-1]].saved_bytes:
            found.append(i)
    return found


def options_at(microbatch: Microbatch, limit_bytes: int) -> tuple[int, ...]:
    """The fastest option of each layer that saves at most so much; else the least of it."""
    return tuple(
        next(
            (i for i in ladder(layer) if layer.options[i].saved_bytes <= limit_bytes),
            ladder(layer)[-1],
        )
        for layer in microbatch.layers
    )


def starts(task: StepTask, order: Order) -> list[Setting]:
    """Settings of an order: all state on the host, and all on the device if that fits."""
    microbatch = task.microbatch
    if microbatch.draws and max(order) > 1:
        # Microbatches of one pass would draw by turns, and eager's draw one after the other.
        return []
    passes = tuple(Pass(count, full_recompute(microbatch)) for count in order)
    below = task.feasible(Setting(passes, ("host",) * len(microbatch.groups)))
    above = msgspec.structs.replace(below, state=("device",) * len(microbatch.groups))
    found = [above] if device_peak_bytes(task, above) <= task.budget_bytes else []
    return [_enriched(task, setting) for setting in (*found, below)]


def _enriched(task: StepTask, setting: Setting) -> Setting:
    """The setting with as much saved as fits: in the passes before the last, then in it."""
    sizes = sorted({o.saved_bytes for one in task.microbatch.layers for o in one.options})[::-1]
    are_equal = len({one.microbatches for one in setting.passes}) == 1
    for places in ((True, True),) if are_equal else ((True, False), (False, True)):
        low, high = 0, len(sizes) - 1
        while low < high:
            middle = (low + high) // 2
            richer = _with_options(setting, options_at(task.microbatch, sizes[middle]), places)
            if _fits(task, richer):
                high = middle
            else:
                low = middle + 1
        setting = _with_options(setting, options_at(task.microbatch, sizes[low]), places)
    return setting


def _with_options(setting: Setting, options: tuple[int, ...], places: Sequence[bool]) -> Setting:
    """The setting with other options in all passes but the last, and in the last, as asked."""
    leading, last = (options if asked else None for asked in places)
    passes = [
        one if leading is None else msgspec.structs.replace(one, options=leading)
        for one in setting.passes[:-1]
    ]
    end = setting.passes[-1]
    end = end if last is None else msgspec.structs.replace(end, options=last)
    return msgspec.structs.replace(setting, passes=(*passes, end))


def _fits(task: StepTask, setting: Setting) -> bool:
    """Whether the first two passes and the last fit the device: those between are as the first."""
    few = setting.passes[:2] + setting.passes[2:][-1:]
    return (
        device_peak_bytes(task, msgspec.structs.replace(setting, passes=few)) <= task.budget_bytes
    )
