"""On a CUDA device: what people use beside a plan of one batch. Bits, peaks, or a refusal."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import remat
from examples.gpt import GPT, Sizes
from remat.analysis.plan_figures import predict_reserved, use_arena
from remat.compile.graph_context import compiled_plans
from remat.compile.specialize import libraries_bytes
from remat.graph_capture.devices.placement import meter_of
from remat.graph_capture.errors import DeviceError
from remat.graph_capture.tracing.resident import storage_bytes
from remat.ranks.same_order import agreed_rewrite
from remat.schedules.simulate import simulate
from tests.links import with_links
from tests.rewriter.tiers.copied import out_at_once
from tests.rewriter.tiers.plans import large

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SIZES = Sizes(layers=4, width=256, heads=4, seq=128, batch=8, vocab=2048)
PEAK_ERROR, GRADIENT_ERROR, RESERVED_ERROR = 0.02, 0.02, 0.05


def gpt(**sizes: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A GPT on the device, and a batch."""
    made = Sizes(**{**SIZES.__dict__, **sizes})
    torch.manual_seed(0)
    model = GPT(made).cuda()
    return model, tokens(made)


def tokens(sizes: Sizes) -> tuple[Tensor, ...]:
    drawn = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1), device="cuda")
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def trained(
    module: Callable[..., Tensor], optimizer: AdamW, args: tuple[Tensor, ...]
) -> list[Tensor]:
    """Losses and parameters after ten steps of a plain loop, and the random stream."""
    torch.manual_seed(5)
    losses: list[Tensor] = []
    for _ in range(10):
        loss = module(*args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return [*losses, *parameters, torch.cuda.get_rng_state()]


@pytest.mark.parametrize("fused", [False, True])
def test_ten_steps_of_an_optimizer_in_backward_are_eagers(fused: bool) -> None:
    model, args = gpt()
    other = copy.deepcopy(model)
    expected = trained(other, AdamW(other.parameters(), fused=fused), args)
    own = AdamW(model.parameters(), fused=fused)
    fast = remat.rematerialize(model, args, optimizer_in_backward=own, budget="min", solver="cut")
    found = trained(fast, own, args)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_under_autocast_with_scaled_gradients_is_eagers(dtype: torch.dtype) -> None:
    model, args = gpt()
    with torch.autocast("cuda", dtype):
        fast = remat.rematerialize(model, args, budget="min", solver="cut")

    def gradients(module: Callable[..., Tensor]) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cuda", dtype):
            loss = module(*args)
        scaler.scale(loss).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, gradients(fast), gradients(model)))


def test_a_head_in_chunks_gives_eagers_bits() -> None:
    model, args = gpt(vocab=32768, layers=1, dropout=0.0)
    graph = remat.capture(model, args)
    result = remat.solve(graph, "min", solver="cut")
    assert result.schedule is not None
    module = agreed_rewrite(model, result.schedule)
    found = remat.check(model, module, args)
    assert found.differences == ()
    assert abs(result.peak_bytes / found.plan_peak_bytes - 1) <= PEAK_ERROR
    whole = remat.solve(remat.capture(model, args, split="none"), "min", solver="cut")
    assert result.peak_bytes <= whole.peak_bytes  # equal where chunks would not keep the bits


def test_each_batch_size_has_its_plan() -> None:
    model, args = gpt(dropout=0.0)
    cached = remat.rematerialize(model, budget="min", solver="cut")
    for batch in (8, 4):
        given = tuple(arg[:batch] for arg in args)
        model.zero_grad()
        cached(*given).backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(*given).backward()
        expected = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, found, expected))


def test_inductors_code_of_a_plan_is_eagers_to_a_tolerance() -> None:
    model, args = gpt(dropout=0.0)
    graph = remat.capture(model, args, split="none")
    result = remat.solve(graph, "min", solver="cut")
    assert result.schedule is not None
    module = agreed_rewrite(model, result.schedule, compile=True)
    assert remat.check(model, module, args).equal


@pytest.mark.parametrize("budget", ["90%", "min"])
def test_a_compiled_model_keeps_to_its_peak(budget: str) -> None:
    model, args = gpt(dropout=0.0)
    model(*args).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    step = torch.compile(model, backend="remat", options={"budget": budget, "warm": False})
    for _ in range(3):
        model.zero_grad()
        step(*args).backward()
    plan = compiled_plans()[-1]
    for found, wanted in zip(model.parameters(), expected, strict=True):
        assert found.grad is not None
        assert float((found.grad - wanted).norm() / wanted.norm()) < GRADIENT_ERROR
    model.zero_grad()
    held_bytes = storage_bytes([*model.parameters(), *model.buffers(), *args])
    held_bytes += libraries_bytes("cuda:0")
    peak_bytes = (
        held_bytes + meter_of("cuda:0").step_memory(lambda: step(*args).backward()).peak_bytes
    )
    assert abs(plan.peak_bytes / peak_bytes - 1) <= PEAK_ERROR


@pytest.mark.parametrize("kind", ["store_all", "chen_sqrt"])
def test_reserved_bytes_are_as_predicted(kind: str) -> None:
    model, args = gpt(width=768, seq=512, heads=12)
    graph = remat.capture(model, args, split="none")
    result = remat.solve(graph, "150%", solver=kind)
    assert result.schedule is not None
    module = agreed_rewrite(model, result.schedule)
    for _ in range(3):
        model.zero_grad()
        module(*args).backward()
    model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    module(*args).backward()
    predicted_bytes = predict_reserved(graph, result).default.reserved_bytes
    assert abs(predicted_bytes / torch.cuda.max_memory_reserved() - 1) <= RESERVED_ERROR


@pytest.mark.parametrize("kind", ["store_all", "chen_sqrt"])
def test_a_plan_with_copies_trains_as_eager_with_the_predicted_peak(kind: str) -> None:
    model, args = gpt()
    graph = with_links(remat.capture(model, args, split="none"))
    result = remat.solve(graph, "150%", solver=kind)
    assert result.schedule is not None
    schedule = out_at_once(graph, result.schedule, large(graph))
    module = agreed_rewrite(model, schedule, costed=graph)
    found = remat.check(model, module, args)
    assert found.differences == ()
    assert abs(simulate(graph, schedule).peak_bytes / found.plan_peak_bytes - 1) <= PEAK_ERROR
    losses = [module(*args) for _ in range(2)]
    for loss in losses:
        loss.backward()


def test_an_arena_is_refused() -> None:
    model, args = gpt()
    fast = remat.rematerialize(model, args, budget="80%", solver="cut")
    with pytest.raises(DeviceError, match="arenas only work on the CPU so far"):
        use_arena(fast, args)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_cuda_graphs_replay_eagers_steps(dropout: float) -> None:
    model, args = gpt(dropout=dropout)
    eager = copy.deepcopy(model)
    fast = remat.rematerialize(model, args, budget="min", cuda_graphs=True)
    wanted = trained(eager, AdamW(eager.parameters()), args)
    found = trained(fast, AdamW(fast.parameters()), args)
    assert all(map(torch.equal, wanted, found))
