"""Exhaustive search for the fastest schedule: the oracle of the exactness tests.

State: which op runs first next, and which values are live. Moves: run an op whose inputs
are live (in captured order if for the first time), or drop a value. Dijkstra over time.
With `one_sweep` a state also says which op ran again last, since the latest first run: what
runs again between two first runs does so in captured order, each op at most once.
"""

from __future__ import annotations

import heapq

from remat.graph_capture.graph import TrainingGraph


def least_time_us(
    graph: TrainingGraph, budget_bytes: int, *, one_sweep: bool = False
) -> float | None:
    """Time of the fastest schedule in captured order within the budget, None if none is."""
    made = [value for value in graph.values if value.producer]
    bit = {value.name: 1 << i for i, value in enumerate(made)}
    sizes = [value.size_bytes for value in made]
    reads = [sum(bit.get(v, 0) for v in op.inputs) for op in graph.ops]
    writes = [sum(bit[v] for v in op.outputs) for op in graph.ops]
    own = [
        o.workspace_bytes + sum(graph.value_by_name[v].size_bytes for v in o.outputs)
        for o in graph.ops
    ]
    returned = sum(bit.get(v, 0) for v in set(graph.forward_outputs))
    wanted = sum(bit.get(v, 0) for v in set(graph.outputs))
    room = budget_bytes - graph.resident.total_bytes
    n, n_forward = len(graph.ops), graph.n_forward
    weight: dict[int, int] = {}

    def size_of(live: int) -> int:
        if live not in weight:
            weight[live] = sum(s for i, s in enumerate(sizes) if live >> i & 1)
        return weight[live]

    best: dict[tuple[int, int, int], float] = {(0, -1, 0): 0.0}
    queue: list[tuple[float, int, int, int]] = [(0.0, 0, -1, 0)]
    while queue:
        time_us, following, last, live = heapq.heappop(queue)
        if best[following, last, live] < time_us:
            continue
        if following == n and live & wanted == wanted:
            return time_us
        moves: list[tuple[float, int, int, int]] = []
        for i in range(len(sizes)):
            is_held = following >= n_forward and (returned & wanted) >> i & 1
            if live >> i & 1 and not is_held:
                moves.append((time_us, following, last, live & ~(1 << i)))
        for op in range(last + 1, min(following + 1, n)):
            if reads[op] & ~live or size_of(live) + own[op] > room:
                continue
            is_first = op == following
            if not is_first and (graph.ops[op].no_recompute or not writes[op] & ~live):
                continue
            after = live | writes[op]
            if is_first and op == n_forward - 1 and after & returned != returned:
                continue
            swept = op if one_sweep and not is_first else -1
            moves.append((time_us + graph.ops[op].cost_us, following + is_first, swept, after))
        for move in moves:
            if move[0] < best.get(move[1:], float("inf")):
                best[move[1:]] = move[0]
                heapq.heappush(queue, move)
    return None
