"""The benchmark's graphs: layered ones, captured ones with stated costs, and the results."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.cells.cell import in_own_process
from benchmarks.cells.instance_format import Instance, checked, graph_of
from benchmarks.graphs import (
    LAYERED,
    MIB,
    NETWORK_NAMES,
    captured,
    chain,
    graph,
    names,
    peak_bytes,
    working_set_bytes,
)
from benchmarks.layered import Shape, layered_graph, layered_instance, published_width
from benchmarks.narrow.drawn import REACH, narrow_instance
from benchmarks.networks.catalogue import NETWORKS, gpt, lstm, moe, resnet, unet
from benchmarks.networks.roofline import BYTES_PER_US, FLOPS_PER_US, LAUNCH_US, roofline
from benchmarks.solver_table import detail_lines, replaced, solver_lines, table_lines
from benchmarks.solvers import Results, budget_bytes, run
from remat.graph_capture.tracing.trace import trace
from remat.solver import TABLE
from tests.limits import AMPLE_S

ROOT = Path(__file__).parents[2]
SMALL = {
    "gpt": lambda: gpt(1, 64, seq=16, batch=2, vocab=64),
    "moe": lambda: moe(1, 64, seq=16, batch=2),
    "resnet": lambda: resnet((1, 1), bottleneck=False, batch=2, image=32),
    "bottleneck": lambda: resnet((1, 1), bottleneck=True, batch=2, image=32),
    "unet": lambda: unet(4, 2, batch=2, image=16),
    "lstm": lambda: lstm(3, 16, batch=2),
}


def layers_of(instance: Instance) -> dict[Any, int]:
    """Longest path from the source to each node."""
    layer = {node.id: 0 for node in instance.nodes}
    position = {node: i for i, node in enumerate(instance.order or ())}
    for source, target in sorted(instance.edges, key=lambda edge: position[edge[0]]):
        layer[target] = max(layer[target], layer[source] + 1)
    return layer


@pytest.mark.parametrize("nodes", [3, 4, 10, 100, 250, 1000])
def test_layered_graphs_are_well_formed(nodes: int) -> None:
    instance = layered_instance(Shape(nodes), seed=2)
    assert checked(instance) == instance
    assert len(instance.nodes) == nodes
    assert len(set(instance.edges)) == len(instance.edges)
    sources = {node.id for node in instance.nodes} - {target for _, target in instance.edges}
    sinks = {node.id for node in instance.nodes} - {source for source, _ in instance.edges}
    assert (sources, sinks) == ({0}, {nodes - 1})
    assert all(80 <= node.bytes <= 6200 and node.bytes % 10 == 0 for node in instance.nodes)
    assert all(1 <= node.cost <= 1000 for node in instance.nodes[1:-1])
    by_layers = layered_instance(Shape(nodes, by_layers=True), seed=2)
    assert (by_layers.nodes, by_layers.edges) == (instance.nodes, instance.edges)
    layer = layers_of(by_layers)
    assert all(layer[a] <= layer[b] for a, b in pairwise(by_layers.order or ()))


def test_layered_graphs_depend_on_the_seed_alone() -> None:
    assert layered_instance(Shape(100), 1) == layered_instance(Shape(100), 1)
    assert layered_instance(Shape(100), 1) != layered_instance(Shape(100), 2)
    assert layered_graph(100, 1).hash == layered_graph(100, 1).hash


def test_layered_graphs_of_100_nodes_are_like_the_published_one() -> None:
    counts = [len(layered_instance(Shape(100), seed).edges) for seed in range(8)]
    depths = {max(layers_of(layered_instance(Shape(100), seed)).values()) for seed in range(8)}
    assert sum(counts) / len(counts) == pytest.approx(236, rel=0.1)
    assert depths == {20}


@pytest.mark.parametrize("nodes", [3, 4, 10, 100, 250, 1000])
def test_narrow_graphs_are_well_formed(nodes: int) -> None:
    instance = narrow_instance(nodes, seed=2)
    assert instance == narrow_instance(nodes, seed=2) != narrow_instance(nodes, seed=3)
    assert checked(instance) == instance
    width = max(1, round(nodes**0.5 / 2))
    readers = {reader for _, reader in instance.edges}
    assert readers == {node.id for node in instance.nodes if int(node.id) >= width}
    for read, reader in instance.edges:
        layers_between = int(reader) // width - int(read) // width
        assert reader == nodes - 1 or 1 <= layers_between <= REACH


def newness(instance: Instance) -> float:
    """Mean place of the next node among those that are ready, the newest at 1."""
    edges = set(instance.edges)
    waits_for = {node.id: {u for u, v in edges if v == node.id} for node in instance.nodes}
    ready, places = [0], []
    for node in instance.order or ():
        if len(ready) > 1:
            places.append(ready.index(node) / (len(ready) - 1))
        ready.remove(node)
        released = {v for u, v in edges if u == node and waits_for[v] == {node}}
        for waiting in waits_for.values():
            waiting.discard(node)
        ready += sorted(released)
    return sum(places) / len(places)


def test_given_orders_are_like_the_published_one() -> None:
    found = [newness(layered_instance(Shape(100), seed)) for seed in range(8)]
    assert sum(found) / len(found) == pytest.approx(0.72, abs=0.03)


@pytest.mark.parametrize(("nodes", "layers"), [(250, 22), (500, 31)])
def test_larger_layered_graphs_are_about_as_deep_as_the_published_ones(
    nodes: int, layers: int
) -> None:
    instance = layered_instance(Shape(nodes, published_width(nodes)), seed=0)
    assert max(layers_of(instance).values()) - 1 == pytest.approx(layers, rel=0.2)


def test_layered_program_writes_an_instance() -> None:
    command = [sys.executable, "-m", "benchmarks.layered", "--nodes", "30", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    read = checked(msgspec.json.decode(done.stdout, type=Instance))
    assert read == layered_instance(Shape(30), 5)


@pytest.mark.parametrize("name", ["variability", "density", "skips"])
def test_layered_parameters_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\), found 1"):
        Shape(**{name: 1})
    with pytest.raises(ValueError, match="nodes must be at least 3, found 2"):
        Shape(2)


@pytest.mark.parametrize("name", SMALL)
def test_captured_networks_have_stated_costs(name: str) -> None:
    made = roofline(trace(**SMALL[name]()))
    costed = [op for op in made.ops if op.target != "remat.tangents"]
    assert all(LAUNCH_US <= op.cost_us < math.inf for op in costed)
    assert len({op.cost_us for op in costed}) > 5
    assert peak_bytes(made) > working_set_bytes(made) > made.resident.total_bytes


def test_matrix_products_and_attention_are_costed_by_their_arithmetic() -> None:
    made = roofline(trace(**gpt(1, 1024, seq=2048, batch=4, vocab=64, fused=True)))
    attention = next(op for op in made.ops if "flash_attention_for_cpu.default" in op.target)
    flops = 2 * 2 * 4 * 16 * 2048 * 2048 * 64
    assert attention.cost_us == pytest.approx(LAUNCH_US + flops / FLOPS_PER_US)
    gelu = next(op for op in made.ops if op.target == "aten.gelu.default")
    moved = 2 * 4 * 2048 * 4096 * 4
    assert gelu.cost_us == pytest.approx(LAUNCH_US + moved / BYTES_PER_US)
    wide = next(op for op in made.ops if gelu.inputs[0] in op.outputs)
    assert wide.cost_us == pytest.approx(LAUNCH_US + 2 * 8192 * 1024 * 4096 / FLOPS_PER_US)


def test_graphs_are_kept_and_read_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setitem(NETWORKS, "lstm", SMALL["lstm"])
    made = graph("lstm")
    assert made == captured("lstm")
    assert made.name == "lstm"
    assert [path.name[:5] for path in (tmp_path / "benchmarks").iterdir()] == ["lstm-"]
    program = "import sys; from benchmarks.graphs import graph; graph('lstm'); "
    program += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_every_name_is_known() -> None:
    assert set(NETWORK_NAMES) == set(NETWORKS)
    assert {"layered250", "layered1000_2"} <= set(LAYERED) <= set(names())
    assert len(graph("layered500_1").ops) == 500
    with pytest.raises(KeyError, match="no graph is called 'gpt'"):
        graph("gpt")


def test_instance_files_are_graphs_where_present() -> None:
    files = [name for name in names() if name.startswith("bench:")]
    if not files:
        pytest.skip("the reference instances are not there")
    assert len(graph("bench:moccasin_rl1").ops) == 100
    assert graph_of(layered_instance(Shape(100), 0)).ops[0].inputs == ()


def test_a_chain_keeps_every_activation() -> None:
    made = chain(8)
    assert len(made.ops) == 17
    sizes = sum((1 + 7 * i % 5) * MIB for i in range(9))
    assert peak_bytes(made) == sizes + (1 + 7 * 7 % 5) * MIB


@pytest.mark.slow
def test_solvers_are_run_in_their_own_processes_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    asked = (["chain64"], ["0.5", "least"], ["chen_sqrt", "cut:gap=2"])
    run(Results(path), *asked, limit_s=AMPLE_S)
    assert capsys.readouterr().out.count("\n") == 4
    run(Results(path), *asked, limit_s=AMPLE_S)
    assert capsys.readouterr().out == ""
    results = Results(path)
    facts, cell = results.graphs["chain64"], results.cells["chain64|0.5|cut:gap=2"]
    assert facts["working_set_bytes"] < facts["least_bytes"] < facts["peak_bytes"]
    assert cell["budget_bytes"] == budget_bytes(facts, "0.5") == 106 * MIB
    assert cell["peak_bytes"] <= cell["budget_bytes"]
    assert 0 <= cell["bound_overhead"] <= cell["overhead"]
    assert cell["solver_memory_bytes"] > 10 * MIB
    found = results.graphs, list(results.cells.values())
    lines = [*table_lines(found[1]), *detail_lines(*found)]
    assert any(line.startswith("| chain64 | 129 | 200.00 |") for line in lines)
    assert sum(line.startswith("| `chen_sqrt` |") for line in lines) == 2


def test_a_failing_process_is_an_error() -> None:
    found = in_own_process(
        {"graph": "none", "solver": "cut", "budget_bytes": 1, "time_limit_s": 1}, AMPLE_S
    )
    assert "no graph is called 'none'" in found["error"]


def test_documents_keep_their_prose() -> None:
    text = "before <!-- table -->\nold\n<!-- /table --> after"
    assert replaced(text, "table", ["new"]) == "before <!-- table -->\nnew\n<!-- /table --> after"
    with pytest.raises(ValueError, match="no <!-- other -->"):
        replaced(text, "other", [])
    lines = solver_lines([])[2:]
    assert [line.split("`")[1] for line in lines] == list(TABLE)
    assert all(line.endswith(" | - | - | - | - |") for line in lines)
