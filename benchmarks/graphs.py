"""The graphs that solvers are compared on, by name: `python -m benchmarks.graphs [NAME ...]`.

Networks are captured on a CPU without being run, and costed by `benchmarks/networks/roofline.py`.
So a graph is the same on any machine. Captured graphs are kept as JSON in
``$REMAT_CACHE/benchmarks`` or ``~/.cache/remat/benchmarks``, under a hash of all sources they
depend on. Reading one from there imports no torch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from benchmarks.cells.instance_format import graph_of, read_instance
from benchmarks.layered import layered_graph
from remat.graph_capture.files import read_contents, write_contents
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.simulate import simulate
from remat.solver.policies.template import StoreAll

ROOT = Path(__file__).parents[1]
BENCH = ROOT.parent / "shared" / "bench"
BENCH_PREFIX = "bench:"
NETWORK_NAMES = (
    "gpt12", "gpt48", "gpt105", "gpt_long", "resnet18", "resnet50", "unet", "moe", "lstm",
)  # fmt: skip
LAYERED = {
    f"layered{nodes}" + (f"_{seed}" if seed else ""): (nodes, seed)
    for nodes in (250, 500, 1000)
    for seed in range(3)
}
CHAIN = "chain64"
SOURCES = ("benchmarks/networks", "graph_capture", "examples/unet.py")
"""Files and folders of which a captured graph is made."""
MIB = 1 << 20


def names() -> tuple[str, ...]:
    """Every name that `graph` takes here; instance files only if they are present."""
    return (*NETWORK_NAMES, CHAIN, *LAYERED, *(BENCH_PREFIX + path.stem for path in _files()))


def grid() -> tuple[str, ...]:
    """The names of the graphs on which all solvers are compared: layered ones of one seed."""
    return tuple(name for name in names() if name not in LAYERED or not LAYERED[name][1])


def graph(name: str) -> TrainingGraph:
    """The graph of that name.

    Raises
    ------
    KeyError : there is none; lists those there are.
    """
    if name in NETWORK_NAMES:
        return _network(name)
    if name in LAYERED:
        return layered_graph(*LAYERED[name])
    if name == CHAIN:
        return chain(64)
    if name in names():
        return graph_of(read_instance(BENCH / f"{name.removeprefix(BENCH_PREFIX)}.json"))
    raise KeyError(f"no graph is called {name!r}: there are {', '.join(names())}")


def chain(length: int) -> TrainingGraph:
    """A chain with its backward: op i of it reads activation i - 1 and gradient i.

    Activations of 1 to 5 MiB and costs of 10 to 20 us, doubled in backward, by fixed rules.
    """
    sizes = [(1 + 7 * i % 5) * MIB for i in range(length + 1)]
    costs = [10.0 + 3 * i % 11 for i in range(length + 1)]
    forward = [
        Op(f"x{i}", "forward", "forward", (f"x{i - 1}",) if i else (), (f"x{i}",), costs[i])
        for i in range(length + 1)
    ]
    backward = [
        Op(f"g{i - 1}", "backward", "backward", (f"x{i - 1}", f"{'g' if i < length else 'x'}{i}"),
           (f"g{i - 1}",), 2 * costs[i])
        for i in range(length, 0, -1)
    ]  # fmt: skip
    values = [Value(op.name, sizes[int(op.name[1:])], op.name) for op in (*forward, *backward)]
    ends = (f"x{length}",)
    ops = (*forward, *backward)
    return TrainingGraph(f"chain{length}", ops, tuple(values), ends, ends, cost_origin="given")


def cache_folder() -> Path:
    """Where captured graphs are kept."""
    own = os.environ.get("REMAT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(own) if own else Path(base) / "remat") / "benchmarks"


def _network(name: str) -> TrainingGraph:
    path = cache_folder() / f"{name}-{sources_hash()[:16]}.json"
    if path.exists():
        return TrainingGraph.from_json(read_contents(path))
    made = captured(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_contents(path, made.to_json())
    return made


def captured(name: str) -> TrainingGraph:
    """Capture a network with costs; `graph` keeps what this returns."""
    from benchmarks.networks.catalogue import NETWORKS
    from benchmarks.networks.roofline import roofline
    from remat.graph_capture.tracing.trace import trace

    traced = trace(**NETWORKS[name]())
    return msgspec.structs.replace(roofline(traced), name=name)


def sources_hash() -> str:
    """SHA-256 of what a captured graph depends on."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for place in SOURCES:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else (path,):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _files() -> Iterable[Path]:
    """Instance files with one graph each, where they are present."""
    for path in sorted(BENCH.glob("*.json")):
        if "nodes" in msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw]):
            yield path


def peak_bytes(graph: TrainingGraph) -> int:
    """Peak of the unmodified step, which computes every op once in captured order."""
    return simulate(graph, StoreAll().schedule(graph)).peak_bytes


def working_set_bytes(graph: TrainingGraph) -> int:
    """The most bytes that one op needs, resident ones included: no schedule takes less."""
    size = {value.name: value.size_bytes for value in graph.values if value.producer}
    return graph.resident.total_bytes + max(
        op.workspace_bytes
        + sum(
            size.get(name, 0) for name in {**dict.fromkeys(op.inputs), **dict.fromkeys(op.outputs)}
        )
        for op in graph.ops
    )


def main() -> int:
    """One line a graph; captures what is not kept yet."""
    parser = argparse.ArgumentParser(prog="benchmarks.graphs", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names())}")
    head = f"{'graph':26}{'ops':>6}{'values':>8}{'edges':>8}{'peak MiB':>11}"
    print(f"{head}{'least MiB':>11}{'ms':>14}")
    for name in parser.parse_args().names or names():
        made = graph(name)
        edges = sum(len(op.inputs) for op in made.ops)
        peak, least = peak_bytes(made) / MIB, working_set_bytes(made) / MIB
        counts = f"{len(made.ops):6}{len(made.values):8}{edges:8}"
        print(f"{name:26}{counts}{peak:11.2f}{least:11.2f}{made.time_us / 1000:14.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
