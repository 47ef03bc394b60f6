"""The step of a published job if it computes again what its own rule says, and no planner chooses.

torchtitan's selective checkpointing by op keeps attention's output and every second matrix product
of a block, and computes all else again (`_apply_ac_to_transformer_block` in its
`parallelize_llama.py` at the time of the table).
"""

from __future__ import annotations

import msgspec

from remat.cluster.judged import replay_of
from remat.cluster.planning import ClusterOutcome
from remat.graph_capture.graph import TrainingGraph
from remat.solver.cluster.step_time import data_parallel_us
from remat.solver.problem import Problem
from remat.solver.templates.template import Template, template_sequence, unavoidable

PRODUCT, ATTENTION = "aten.mm.default", "scaled_dot_product"


def step_with_half_again_us(found: ClusterOutcome) -> float:
    """Of the best mesh, which has no pipeline, by torchtitan's rule."""
    best, file = found.ranked[0], found.file
    assert file is not None
    assert found.block is not None
    (stage,) = best.stages
    ends_us = stage.work_us - found.job.layers * found.block.work_us

    def with_us(extra_us: float) -> float:
        return data_parallel_us(
            found.job, found.cluster, best.plan.mesh, found.block, extra_us, ends_us
        )

    own_us = stage.extra_us / found.job.layers
    return best.time_us + with_us(again_us(file.graphs[0])) - with_us(own_us)


def step_with_all_again_us(found: ClusterOutcome) -> float:
    """Of the best mesh, which has a pipeline, if each block keeps the least that it can."""
    best, file = found.ranked[0], found.file
    assert file is not None
    assert found.block is not None
    full_us, chunks = found.block.options[-1].extra_us, file.chunks
    stages = tuple(
        msgspec.structs.replace(facts, costs=tuple(
            msgspec.structs.replace(
                cost,
                input_us=cost.input_us + (stage.blocks * full_us - stage.extra_us) / chunks,
            )
            for cost in facts.costs
        ))
        for facts, stage in zip(file.stages, best.stages, strict=True)
    )  # fmt: skip
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
