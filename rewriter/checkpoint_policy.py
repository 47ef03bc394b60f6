"""A schedule as a policy for torch's own selective activation checkpointing.

Torch recomputes the rest of a checkpointed function at once: around a whole model that peaks as
high as none, so each checkpointed module gets its own. Policies see ops, not modules: the n-th run
of an op in a module is the n-th in the graph. A wrong count costs memory or time, never bits.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from remat.graph_capture.errors import RewriteError, option
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.kept_in_forward import kept_occurrences
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import require_valid


class OccurrencePolicy:
    """A policy for `create_selective_checkpoint_contexts` around one module.

    It saves the runs of ops that the schedule keeps (`kept`, for each run in forward) and counts
    one forward. `contexts` begins a fresh count: ``checkpoint(..., context_fn=policy.contexts)``.
    """

    def __init__(self, kept: Mapping[str, tuple[bool, ...]], *, is_fresh: bool = False) -> None:
        self.kept = kept
        self.contexts = functools.partial(_contexts, kept)  # torch.compile takes no method here
        self._is_fresh = is_fresh
        self._runs: Counter[tuple[bool, str]] = Counter()

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del args, kwargs
        packet, _, overload = str(op).rpartition(".")  # functional graphs have relu for relu_
        name, in_place = f"{packet.removesuffix('_')}.{overload}", packet.endswith("_")
        runs, i = self.kept.get(name, ()), self._runs[ctx.is_recompute, name]
        self._runs[ctx.is_recompute, name] += 1  # recomputation runs the ops again: counted apart
        if runs and i >= len(runs) and not self._is_fresh:
            raise RewriteError(
                "pass context_fn=policy.contexts to checkpoint, which starts over at each "
                f"forward: {op} runs more often than the {len(runs)} times of the planned "
                "forward, and this policy counts one"
            )
        # Later ops may write to it in place. What the graph lacks, such as views, is recomputed.
        is_kept = i < len(runs) and runs[i] and not in_place
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(
    kept: Mapping[str, tuple[bool, ...]],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(OccurrencePolicy(kept, is_fresh=True))


def checkpoint_policy(
    graph: TrainingGraph, schedule: Schedule, module: str = ""
) -> OccurrencePolicy:
    if schedule.chunks:
        raise RewriteError(
            f"train with Plan.apply, or plan with {option('split', 'none')}: this plan runs "
            f"{schedule.chunks[0].region} in chunks, which torch's checkpointing cannot"
        )
    if schedule.levers:
        raise RewriteError(
            f"train with Plan.apply, or plan without {schedule.levers[0].lever}: torch's "
            "checkpointing cannot run it"
        )
    require_valid(graph, schedule)
    if schedule.moves:
        raise RewriteError(
            "train with Plan.apply, or solve without offloading: this plan copies values to the "
            "host, and torch's checkpointing does not"
        )
    if changed := [name for name in graph.forward_outputs if name not in graph.outputs]:
        places = {op.name: op.module or op.name for op in graph.ops}
        producers = (graph.value_by_name[name].producer for name in changed)
        where = ", ".join(dict.fromkeys(places.get(name, name) for name in producers))
        raise RewriteError(
            "train with Plan.apply, which changes buffers once: forward changes buffers or its "
            f"batch, in {where}, and torch's checkpointing would do so again"
        )
    if not (kept := kept_occurrences(graph, schedule, module)):
        paths = ", ".join(list(dict.fromkeys(op.module for op in graph.ops if op.module))[:5])
        raise RewriteError(f"no op of the graph is in module {module!r}: name one such as {paths}")
    return OccurrencePolicy(kept)
