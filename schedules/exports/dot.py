"""A graph as text for Graphviz: ops in boxes of their layers, in the colours of the plots."""

from __future__ import annotations

import math
from collections import Counter

from remat.formats import bytes_text, time_text
from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.schedule import Schedule
from remat.schedules.views.palette import ROLES
from remat.schedules.views.timeline import layer_of

_HEAD = (
    "  rankdir=TB;",
    '  node [shape=box, style="filled,rounded", fontname="sans-serif", fontsize=10];',
    '  edge [color="#999999"];',
)


def to_dot(graph: TrainingGraph, schedule: Schedule | None = None) -> str:
    """The graph in the DOT language; with a schedule, ops that run again say how often they run."""
    runs = Counter(op.name for op in graph.ops)
    if schedule is not None:
        graph = graph_of_schedule(graph, schedule)
        schedule.check_made_for(graph)
        runs = schedule.computations()
    lines = [f"digraph {_quoted(graph.name)} {{", *_HEAD]
    clusters: dict[str, list[Op]] = {}
    # Only forward ops are boxed by layer; backward ops are drawn outside.
    for op in graph.ops[: graph.n_forward]:
        clusters.setdefault(layer_of(op.module), []).append(op)
    for i, (title, ops) in enumerate(clusters.items()):
        lines += [f"  subgraph cluster_{i} {{", f"    label={_quoted(title)};"]
        lines += [f"    {_node(graph, op, runs[op.name])}" for op in ops]
        lines.append("  }")
    lines += [f"  {_node(graph, op, runs[op.name])}" for op in graph.ops[graph.n_forward :]]
    lines += _edges(graph)
    return "\n".join([*lines, "}", ""])


def _node(graph: TrainingGraph, op: Op, runs: int) -> str:
    size = sum(graph.value_by_name[name].size_bytes for name in op.outputs)
    facts = [op.name, op.target, bytes_text(size)]
    if op.cost_us:
        facts.append(time_text(op.cost_us))
    if runs > 1:
        facts.append(f"runs {runs} times")
    colour = ROLES["recompute" if runs > 1 else op.phase]
    # Black text cannot be read on the dark blue of forward.
    ink = "#ffffff" if colour == ROLES["forward"] else "#000000"
    label = "\\n".join(_escaped(fact) for fact in facts)
    tip = _quoted(" ".join(part for part in (op.module, op.source) if part))
    return (
        f'{_quoted(op.name)} [label="{label}", fillcolor="{colour}", fontcolor="{ink}", '
        f"tooltip={tip}];"
    )


def _edges(graph: TrainingGraph) -> list[str]:
    lines: list[str] = []
    for op in graph.ops:
        for name in op.inputs:
            value = graph.value_by_name[name]
            if value.producer:
                # Sizes span many powers of ten: a factor of 1,000 makes a line wider by 1.
                width = 0.5 + math.log10(max(value.size_bytes, 1)) / 3
                ends = f"{_quoted(value.producer)} -> {_quoted(op.name)}"
                tip = _quoted(f"{name} {bytes_text(value.size_bytes)}")
                lines.append(f"  {ends} [penwidth={width:.1f}, tooltip={tip}];")
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'
