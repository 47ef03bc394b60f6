"""A replay of kernels that were never written has the events of kernels that were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.codegen.cpp import (
    CppKernel,
    CppKernelProxy,
    CppScheduling,
    KernelGroup,
    OuterLoopFusedSchedulerNode,
)
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes.replace_random import replace_random_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from remat.rewriter.inductor import lowering
from remat.rewriter.inductor.lowering import Event, Lowered, lower, skip_kernel_codegen
from remat.rewriter.inductor.partition import calls_in_order

SQUARE = (64, 64)


def softmax_and_norm(x: Tensor, w: Tensor) -> list[Tensor]:
    y = functional.layer_norm(torch.softmax(x @ w, -1), SQUARE[-1:])
    return [y @ w, torch.softmax(y.sum(0), -1)]


def two_sums_of_rows(x: Tensor, w: Tensor) -> list[Tensor]:
    return [torch.softmax(x * w, -1) + functional.layer_norm(x, SQUARE[-1:])]


def few_long_rows(x: Tensor, w: Tensor) -> list[Tensor]:
    return [torch.softmax((x * w).reshape(2, -1), -1)]


def read_in_its_own_sum(x: Tensor, w: Tensor) -> list[Tensor]:
    y = x.exp()
    return [y / y.sum(-1, keepdim=True), (y - y.mean()).abs() @ w]


def added_at_indices(x: Tensor, w: Tensor) -> list[Tensor]:
    rows = (x.abs()[0] * 10).long().clamp(max=63)
    return [torch.zeros_like(w).index_add(0, rows, x.relu()) + w, w[rows] * 2]


def written_over_an_input(x: Tensor, w: Tensor) -> list[Tensor]:
    x.copy_(x * w + 1)
    return [(x @ w).tanh() * x]


def drawn(x: Tensor, w: Tensor) -> list[Tensor]:
    return [((torch.rand_like(x) > 0.5) * x.tanh()) @ w, torch.rand_like(w) * x]


def sought(x: Tensor, w: Tensor) -> list[Tensor]:
    return [torch.bucketize(x.exp(), w.sum(0)) + 1, torch.searchsorted(w.exp(), x)]


def chain_of_one_size(x: Tensor, w: Tensor) -> list[Tensor]:
    for _ in range(6):
        x = ((x @ w).relu() + x).sigmoid()
    return [x, x.t().contiguous().sum()]


FUNCTIONS = [
    softmax_and_norm, two_sums_of_rows, few_long_rows, read_in_its_own_sum, added_at_indices,
    written_over_an_input, drawn, sought, chain_of_one_size,
]  # fmt: skip


def lowered(function: Callable[..., list[Tensor]], dtype: torch.dtype) -> Lowered:
    examples = (torch.rand(SQUARE).to(dtype), torch.rand(SQUARE).to(dtype))
    table = select_decomp_table()
    graph: fx.GraphModule = make_fx(function, table, tracing_mode="fake")(*examples)
    with V.set_fake_mode(FakeTensorMode()):
        replace_random_passes(graph)
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return lower(graph, inputs, is_backward=False, visible=())


def of_memory(found: Lowered) -> list[tuple[object, ...]]:
    def facts(event: Event) -> tuple[object, ...]:
        return (event.kind, event.name, event.of, event.sizes_bytes, event.element)

    return [*map(facts, found.events), (found.inputs, found.outputs, found.output_strides)]


def refuse(*args: object) -> None:
    raise AssertionError("a kernel is written")


@pytest.mark.parametrize(
    ("in_order", "dtype"),
    [
        (True, torch.float32),
        pytest.param(False, torch.float32, marks=pytest.mark.slow),
        (True, torch.bfloat16),
        pytest.param(False, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_events_are_those_of_written_kernels(
    function: Callable[..., list[Tensor]],
    in_order: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with calls_in_order(in_order):
        with monkeypatch.context() as patched:
            patched.setattr(lowering, "skip_kernel_codegen", contextlib.nullcontext)
            written = lowered(function, dtype)
        monkeypatch.setattr(CppKernel, "codegen_loops", refuse)
        unwritten = lowered(function, dtype)
    assert of_memory(unwritten) == of_memory(written)
    assert any(event.kind in ("allocate", "rename") for event in unwritten.events)


@pytest.mark.slow
def test_loops_are_fused_at_an_outer_level_where_written_ones_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = list[bool]()
    check = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr

    def checked(*args: object) -> bool:
        found.append(check(*args))  # pyright: ignore[reportArgumentType]
        return found[-1]

    monkeypatch.setattr(OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", checked)
    for function in FUNCTIONS:
        lowered(function, torch.float32)
    unwritten = list(found)
    found.clear()
    monkeypatch.setattr(lowering, "skip_kernel_codegen", contextlib.nullcontext)
    for function in FUNCTIONS:
        lowered(function, torch.float32)
    assert unwritten == found
    assert set(found) == {True, False}


def test_inductor_writes_kernels_again_after_an_error_inside() -> None:
    finalize = KernelGroup.finalize_kernel
    with pytest.raises(ZeroDivisionError), skip_kernel_codegen(), skip_kernel_codegen():
        raise ZeroDivisionError
    assert CppScheduling.kernel_proxy_cls is CppKernelProxy
    assert KernelGroup.finalize_kernel is finalize


def test_a_graph_that_inductor_refuses_leaves_it_as_it_was() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"), graph.call_function(len, ((),))))
    with pytest.raises(InductorError, match="not an OpOverload"):
        lower(fx.GraphModule({}, graph), [torch.ones(2)], is_backward=False, visible=())
    assert CppScheduling.kernel_proxy_cls is CppKernelProxy


def test_an_op_without_a_lowering_is_a_call() -> None:
    def sorted_eigenvalues(x: Tensor, w: Tensor) -> list[Tensor]:
        return [torch.linalg.eigvalsh(x @ w) + 1]

    events = lowered(sorted_eigenvalues, torch.float32).events
    assert sum(event.kind == "call" for event in events) >= 2
