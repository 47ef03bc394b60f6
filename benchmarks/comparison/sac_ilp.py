"""torch's own integer program for selective checkpointing: `torch.distributed._tools.sac_ilp`.

Its estimators time ops by CUDA events, so it runs on a GPU alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator, SACStats
from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from benchmarks.comparison.methods import DoesNotApplyError, Variant, around
from benchmarks.comparison.models import Trainee

GIB = 2**30


def ilp(trainee: Trainee, budget_bytes: int, device: str) -> Variant:
    """Blocks checkpointed as the integer program decides, op by op within each."""
    if not torch.cuda.is_available():
        raise DoesNotApplyError("its estimators of time need CUDA")
    stats, discarded = decided(trainee, budget_bytes, device)
    prefix = type(trainee.model).__name__
    contexts: dict[nn.Module, dict[str, Any]] = {}
    for path in trainee.blocks:
        share = discarded.get(f"{prefix}.{path}", 0.0)
        if share > 0:
            of_block = stats.sac_mod_stats[f"{prefix}.{path}"]
            module = trainee.model.get_submodule(path)
            contexts[module] = {"context_fn": _context_of(of_block, 1 - share)}
    return around(trainee.model, contexts)


def decided(
    trainee: Trainee, budget_bytes: int, device: str
) -> tuple[SACEstimator, dict[str, float]]:
    """Statistics of the ops of each module, and the share of its activations to discard."""
    tracker, runtime, estimator = MemTracker(), RuntimeEstimator(), SACEstimator()
    with FakeTensorMode(allow_non_fake_inputs=True):
        tracker.track_external(trainee.model)
        with tracker, runtime("operator-level-cost-model"):
            trainee.model(*trainee.args).backward()
        with estimator("operator-level-cost-model"):
            trainee.model(*trainee.args)
    info = aggregate_stats(trainee.model, tracker, runtime, estimator, torch.device(device))
    units = [f"{type(trainee.model).__name__}.{path}" for path in trainee.blocks]
    found, _, peak_bytes = sac_milp(parse_module_info(info), budget_bytes / GIB, ac_units=units)
    if peak_bytes == -1:
        raise DoesNotApplyError("its integer program finds no solution")
    return estimator, found


def _context_of(stats: SACStats, kept: float) -> Any:
    """A context that saves the ops that the program saves, found by their order in the block."""
    decisions = get_optimal_checkpointing_policy_per_module(stats, kept)

    def contexts() -> Any:
        counts = {False: 0, True: 0}

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op in SAC_IGNORED_OPS:
                return CheckpointPolicy.PREFER_RECOMPUTE
            index = counts[context.is_recompute]
            counts[context.is_recompute] += 1
            is_saved = index < len(decisions) and decisions[index] == 1
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts
