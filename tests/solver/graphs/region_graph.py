"""A graph with a region that may run in chunks, small enough to be enumerated."""

from __future__ import annotations

from remat.graph_capture.graph import Choice, Op, Region, TrainingGraph, Value

MIB = 1 << 20
COUNTS = (2, 4, 8)


def region_graph(cost_of_chunks_us: float = 5.0) -> TrainingGraph:
    """A layer, then a head whose loss makes 64 MiB and takes as much again in backward."""
    ops = (
        Op("layer", "mm", "forward", ("x",), ("h",), 10.0),
        Op("head", "mm", "forward", ("h",), ("z",), 20.0),
        Op("loss", "loss", "forward", ("z",), ("l",), 5.0),
        Op("tangents", "remat.tangents", "backward", (), ("t",), no_recompute="they arrive"),
        Op("dz", "loss_backward", "backward", ("z", "t"), ("dz",), 5.0, 64 * MIB),
        Op("dh", "mm", "backward", ("dz", "h"), ("dh",), 20.0),
    )
    values = (
        Value("x", MIB, kind="input"),
        Value("h", MIB, "layer"),
        Value("z", 64 * MIB, "head"),
        Value("l", 4, "loss", "output"),
        Value("t", 4, "tangents", "tangent"),
        Value("dz", 64 * MIB, "dz"),
        Value("dh", MIB, "dh", "gradient"),
    )
    region = Region(
        "head",
        ("head", "loss", "dz", "dh"),
        tuple(choice(n, cost_of_chunks_us) for n in COUNTS),
    )
    return TrainingGraph(
        "toy", ops, values, ("l",), ("l", "t", "dh"), regions=(region,), cost_origin="measured"
    )


def choice(n: int, cost_us: float) -> Choice:
    forward = Op("loss_n", "chunks", "forward", ("h",), ("l",), 25.0, 64 * MIB // n)
    backward = Op(
        "dh", "chunks_back", "backward", ("h", "t"), ("dh",), 45.0 + cost_us * n, 128 * MIB // n
    )
    made = (Value("l", 4, "loss_n", "output"), Value("dh", MIB, "dh", "gradient"))
    return Choice(n, True, (("tangents", forward), ("", backward)), made)
