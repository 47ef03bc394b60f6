"""The picture of a mesh: which GPUs are a stage, which a replica, and what splits inside them.

Ranks are numbered as torchtitan's meshes number them: stages first, then replicas, shards, context
and tensor parallel ranks, so that the last lie side by side.
"""

from __future__ import annotations

from remat.schedules.pipeline.cluster_plan import ClusterFile, Parallelism
from remat.schedules.pipeline.svg import Picture
from remat.schedules.views.palette import CYCLE

CELL, GAP, LEFT, TOP = 14, 12, 150, 46
LEAST = 520
"""Width that the line below needs."""
MOST_COLUMNS, MOST_ROWS = 8, 6
"""Stages and data parallel ranks that are drawn; of more, the first ones and the last."""


def mesh_picture(plan: ClusterFile) -> Picture:
    """Stages from left to right, data parallel ranks from top to bottom; a cell is a GPU."""
    mesh = plan.parallelism
    tp, cp = mesh.tensor_parallel_degree, mesh.context_parallel_degree
    stages = shown(mesh.pipeline_parallel_degree, MOST_COLUMNS)
    rows = shown(_data_parallel(mesh), MOST_ROWS)
    wide, high = max(tp * CELL, 64) + GAP, cp * CELL + GAP
    picture = Picture(
        max(LEFT + len(stages) * wide + 20, LEAST), TOP + len(rows) * high + 40, _mesh_says(plan)
    )
    for column, stage in enumerate(stages):
        blocks = len(plan.stages[stage].blocks)
        picture.text(LEFT + column * wide, 16, f"stage {stage}")
        picture.text(LEFT + column * wide, 34, f"{blocks} blocks")
        for row, replica in enumerate(rows):
            x, y = LEFT + column * wide, TOP + row * high
            first = rank_of(mesh, stage, replica)
            cells = [(x + t * CELL, y + c * CELL, CELL - 2, CELL - 2)
                     for c in range(cp) for t in range(tp)]  # fmt: skip
            last = first + tp * cp - 1
            node = f"node {first // plan.node_size}"
            title = f"stage {stage}, data parallel rank {replica}: GPUs {first} to {last}, {node}"
            picture.boxes(cells, CYCLE[column % len(CYCLE)], title)
    for row, replica in enumerate(rows):
        picture.text(LEFT - 14, TOP + row * high + CELL - 3, _row_text(mesh, replica), "end")
    drawn = f"{len(stages)} of {len(plan.stages)} stages, {len(rows)} of {_data_parallel(mesh)}"
    picture.text(8, picture.height - 12, f"a cell is a GPU; drawn are {drawn} data parallel ranks")
    return picture


def rank_of(mesh: Parallelism, stage: int, replica: int) -> int:
    """The first GPU of a stage's data parallel rank."""
    of_replica = mesh.tensor_parallel_degree * mesh.context_parallel_degree
    return (stage * _data_parallel(mesh) + replica) * of_replica


def shown(count: int, most: int) -> list[int]:
    """All of a few, else the first ones and the last."""
    return list(range(count)) if count <= most else [*range(most - 1), count - 1]


def _data_parallel(mesh: Parallelism) -> int:
    return mesh.data_parallel_replicate_degree * mesh.data_parallel_shard_degree


def _row_text(mesh: Parallelism, replica: int) -> str:
    shard = mesh.data_parallel_shard_degree
    return f"replica {replica // shard}, shard {replica % shard}"


def _mesh_says(plan: ClusterFile) -> str:
    mesh = plan.parallelism
    return (
        f"{plan.gpus} GPUs: {mesh.pipeline_parallel_degree} stages, {_data_parallel(mesh)} data "
        f"parallel ranks, each of {mesh.context_parallel_degree} context times "
        f"{mesh.tensor_parallel_degree} tensor parallel GPUs"
    )
