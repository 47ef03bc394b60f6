"""What capture says about a step: values, phases, places, pins and resident bytes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from remat.graph_capture import TrainingGraph, capture, trace
from remat.graph_capture.eager_step import with_eager_sizes
from remat.rewriter.checking.check import check
from remat.rewriter.rewriting import rewrite
from remat.schedules.simulate import simulate
from tests.models import BATCH, MODELS, WIDTH, make
from tests.rows import rows
from tests.steps import schedule_of


def captured_anew(name: str) -> TrainingGraph:
    model, args, kwargs, loss_fn, target = make(name)
    return trace(model, args, kwargs, loss_fn=loss_fn, target=target).graph


graph_of = functools.cache(captured_anew)


OFTEN = (
    "loss_function_with_target", "batch_norm_in_place_relu", "tied_weights",
    "attention_with_dropout", "nested_outputs_returned", "user_checkpoint",
)  # fmt: skip


@pytest.mark.parametrize("name", rows(MODELS, lambda name: name in OFTEN))
def test_two_captures_give_the_same_graph_and_json_gives_it_back(name: str) -> None:
    first, second = graph_of(name), captured_anew(name)
    assert first.hash == second.hash
    assert first == second
    assert TrainingGraph.from_json(first.to_json()) == first


def test_views_are_no_ops_and_share_their_value() -> None:
    graph = graph_of("attention")
    targets = {op.target for op in graph.ops}
    assert not targets & {"aten.view.default", "aten.t.default", "aten.permute.default"}
    sizes = {v.name: v.size_bytes for v in graph.values}
    qkv = next(op for op in graph.ops if op.target == "aten.addmm.default")
    assert sizes[qkv.outputs[0]] == 4 * 32 * 3 * WIDTH * 4
    flash = next(op for op in graph.ops if "flash_attention" in op.target)
    assert qkv.outputs[0] in flash.inputs
    assert len(flash.outputs) == 2


def test_ops_know_their_module_and_source_line() -> None:
    graph = graph_of("attention")
    addmm = [op for op in graph.ops if op.target == "aten.addmm.default"]
    assert [op.module for op in addmm[:2]] == ["body.0.qkv", "body.0.out"]
    assert all(op.source.startswith("tests/models.py:") for op in addmm)
    backward = [op for op in graph.ops if op.phase == "backward" and "mm" in op.target]
    assert {op.module for op in backward} >= {"body.0.qkv", "body.2.out"}


def test_resident_bytes_by_category() -> None:
    model, args, *_ = make("plain")
    n_bytes = sum(p.numel() * 4 for p in model.parameters())
    plain = trace(model, args).graph.resident
    assert plain.parameters_bytes == n_bytes
    assert plain.batch_bytes == BATCH * WIDTH * 4
    assert (plain.gradients_bytes, plain.optimizer_bytes) == (0, 0)
    full = trace(model, args, optimizer="adamw", accumulate=True).graph.resident
    assert full.gradients_bytes == n_bytes
    assert full.optimizer_bytes == 2 * n_bytes + 4 * len(list(model.parameters()))
    assert trace(model, args, optimizer="momentum").graph.resident.optimizer_bytes == n_bytes
    assert trace(model, args, optimizer="sgd").graph.resident.optimizer_bytes == 0


def test_tied_weights_count_once() -> None:
    model = make("tied_weights")[0]
    n_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert graph_of("tied_weights").resident.parameters_bytes == n_bytes


def test_what_must_not_run_twice_is_pinned_with_a_reason() -> None:
    norm = graph_of("batch_norm_in_place_relu")
    pinned = {op.target: op.no_recompute for op in norm.ops if op.no_recompute}
    assert "running statistics" in pinned["remat.statistics"]
    assert "num_batches_tracked" in pinned["aten.add.Tensor"]
    assert not any(op.no_recompute for op in norm.ops if "batch_norm" in op.target)
    reads = [op.no_recompute for op in graph_of("overwritten_input").ops if op.no_recompute]
    assert any("which the step overwrites" in reason for reason in reads)


def test_dropout_takes_its_random_state_as_an_input() -> None:
    graph = graph_of("dropout")
    kinds = {value.name: value.kind for value in graph.values}
    draws = [op for op in graph.ops if "dropout.default" in op.target]
    assert draws
    assert all("rng_state" in {kinds[name] for name in op.inputs} for op in draws)
    assert not any(op.target == "remat.save_rng_state" for op in graph_of("attention").ops)


def test_dropout_of_nothing_is_elided() -> None:
    assert len(graph_of("dropout_of_nothing").ops) == len(graph_of("plain").ops)


def test_gradients_and_tangents_are_live_at_the_end() -> None:
    graph = graph_of("logits_without_loss")
    kinds = {value.name: value.kind for value in graph.values}
    ends = [kinds[name] for name in graph.outputs]
    assert ends.count("tangent") == 1
    assert ends.count("output") == 1
    assert ends.count("gradient") == len(list(make("logits_without_loss")[0].parameters()))
    assert [kinds[name] for name in graph.forward_outputs] == ["output"]


HELD_BY_A_VARIABLE = {"attention_with_dropout": 4 * 32 * 3 * WIDTH * 4}
"""Bytes of the `parts` of the last attention, which no trace shows: they live until it returns."""


@pytest.mark.parametrize("name", ["attention_with_dropout", "batch_norm_in_place_relu"])
def test_the_unmodified_step_is_predicted(name: str) -> None:
    model, args, kwargs, loss_fn, target = make(name)
    held_bytes = HELD_BY_A_VARIABLE.get(name, 0)
    graph = capture(model, args, kwargs, loss_fn=loss_fn, target=target)
    eager = with_eager_sizes(graph)
    predicted = simulate(eager, schedule_of(eager, "store_all")).peak_bytes
    module = rewrite(model, schedule_of(graph, "store_all"))
    found = check(model, module, args, kwargs, loss_fn=loss_fn, target=target, steps=1)
    assert predicted + held_bytes == pytest.approx(found.baseline_peak_bytes, rel=0.04)


def test_accumulated_gradients_are_counted_predicted_and_measured() -> None:
    model, args, *_ = make("plain")
    graph = capture(model, args, accumulate=True)
    module = rewrite(model, schedule_of(graph, "store_all"))
    found = check(model, module, args, accumulate=True, steps=1)
    predicted = simulate(graph, schedule_of(graph, "store_all")).peak_bytes
    assert found.plan_peak_bytes == predicted
    assert predicted > simulate_without(model, args)


def simulate_without(model: nn.Module, args: tuple[torch.Tensor, ...]) -> int:
    graph = capture(model, args)
    return simulate(graph, schedule_of(graph, "store_all")).peak_bytes


def test_gradients_that_autograd_would_copy_are_copied_in_the_step() -> None:
    model, args, *_ = make("gradients_in_another_layout")
    graph = trace(model, args).graph
    copies = [op for op in graph.ops if op.target == "remat.laid_out.default"]
    assert [op.module for op in copies] == [f"convolutions.{i}" for i in (2, 1, 0)]
    assert {output for op in copies for output in op.outputs} <= set(graph.outputs)
    assert not {name for op in copies for name in op.inputs} & set(graph.outputs)


def test_a_parameter_of_several_names_has_one_gradient() -> None:
    model, args, *_ = make("tied_under_three_names")
    graph = trace(model, args).graph
    weights = [v for v in graph.values if v.kind == "parameter" and v.shape == (32, WIDTH)]
    assert len(weights) == 1
    held = [name for name in graph.outputs if graph.value_by_name[name].size_bytes]
    assert len(held) - len(graph.forward_outputs) - 1 == len(list(model.parameters()))
