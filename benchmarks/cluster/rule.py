"""The step of a published job if it computes again what its own rule says, and no planner chooses.

torchtitan's selective checkpointing by op keeps attention's output and every second matrix product
of a block, and computes all else again (`_apply_ac_to_transformer_block` in its
`parallelize_llama.py` at the time of the table).
"""

from __future__ import annotations

import msgspec

from remat.cluster.pipeline_replay import StageCosts
from remat.cluster.planning import ClusterOutcome
from remat.cluster.replayed_plan import replay_of
from remat.cluster.stages import StagePlan, data_parallel_us
from remat.graph_capture.graph import TrainingGraph
from remat.solver.policies.template import Template, template_sequence, unavoidable
from remat.solver.problem import Problem

PRODUCT, ATTENTION = "aten.mm.default", "scaled_dot_product"


def step_with_half_again_us(found: ClusterOutcome) -> float:
    """Of the best mesh, which has no pipeline, by torchtitan's rule."""
    best, file = found.ranked[0], found.file
    assert file is not None
    (stage,) = best.stages
    (block,) = found.blocks
    ends_us = stage.work_us - found.job.layers * block.work_us

    def with_us(extra_us: float) -> float:
        return data_parallel_us(
            found.job, found.cluster, best.plan.mesh, found.blocks, extra_us, ends_us
        )

    own_us = stage.extra_us / found.job.layers
    return best.time_us + with_us(again_us(file.graphs[0])) - with_us(own_us)


def step_with_all_again_us(found: ClusterOutcome) -> float:
    """Of the best mesh, which has a pipeline of one stage a rank: a checkpoint around each block.

    Stages have as many blocks each, as those of the source do.
    """
    best, file = found.ranked[0], found.file
    assert file is not None
    (block,), even = found.blocks, found.job.layers / file.parallelism.pipeline_parallel_degree
    least_bytes = min(option.saved_bytes for option in block.options)
    full_us = min(o.extra_us for o in block.options if o.saved_bytes == least_bytes)

    def evenly(cost: StageCosts, stage: StagePlan) -> StageCosts:
        more = even - stage.blocks
        again = even * full_us - stage.extra_us
        return msgspec.structs.replace(
            cost, forward_us=cost.forward_us + more * block.forward_us,
            input_us=cost.input_us + more * block.backward_us + again,
        )  # fmt: skip

    stages = tuple(
        msgspec.structs.replace(facts, costs=(evenly(facts.costs[0], stage),))
        for facts, stage in zip(file.stages, best.stages, strict=True)
    )
    replay = replay_of(msgspec.structs.replace(file, stages=stages))
    return replay.time_us + best.plan.time_us - best.plan.pipeline_us


def again_us(block: TrainingGraph) -> float:
    """What one block computes again by the rule."""
    problem = Problem.of(block)
    kept, products = unavoidable(problem), 0
    for i, op in enumerate(block.ops[: block.n_forward]):
        products += op.target == PRODUCT
        is_kept = products % 2 == 1 if op.target == PRODUCT else ATTENTION in op.target
        for v in problem.outputs[i] if is_kept else ():
            kept[v] = 1
    steps = template_sequence(problem, Template(kept))
    return sum(block.ops[i].cost_us for i in steps) - block.time_us
