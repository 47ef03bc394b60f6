"""A step for a GPU that is not here: the dtypes of CUDA's autocast, and the kernels CUDA picks."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import remat
from benchmarks.comparison.models import SUITES
from remat.budgets import unmodified
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.fake_tensors import kernels_of_eager

MIB = 1 << 20
BATCH, ROWS, WIDTH, HEADS = 2, 32, 64, 4

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda x, _: x.softmax(-1),
    "log_softmax": lambda x, _: x.log_softmax(-1),
    "layer_norm": lambda x, _: functional.layer_norm(x, (8,)),
    "group_norm": lambda x, _: functional.group_norm(x, 2),
    "exp": lambda x, _: x.exp(),
    "log": lambda x, _: x.log(),
    "pow": lambda x, _: x.pow(2),
    "rsqrt": lambda x, _: x.rsqrt(),
    "sum": lambda x, _: x.sum(),
    "cumsum": lambda x, _: x.cumsum(0),
    "prod": lambda x, _: x.prod(),
    "norm": lambda x, _: x.norm(),
    "cross_entropy": lambda x, _: functional.cross_entropy(x, x.new_zeros(4, dtype=torch.int64)),
    "mse_loss": lambda x, _: functional.mse_loss(x, x),
    "l1_loss": lambda x, _: functional.l1_loss(x, x),
    "softplus": lambda x, _: functional.softplus(x),
    "cosine_similarity": lambda x, _: functional.cosine_similarity(x, x),
    "reciprocal": lambda x, _: x.reciprocal(),
    "normalize": lambda x, _: functional.normalize(x),
    "smooth_l1_loss": lambda x, _: functional.smooth_l1_loss(x, x),
    "bce_logits": lambda x, _: functional.binary_cross_entropy_with_logits(x, x),
    "tan": lambda x, _: x.tan(),
    "log1p": lambda x, _: x.log1p(),
    "kl_div": lambda x, _: functional.kl_div(x, x, reduction="sum"),
    "power": lambda x, _: x**2,
    "rms_norm": lambda x, _: functional.rms_norm(x, (8,)),
    "product": lambda x, wide: x @ wide.T,
    "widest": lambda x, wide: torch.addcmul(x, x, wide),
    "all low": lambda x, _: torch.addcmul(x, x, x),
    "gelu": lambda x, _: functional.gelu(x),
    "named dtype": lambda x, _: x.softmax(-1, dtype=x.dtype),
}
LOW = {"product", "all low", "gelu", "named dtype"}
BY_RELEASE = {"rms_norm"}  # of the list since torch 2.13


def dtype_of(name: str, device: str, dtype: torch.dtype) -> torch.dtype:
    x = torch.empty(4, 8, dtype=dtype, device=device)
    return OPS[name](x, torch.empty(4, 8, device=device)).dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(OPS.keys() - BY_RELEASE))
def test_an_op_has_the_dtype_that_cudas_documentation_states(name: str, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype), FakeTensorMode(), kernels_of_eager("h100"):
        found = dtype_of(name, "cpu", dtype)
    assert found == (dtype if name in LOW else torch.float32)


@pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's wheel for CUDA, not a GPU")
@pytest.mark.parametrize("name", OPS)
def test_an_op_has_the_dtype_that_fake_cuda_tensors_have(name: str) -> None:
    dtype = torch.bfloat16
    with FakeTensorMode():
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        try:
            true = dtype_of(name, "cuda", dtype)
        finally:
            torch.set_autocast_enabled("cuda", False)
        with torch.autocast("cpu", dtype), kernels_of_eager("h100"):
            assert dtype_of(name, "cpu", dtype) == true


def test_what_cudas_autocast_refuses_is_refused() -> None:
    class Unsafe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return functional.binary_cross_entropy(self.inner(x).sigmoid(), x)

    with torch.autocast("cpu"), pytest.raises(CaptureError, match="unsafe to autocast"):
        remat.capture(Unsafe(), (torch.rand(4, 8),), device="h100")


class Step(nn.Module):
    """A product whose result `then` goes on with."""

    def __init__(self, then: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.parts, self.then = nn.Linear(WIDTH, WIDTH), nn.ModuleList(parts), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.first(x), *self.parts)


def planned(then: Callable[..., Any], *parts: nn.Module, device: str = "h100") -> TrainingGraph:
    x = torch.randn(BATCH, ROWS, WIDTH)
    return remat.capture(Step(then, *parts), (x,), device=device, split="none")


def made(graph: TrainingGraph, name: str) -> list[str]:
    """Dtypes of the first results of forward's ops of a name, in order."""
    dtypes = {value.name: value.dtype for value in graph.values}
    ops = (op for op in graph.ops if op.phase == "forward" and op.target.split(".")[1] == name)
    return [dtypes[op.outputs[0]] for op in ops]


def test_regions_that_forward_enters_are_those_of_the_gpu() -> None:
    def regions(x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            plain = torch.bmm(x.float(), x.float().mT)
        with torch.autocast(device_type=x.device.type, enabled=False):
            plain = torch.bmm(plain, plain)
        with torch.autocast("cuda", torch.float16):
            half = torch.bmm(plain, plain)
        return torch.bmm(half, half) + plain

    with torch.autocast("cpu", torch.bfloat16):
        graph = planned(regions)
    assert made(graph, "bmm") == ["float32", "float32", "float16", "bfloat16"]
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_that_only_forward_enters_counts() -> None:
    def own(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return torch.bmm(x, x.mT).softmax(-1)

    graph = planned(own)
    assert (made(graph, "addmm"), made(graph, "bmm")) == (["float32"], ["bfloat16"])
    assert made(graph, "_softmax") == ["float32"]


class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


def test_functions_that_cast_their_inputs_on_cuda_do_so() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert made(planned(Square.apply), "mul") == ["float32"]


def test_a_model_that_casts_by_itself_keeps_its_casts() -> None:
    def own(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * wide.pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype)

    with torch.autocast("cpu", torch.bfloat16):
        graph = planned(own)
    assert (made(graph, "pow"), made(graph, "mul")) == (["float32"], ["float32"])


def layer(dropout: float) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout, batch_first=True)


def by_hand(x: Tensor, inner: nn.MultiheadAttention) -> Tensor:
    x = x.transpose(0, 1)
    weights = inner.in_proj_weight, inner.in_proj_bias, None, None, False, 0.1
    out = inner.out_proj.weight, inner.out_proj.bias
    return functional.multi_head_attention_forward(
        x, x, x, WIDTH, HEADS, *weights, *out, need_weights=False
    )[0]


DECODER = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.1, batch_first=True)
ATTENDING: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module], int]] = {
    "encoder": (lambda x, inner: inner(x), lambda: layer(0.1), 1),
    "decoder": (lambda x, inner: inner(x, x), lambda: nn.TransformerDecoder(DECODER, 2), 4),
    "both": (
        lambda x, inner: inner(x, x),
        lambda: nn.Transformer(WIDTH, HEADS, 1, 1, 2 * WIDTH, batch_first=True),
        3,
    ),
    "by hand": (by_hand, lambda: nn.MultiheadAttention(WIDTH, HEADS), 1),
}


@pytest.mark.parametrize("name", ATTENDING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_of_torchs_modules_is_fused_with_its_dropout(
    name: str, dtype: torch.dtype
) -> None:
    then, inner, count = ATTENDING[name]
    with torch.autocast("cpu", dtype):
        graph = planned(then, inner())
    flash = made(graph, "_scaled_dot_product_flash_attention")
    assert flash == [str(dtype).removeprefix("torch.")] * count
    assert not any("softmax" in op.target for op in graph.ops)


def test_a_layer_with_dropout_takes_its_masks_more_than_one_without() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        peaks = [
            unmodified(planned(lambda x, inner: inner(x), layer(p))).peak_bytes for p in (0, 0.1)
        ]
    attention = BATCH * HEADS * ROWS * ROWS
    assert 0 <= peaks[1] - peaks[0] < BATCH * ROWS * WIDTH * 8 + attention


def attended(
    *, rows: int = ROWS, width: int = 16, heads: int = HEADS, device: str = "h100",
    dtype: torch.dtype = torch.bfloat16, **how: Any,
) -> str:  # fmt: skip
    """How attention runs: by which op of forward."""

    def attend(x: Tensor) -> Tensor:
        parts = (x.new_zeros(BATCH, HEADS, rows, width) + x.sum()).to(dtype)
        keys = parts[:, :heads]
        return functional.scaled_dot_product_attention(parts, keys, keys, **how)

    graph = planned(attend, device=device)
    fused = [op.target.split(".")[1] for op in graph.ops if "scaled_dot" in op.target]
    return fused[0].removeprefix("_scaled_dot_product_") if fused else "math"


@pytest.mark.parametrize(
    ("how", "kernel"),
    [
        ({"dropout_p": 0.1}, "flash_attention"),
        ({"is_causal": True}, "flash_attention"),
        ({"width": 12}, "flash_attention"),  # padded
        ({"heads": 2, "enable_gqa": True}, "flash_attention"),
        ({"width": 264}, "efficient_attention"),
        ({"attn_mask": torch.ones(ROWS, ROWS, dtype=torch.bool)}, "efficient_attention"),
        ({"attn_mask": torch.ones(30, 30, dtype=torch.bool), "rows": 30}, "efficient_attention"),
        ({"attn_mask": torch.ones(ROWS, ROWS, dtype=torch.bool), "width": 12}, "math"),
        ({"dtype": torch.float32}, "efficient_attention"),
        ({"dtype": torch.float32, "width": 18}, "math"),
        ({"dtype": torch.float64}, "math"),
        ({"device": "t4"}, "math"),  # has no bfloat16
        ({"device": "t4", "dtype": torch.float16}, "efficient_attention"),
        ({"device": "a100", "dtype": torch.float16}, "flash_attention"),
    ],
)  # fmt: skip
def test_attention_runs_by_the_kernel_that_cuda_picks(how: dict[str, Any], kernel: str) -> None:
    assert attended(**how) == kernel


def test_a_kernel_that_is_switched_off_is_not_picked() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attended() == "math"


def test_half_precision_is_widened_inside_of_a_softmax() -> None:
    graph = planned(lambda x: x.half().softmax(-1, dtype=torch.float32))
    assert (made(graph, "_softmax"), made(graph, "_to_copy")) == (["float32"], ["float16"])


def test_rms_norm_is_one_op() -> None:
    graph = planned(lambda x, norm: norm(x), nn.RMSNorm(WIDTH))
    targets = Counter(op.target for op in graph.ops)
    assert targets["aten._fused_rms_norm.default"] == 1
    assert targets["aten._fused_rms_norm_backward.default"] == 1
    here = remat.graph_capture.trace(
        Step(lambda x, n: n(x), nn.RMSNorm(WIDTH)), (torch.ones(2, WIDTH),)
    )
    assert not any("rms_norm" in op.target for op in here.graph.ops)  # put back


def test_statistics_of_a_norm_in_bfloat16_are_float32() -> None:
    model = Step(lambda x, norm: norm(x), nn.LayerNorm(WIDTH)).bfloat16()
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    graph = remat.capture(model, (x,), device="h100")
    (norm,) = (op for op in graph.ops if op.target == "aten.native_layer_norm.default")
    dtypes = {value.name: value.dtype for value in graph.values}
    assert [dtypes[name] for name in norm.outputs] == ["bfloat16", "float32", "float32"]


def test_the_old_question_for_the_dtype_of_autocast_is_answered() -> None:
    own = torch.get_autocast_dtype("cuda")  # differs by release
    try:
        torch.set_autocast_dtype("cuda", torch.float16)
        with torch.autocast("cpu", torch.bfloat16), kernels_of_eager("h100"):
            assert torch.get_autocast_gpu_dtype() == torch.bfloat16
        assert torch.get_autocast_gpu_dtype() == torch.float16
    finally:
        torch.set_autocast_dtype("cuda", own)


def test_another_thread_keeps_the_autocast_of_its_cpu() -> None:
    found: list[torch.dtype] = []

    def other() -> None:
        x = torch.ones(4, 8, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(x.exp().dtype)
            found.append((x.float() @ x.float().T).dtype)

    with torch.autocast("cpu", torch.bfloat16), kernels_of_eager("h100"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [torch.bfloat16, torch.bfloat16]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ops", "peak_mib"),
    [
        ("gpt2-small", 733, 7435),  # on an H100: benchmarks/results/gpu/steps.json
        ("vit-b", 875, 5349),  # captured as CUDA, over a stub of its runtime
    ],
)
def test_models_of_the_gpu_suite_are_within_two_per_cent_of_a_capture_on_cuda(
    name: str, ops: int, peak_mib: int
) -> None:
    trainee = SUITES["gpu"][name].make()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        graph = remat.capture(trainee.model.to("meta"), trainee.args, device="h100")
    assert len(graph.ops) == pytest.approx(ops, rel=0.02)
    assert unmodified(graph).peak_bytes / MIB == pytest.approx(peak_mib, rel=0.02)
