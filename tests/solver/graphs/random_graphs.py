"""Training graphs for tests: hypothesis strategies and synthetic networks, in one place."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import strategies as st

from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value

MIB = 1 << 20
LARGE_BYTES = 100
"""Size of the large values of `branches`."""


@dataclass
class Tape:
    """Records forward ops and derives the backward ops, as autograd would."""

    name: str
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    recorded: list[tuple[str, tuple[str, ...], tuple[str, ...], int, float]] = field(
        default_factory=list
    )
    outputs: list[str] = field(default_factory=list)
    resident_bytes: int = 0

    def leaf(self, name: str, size_bytes: int) -> str:
        self.values.append(Value(name, size_bytes, kind="input"))
        self.resident_bytes += size_bytes
        return name

    def emit(self, phase, name, inputs, outputs, cost_us, no_recompute="", workspace_bytes=0):
        for value, size_bytes in outputs:
            self.values.append(Value(value, size_bytes, name))
            self.sizes[value] = size_bytes
        self.ops.append(
            Op(
                name,
                "synthetic",
                phase,
                tuple(dict.fromkeys(inputs)),
                tuple(value for value, _ in outputs),
                cost_us,
                workspace_bytes,
                no_recompute,
            )
        )

    def op(
        self, inputs, size_bytes, cost_us, *, saves=None, weight_bytes=0, extra=(), no_recompute=""
    ):
        """A forward op; `saves` are what its backward reads, all inputs by default."""
        name = f"f{len(self.ops)}"
        outputs = [
            (name, size_bytes),
            *((f"{name}_x{i}", b) for i, b in enumerate(extra)),
        ]
        self.emit("forward", name, inputs, outputs, cost_us, no_recompute)
        saved = tuple(inputs) if saves is None else tuple(s or name for s in saves)
        saved += tuple(value for value, _ in outputs[1:])
        grads = tuple(v for v in inputs if v in self.sizes)
        self.recorded.append((name, grads, saved, weight_bytes, cost_us))
        return name

    def finish(self, loss: str) -> TrainingGraph:
        """Emit backward from `loss`; weight gradients are live at the end."""
        gradient = {loss: ""}
        for name, sources, saved, weight_bytes, cost_us in reversed(self.recorded):
            if name in gradient:
                self._backward(name, sources, saved, weight_bytes, cost_us, gradient)
        return TrainingGraph(
            name=self.name,
            ops=tuple(self.ops),
            values=tuple(self.values),
            forward_outputs=(loss,),
            outputs=(loss, *self.outputs),
            resident=Resident(batch_bytes=self.resident_bytes),
            device="synthetic",
        )

    def _backward(self, name, sources, saved, weight_bytes, cost_us, gradient):
        made = f"b_{name}"
        outputs = [(f"{made}_d{i}", self.sizes[source]) for i, source in enumerate(sources)]
        if weight_bytes:
            outputs.append((f"{made}_dw", weight_bytes))
            self.outputs.append(f"{made}_dw")
        if not outputs:
            return
        reads = [r for r in (gradient[name], *saved) if r]
        self.emit("backward", made, reads, outputs, cost_us * (2 if weight_bytes else 1))
        for i, source in enumerate(sources):
            fresh = f"{made}_d{i}"
            if source in gradient:
                total = f"{made}_s{i}"
                size_bytes = self.sizes[source]
                add = [gradient[source], fresh]
                self.emit("backward", total, add, [(total, size_bytes)], size_bytes / MIB)
                fresh = total
            gradient[source] = fresh


def gpt_like(layers: int, unit: int = MIB) -> TrainingGraph:
    """Decoder blocks of about 20 forward ops; residual stream, attention, MLP, dropout."""
    tape = Tape(f"gpt{layers}")
    x = tape.op([tape.leaf("tokens", unit // 64)], 4 * unit, 10, saves=[], weight_bytes=8 * unit)
    for _ in range(layers):
        x = tape.op([x, _attention(tape, x, unit)], 4 * unit, 8, saves=[])
        x = tape.op([x, _mlp(tape, x, unit)], 4 * unit, 8, saves=[])
    x = _norm(tape, x, unit)
    logits = tape.op([x], 16 * unit, 300, weight_bytes=8 * unit)
    loss = tape.op([logits], 512, 20, saves=[logits], extra=(unit // 8,))
    return tape.finish(loss)


def _norm(tape: Tape, x: str, unit: int) -> str:
    extra = (unit // 256, unit // 256)
    return tape.op([x], 4 * unit, 9, weight_bytes=4096, extra=extra)


def _attention(tape: Tape, x: str, unit: int) -> str:
    normed = _norm(tape, x, unit)
    q, k, v = (tape.op([normed], 4 * unit, 40, weight_bytes=unit) for _ in range(3))
    q, k, v = (tape.op([part], 4 * unit, 8, saves=[]) for part in (q, k, v))
    scores = tape.op([q, k], 12 * unit, 30)
    masked = tape.op([scores], 12 * unit, 24, saves=[])
    weights = tape.op([masked], 12 * unit, 24, saves=[""])
    mixed = tape.op([weights, v], 4 * unit, 30)
    merged = tape.op([mixed], 4 * unit, 8, saves=[])
    out = tape.op([merged], 4 * unit, 40, weight_bytes=unit)
    return tape.op([out], 4 * unit, 10, saves=[], extra=(unit,), no_recompute="draws randomly")


def _mlp(tape: Tape, x: str, unit: int) -> str:
    normed = _norm(tape, x, unit)
    wide = tape.op([normed], 16 * unit, 160, weight_bytes=4 * unit)
    active = tape.op([wide], 16 * unit, 32)
    out = tape.op([active], 4 * unit, 160, weight_bytes=4 * unit)
    return tape.op([out], 4 * unit, 10, saves=[], extra=(unit,))


def chain(length: int, unit: int = MIB) -> TrainingGraph:
    """A plain chain with mixed sizes and costs."""
    tape = Tape(f"chain{length}")
    x = tape.leaf("x", unit)
    for i in range(length):
        x = tape.op([x], (1 + i * 7 % 5) * unit, 10 + i * 3 % 11, weight_bytes=unit // 16)
    loss = tape.op([x], 512, 1)
    return tape.finish(loss)


def unet_like(depth: int, unit: int = MIB) -> TrainingGraph:
    """Encoder and decoder joined by skips: conv, norm, relu twice a level."""
    tape = Tape(f"unet{depth}")
    x = tape.leaf("image", unit)
    skips: list[str] = []
    for level in range(depth):
        x = _convs(tape, [x], 16 * unit >> level, 2, level)
        skips.append(x)
        x = tape.op([x], max(4 * unit >> level, 512), 10, extra=(unit >> level,))
    x = _convs(tape, [x], max(16 * unit >> depth, 512), 2, depth)
    for level in reversed(range(depth)):
        x = tape.op([x], 16 * unit >> level, 60, weight_bytes=unit << level >> 4)
        x = tape.op([x, skips[level]], 32 * unit >> level, 12, saves=[])
        x = _convs(tape, [x], 16 * unit >> level, 2, level)
    loss = tape.op([x], 512, 10)
    return tape.finish(loss)


def _convs(tape: Tape, x: list[str], size_bytes: int, count: int, level: int) -> str:
    out = x[0]
    for _ in range(count):
        out = tape.op([out], size_bytes, 120, weight_bytes=MIB << level >> 6)
        out = tape.op([out], size_bytes, 15, weight_bytes=512, extra=(512, 512))
        out = tape.op([out], size_bytes, 10, saves=[""])
    return out


def resnet_like(blocks: int, unit: int = MIB) -> TrainingGraph:
    """Stages of residual blocks; sizes halve and weights grow from stage to stage."""
    tape = Tape(f"resnet{blocks}")
    x = _convs(tape, [tape.leaf("image", unit)], 16 * unit, 1, 0)
    x = tape.op([x], 4 * unit, 10, extra=(unit,))
    for i in range(blocks):
        level = 4 * i // blocks
        size_bytes = 4 * unit >> level
        out = _convs(tape, [x], size_bytes, 1, level + 1)
        out = tape.op([out], size_bytes, 100, weight_bytes=MIB << (2 * level) >> 4)
        out = tape.op([out], size_bytes, 6, weight_bytes=512, extra=(512, 512))
        if tape.sizes[x] != size_bytes:
            x = tape.op([x], size_bytes, 20, weight_bytes=MIB << level >> 6)
        x = tape.op([x, out], size_bytes, 6, saves=[])
        x = tape.op([x], size_bytes, 5, saves=[""])
    x = tape.op([x], 4096, 5, saves=[])
    loss = tape.op([tape.op([x], 4096, 5, weight_bytes=unit)], 512, 1)
    return tape.finish(loss)


def branches(count: int, no_recompute: str = "") -> TrainingGraph:
    """Branches of a large and a small value; captured with all the large ones first.

    In that order the large ones are live side by side, or made again; branch by branch, one
    is live at a time. With `no_recompute` they cannot be made again.
    """
    large, small = ([f"{size}{i}" for i in range(count)] for size in ("large", "small"))
    ops = [
        *(Op(name, "t", "forward", (), (name,), 10.0, no_recompute=no_recompute) for name in large),
        *(Op(name, "t", "forward", (large[i],), (name,), 10.0) for i, name in enumerate(small)),
        Op("end", "t", "forward", tuple(small), ("end",), 10.0),
    ]
    sizes = {"large": LARGE_BYTES, "small": 1, "end": 1}
    values = [Value(op.name, sizes[op.name.rstrip("0123456789")], op.name) for op in ops]
    return TrainingGraph("branches", tuple(ops), tuple(values), outputs=("end",))


@st.composite
def training_graphs(draw: st.DrawFn, max_ops: int = 8) -> TrainingGraph:
    """Random graphs with every feature: phases, several outputs, pins, workspace, holds."""
    n_ops = draw(st.integers(3, max_ops))
    n_forward = draw(st.integers(0, n_ops))
    return random_graph(random.Random(draw(st.integers(0, 1 << 30))), n_ops, n_forward)


def random_graph(source: random.Random, n_ops: int, n_forward: int) -> TrainingGraph:
    """One such graph; dense enough that tight budgets ask for recomputation."""
    values = [Value("w", 3, kind="parameter")] if source.random() < 0.3 else []
    ops: list[Op] = []
    for i in range(n_ops):
        names = [value.name for value in values]
        inputs = source.sample(names, min(len(names), source.choice([1, 1, 2, 2, 3])))
        outputs = [f"v{i}_{j}" for j in range(source.choice([1, 1, 1, 2]))]
        no_recompute = "draws randomly" if source.random() < 0.07 else ""
        phase = "forward" if i < n_forward else "backward"
        cost_us, workspace = float(source.randint(0, 9)), source.choice([0, 0, 2])
        op = Op(
            f"op{i}", "t", phase, tuple(inputs), tuple(outputs), cost_us, workspace, no_recompute
        )
        ops.append(op)
        values += [Value(name, source.randint(0, 9), f"op{i}") for name in outputs]
    early = [name for op in ops[:n_forward] for name in op.outputs]
    made = [value.name for value in values if value.producer]
    return TrainingGraph(
        name="random",
        ops=tuple(ops),
        values=tuple(values),
        forward_outputs=tuple(source.sample(early, min(len(early), source.choice([0, 1, 2])))),
        outputs=tuple(source.sample(made, source.choice([0, 1, 2]))),
        resident=Resident(parameters_bytes=source.choice([0, 3])),
    )
