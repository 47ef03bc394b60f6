"""Random walks over a graph: schedules of runs, frees and transfers, most of them valid."""

from __future__ import annotations

import random

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Step


def random_steps(graph: TrainingGraph, seed: int) -> list[Step]:
    """A valid walk: sometimes drop a value, sometimes run an op again, else the next op."""
    source, steps, live = random.Random(seed), list[Step](), dict[str, None]()
    made = {value.name for value in graph.values if value.producer}
    for following, op in enumerate(graph.ops):
        for _ in range(source.randint(0, 3)):
            if live and source.random() < 0.5:
                steps.append(Free(source.choice(list(live))))
                del live[steps[-1].value]
            else:
                _run(graph, source.randint(0, following), following, live, steps, made)
        _run(graph, following, following, live, steps, made, is_first=True)
        assert op.name == graph.ops[following].name
    for name in graph.outputs:
        if name not in live:
            _run(graph, graph.op_index[graph.value_by_name[name].producer], len(graph.ops), live,
                 steps, made)  # fmt: skip
    return steps


def _run(graph, index, following, live, steps, made, is_first=False) -> None:
    op = graph.ops[index]
    if not is_first and (
        op.no_recompute or index >= following or all(v in live for v in op.outputs)
    ):
        return
    for v in op.inputs:
        if v in made and v not in live:
            _run(
                graph, graph.op_index[graph.value_by_name[v].producer], following, live, steps, made
            )
    steps.append(Compute(op.name))
    live.update(dict.fromkeys(op.outputs))


def with_transfers(graph: TrainingGraph, steps: list[Step], seed: int) -> list[Step]:
    """`steps` where some values leave the device until a step next names them."""
    source, found = random.Random(seed), list[Step]()
    away, live = dict[str, None](), dict[str, None]()
    for step in steps:
        for value in [name for name in away if name in _names(graph, step)]:
            found += [Fetch(value), Free(value, "host")]
            del away[value]
            live[value] = None
        found.append(step)
        if isinstance(step, Free):
            del live[step.value]
        elif isinstance(step, Compute):
            live.update(dict.fromkeys(graph.ops[graph.op_index[step.op]].outputs))
        if live and source.random() < 0.4:
            away[source.choice(list(live))] = None
            found += [Offload(next(reversed(away))), Free(next(reversed(away)))]
            del live[found[-1].value]
    return [*found, *(Fetch(value) for value in away)]


def _names(graph: TrainingGraph, step: Step) -> tuple[str, ...]:
    if isinstance(step, Compute):
        op = graph.ops[graph.op_index[step.op]]
        return op.inputs + op.outputs
    return (step.value,)
