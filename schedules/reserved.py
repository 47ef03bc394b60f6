"""What a schedule makes torch's CUDA caching allocator take from the device, setting by setting.

A budget bounds the bytes that are live. The allocator takes more: it keeps the segments that it
once took, and a free range between two blocks that are used serves nothing larger. Recomputation
makes this worse, since what it brings back seldom has the size of what has just gone. The figures
come from a replay of the allocator (`remat.schedules.allocator`) over the buffers of the schedule.

They are predictions. Temporaries that an op takes beyond its workspace are in no graph. Resident
tensors are taken to lie in segments of their own, full to the last byte.
"""

from __future__ import annotations

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.allocator.replay import replay, trace_of_steps
from remat.schedules.allocator.settings import AllocatorSettings
from remat.schedules.buffers import Buffers, buffers_of
from remat.schedules.schedule import Schedule

N_STEPS = 3
"""Steps that are replayed. The second finds a cache that the first has cut up, and takes more."""
DEFAULT = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)


class Taken(msgspec.Struct, frozen=True):
    """Bytes of a device at their most, resident tensors included.

    Attributes
    ----------
    allocated_bytes : in blocks that are used, as ``torch.cuda.max_memory_allocated`` says. Blocks
        are larger than what is asked for, so it can be above the peak that `simulate` finds.
    reserved_bytes : taken from the device, as ``torch.cuda.max_memory_reserved`` says.
    """

    allocated_bytes: int
    reserved_bytes: int


class Reserved(msgspec.Struct, frozen=True):
    """What the allocator takes for a schedule.

    Attributes
    ----------
    default : with the allocator as it is. expandable : with
        ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
    """

    default: Taken
    expandable: Taken


def reserved_of(graph: TrainingGraph, schedule: Schedule) -> Reserved:
    """What the allocator takes for three steps of `schedule`, one after another.

    Each step drops its gradients before the next one begins.

    Raises
    ------
    ScheduleError : the schedule is of another graph, or `simulate` finds a rule broken.
    """
    buffers = buffers_of(graph, schedule)
    return Reserved(taken_for(buffers, DEFAULT), taken_for(buffers, EXPANDABLE))


def taken_for(buffers: Buffers, settings: AllocatorSettings, n_steps: int = N_STEPS) -> Taken:
    """What the allocator with these settings takes for `n_steps` equal steps of `buffers`.

    `settings` have no limit of capacity, so that every request is served.
    """
    found = replay(trace_of_steps(buffers, n_steps), settings)
    return Taken(
        allocated_bytes=buffers.resident_bytes + found.peak_allocated_bytes,
        reserved_bytes=buffers.resident_bytes + found.peak_reserved_bytes,
    )


def retries_within(
    buffers: Buffers, settings: AllocatorSettings, device_bytes: int, n_steps: int = N_STEPS
) -> int | None:
    """How often the allocator of a device of that size is full, and gives back all that is free.

    So a step runs where less is there than it would reserve, and waits for the device each time.
    None where even so a request finds no memory: the step runs out of it.
    """
    left_bytes = device_bytes - buffers.resident_bytes
    settings = msgspec.structs.replace(settings, capacity_bytes=left_bytes)
    found = replay(trace_of_steps(buffers, n_steps), settings)
    return found.n_retries if found.failed_request is None else None
