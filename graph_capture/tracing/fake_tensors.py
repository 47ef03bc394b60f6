"""Fake tensors as the kernels of their device give them: laid out alike, statistics of their dtype.

Some of torch's fake kernels state other strides than the kernels give: a trace then takes a view
where eager copies, and fails when it runs. On a CPU, they give norms' statistics the dtype of the
input, not of the weights: under autocast half the bytes. `RULES` mend the known ones, found in
torch 2.13 and 2.14 over some 200 ops. Timing refuses what differs still.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.backends.cuda import flash_sdp_enabled, mem_efficient_sdp_enabled
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

from remat.graph_capture.devices.known_devices import CPU, is_in_table, modelled_device
from remat.graph_capture.distributed.dtensors import is_distributed
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import aten, target_name, tensors_of
from remat.graph_capture.torch_private.core import (
    DispatchKey,
    FakeTensorMode,
    compute_elementwise_output_strides,
    enable_python_dispatcher,
    suggest_memory_format,
)
from remat.graph_capture.torch_private.cuda_autocast import autocast_of_cuda

_CONTIGUOUS = {"memory_format": torch.contiguous_format}

_Rule = Callable[..., Tensor]  # to a ``meta`` tensor, laid out as results of its shape


def fake_with_eager_strides(
    shape_env: ShapeEnv | None = None, *, on_cuda: bool = False
) -> FakeTensorMode:
    """With true strides and statistics. `shape_env`: of sizes that are symbols. `on_cuda`: tensors
    of the CPU, too, are those that CUDA's kernels give."""
    # No subclass: torch finds rules of higher-order ops by the mode's very type. Real tensors that
    # forward reads are constants of the graph.
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    dispatch = mode.dispatch

    def mended_dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.native_group_norm_backward.default:
            # Its fake kernel takes views of the gradient, which fail for some strides.
            args = (dispatch(aten.clone.default, types, args[:1], _CONTIGUOUS), *args[1:])
        found = dispatch(func, types, args, kwargs or {})
        found = _with_true_statistics(mode, func, args, found, on_cuda=on_cuda)
        rule, first = RULES.get(func), found[0] if isinstance(found, tuple) else found
        on_cpu = isinstance(first, Tensor) and first.device.type == CPU and not on_cuda
        if rule is None or (func in _CPU_ONLY and not on_cpu):
            return found
        true = rule(*args)
        if isinstance(found, tuple):
            return tuple(_mended(mode, one, true) for one in cast("tuple[Any, ...]", found))
        return _mended(mode, found, true)

    mode.dispatch = mended_dispatch
    return mode


def _with_true_statistics(
    mode: FakeTensorMode, func: Any, args: Sequence[Any], found: Any, *, on_cuda: bool
) -> Any:
    if func not in _WEIGHTS or not isinstance(found, tuple) or args[0].device.type != CPU:
        return found
    results = cast("tuple[Any, ...]", found)
    given = next((one for one in args[_WEIGHTS[func]] if isinstance(one, Tensor)), args[0])
    if on_cuda and func is not aten.native_group_norm.default and given.element_size() < 4:
        given = torch.empty(0, dtype=torch.float32)
    wanted = [results[0], *(given for _ in results[1:])]  # the output's own dtype is right
    if func is _FUNCTIONAL:
        wanted[3:] = args[3:5]  # new running statistics, as those that they replace
    with mode:
        return tuple(
            torch.empty_like(one, dtype=like.dtype)
            if isinstance(one, Tensor) and one.dtype != like.dtype
            else one
            for one, like in zip(results, wanted, strict=True)
        )


def _mended(mode: FakeTensorMode, found: Any, true: Tensor) -> Any:
    # Lengths first: entries of other dimensions, compared, would be taken for sizes that differ.
    if not isinstance(found, Tensor) or found.dim() != true.dim() or found.shape != true.shape:
        return found
    shape, stride = found.shape, true.stride()
    if found.stride() == stride:
        return found
    with mode:
        return torch.empty_strided(shape, stride, dtype=found.dtype, device=found.device)


def _in_format_of(x: Tensor, shape: Sequence[int]) -> Tensor:
    empty = torch.empty(shape, device="meta")  # channels last stays so, all else is contiguous
    return empty.contiguous(memory_format=suggest_memory_format(x))


def _like_input(x: Tensor, *_: Any) -> Tensor:
    return _in_format_of(x, x.shape)


def _rolled(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    # Eager joins two parts of `x` again, and lays them out as `x` if neither is empty.
    moves = [shift % x.shape[dim] for shift, dim in zip(shifts, dims, strict=False)]
    return _like_input(x) if moves and all(moves) else _plain(x)


def _padded(x: Tensor, padding: Sequence[int]) -> Tensor:
    shape = list(x.shape)
    # Pairs of numbers begin with the last dimension.
    for place, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        shape[-1 - place] += before + after
    return _in_format_of(x, shape)


def _unpooled(x: Tensor, _indices: Tensor, size: Sequence[int]) -> Tensor:
    return _in_format_of(x, [*x.shape[:-2], *size])


def _plain(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, device="meta")


def _of_second(rule: _Rule) -> _Rule:
    return lambda _grad, x, *_: rule(x)


_like_second, _plain_second = _of_second(_like_input), _of_second(_plain)


def _pointwise(x: Tensor, y: Tensor, *_: Any) -> Tensor:
    # As TensorIterator lays out the result of these two.
    strides = compute_elementwise_output_strides(x.to("meta"), y.to("meta"))
    return torch.empty_strided(x.shape, strides, device="meta")


RULES: dict[Any, _Rule] = {
    aten.native_batch_norm.default: _like_input, aten.channel_shuffle.default: _like_input,
    aten._native_batch_norm_legit.default: _like_input,
    aten._native_batch_norm_legit.no_stats: _like_input,
    aten._native_batch_norm_legit_functional.default: _like_input,
    aten.native_group_norm.default: _like_input,
    aten.native_batch_norm_backward.default: _like_second,
    aten.native_group_norm_backward.default: _like_second,
    aten.reflection_pad2d_backward.default: _like_second,
    aten.replication_pad2d_backward.default: _like_second,
    aten.reflection_pad3d_backward.default: _like_second,
    aten.replication_pad3d_backward.default: _like_second,
    aten.native_layer_norm_backward.default: _plain, aten.log_sigmoid_forward.default: _plain,
    aten._log_softmax_backward_data.default: _plain,
    aten.mse_loss_backward.default: _plain_second, aten.glu_backward.default: _plain_second,
    aten.smooth_l1_loss_backward.default: _plain_second,
    aten.huber_loss_backward.default: _plain_second,
    aten.hardswish_backward.default: _pointwise, aten.native_dropout_backward.default: _pointwise,
    aten.softplus_backward.default: _pointwise, aten.hardtanh_backward.default: _pointwise,
    aten.hardsigmoid_backward.default: _pointwise, aten.logit_backward.default: _pointwise,
    aten.elu_backward.default: lambda grad, *more: _pointwise(grad, more[4]),  # self_or_result
    aten.rrelu_with_noise_backward.default: lambda grad, _, noise, *__: _pointwise(noise, grad),
    aten.binary_cross_entropy.default: lambda x, *_: torch.empty_like(x, device="meta"),
    aten.binary_cross_entropy_backward.default:
        lambda _, x, *__: torch.empty_like(x, device="meta"),
    aten.reflection_pad3d.default: _padded, aten.replication_pad3d.default: _padded,
    aten.max_unpool2d.default: _unpooled, aten.roll.default: _rolled,
}  # fmt: skip

_CPU_ONLY = {  # ops whose fake kernels state the strides of CUDA's kernels
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_functional.default,
    aten.native_group_norm.default, aten.native_dropout_backward.default,
    aten.log_sigmoid_forward.default, aten.roll.default, aten.reflection_pad2d_backward.default,
    aten.replication_pad2d_backward.default, aten.max_unpool2d.default,
    aten.reflection_pad3d.default, aten.replication_pad3d.default,
    aten.reflection_pad3d_backward.default, aten.replication_pad3d_backward.default,
    aten.channel_shuffle.default,
}  # fmt: skip

_WEIGHTS: dict[Any, slice] = {
    aten.native_batch_norm.default: slice(1, 5),
    aten._native_batch_norm_legit.default: slice(1, 5),
    aten._native_batch_norm_legit_functional.default: slice(1, 5),
    aten._native_batch_norm_legit.no_stats: slice(1, 3),
    aten.native_layer_norm.default: slice(2, 4),
    aten.native_group_norm.default: slice(1, 3),
}  # by op: weights and running statistics; the first that is there has their dtype
_FUNCTIONAL = aten._native_batch_norm_legit_functional.default


def require_layout(node: fx.Node, result: Any, place: Callable[[], str]) -> None:
    """Raise `CaptureError` if `result`, of the op on made data, is laid out otherwise."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    for traced, real in zip(tensors_of(node), cast("Sequence[Any]", results), strict=False):
        if (
            isinstance(traced, Tensor)
            and isinstance(real, Tensor)
            and not _same_layout(traced, real)
        ):
            raise CaptureError(
                f"call .contiguous() on what {target_name(node)} {place()} reads: its strides are "
                f"{list(real.stride())}, and {list(traced.stride())} in torch's trace, so the "
                "step cannot be traced exactly"
            )


def _same_layout(traced: Tensor, real: Tensor) -> bool:
    triples = zip(traced.shape, traced.stride(), real.stride(), strict=True)
    # Strides of an empty tensor, or along a size of 1, address nothing.
    return traced.numel() == 0 or all(size == 1 or own == other for size, own, other in triples)


@contextlib.contextmanager
def as_if_on_cpu(model: nn.Module, mode: FakeTensorMode) -> Generator[None]:
    """Replace the model's meta parameters and buffers by fake CPU tensors, without storage."""
    made: dict[int, Tensor] = {}
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    # On ``meta`` itself attention would be traced in its math form.
    for held in (table for m in model.modules() for table in (m._parameters, m._buffers)):
        kept += [(held, name, t) for name, t in held.items() if t is not None and t.is_meta]
    try:
        for held, name, tensor in kept:
            if id(tensor) not in made:  # tied ones stay tied
                made[id(tensor)] = _fake(tensor, mode)
            held[name] = made[id(tensor)]
        yield
    finally:
        for held, name, tensor in kept:
            held[name] = tensor


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if is_distributed(tensor):
        whole: Any = tensor
        fake = type(whole).from_local(
            _fake(whole.to_local().detach(), mode), whole.device_mesh, whole.placements,
            run_check=False, shape=tensor.shape, stride=tensor.stride(),
        )  # fmt: skip
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    with mode:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def has_storage(model: nn.Module) -> bool:
    return not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


_KEYS = DispatchKey.AutogradCPU, DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd
_FAMILIES = (  # ops by name, beside all that resample
    "rnn_tanh", "rnn_relu", "gru", "lstm", "softshrink", "hardshrink", "multi_margin_loss",
    "multilabel_margin_loss_forward", "stft", "istft",
)  # fmt: skip
_FUSED_NORM = aten._fused_rms_norm.default


@contextlib.contextmanager
def kernels_of_eager(device: str) -> Generator[None]:
    """The kernels that eager takes on `device`, which may be one of the table."""
    own: dict[Any, Any] = {aten.dropout.default: dict.fromkeys(_KEYS, _dropout)}
    with contextlib.ExitStack() as stack:
        if is_in_table(device):
            own |= _of_cuda("bfloat16" in modelled_device(device).tflops)
            stack.enter_context(autocast_of_cuda())
            stack.enter_context(enable_python_dispatcher())  # else some of the trace is without it
            stack.callback(delattr, _FUSED_NORM, "decompose")  # several ops, on a CPU
            _FUSED_NORM.decompose = lambda *_, **__: NotImplemented
        # The Python dispatcher, on in AOTAutograd, decomposes these in Python where eager runs
        # compiled code: other last bits, and RNNs lose their dropout (torch 2.13).
        for op in (*_decomposed(), *own):
            stack.callback(_give, op, dict(op.py_kernels))
            others = {key: kept for key, kept in op.py_kernels.items() if key not in _KEYS}
            _give(op, others | own.get(op, {}))
        yield


def _give(op: Any, kernels: dict[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()  # it may still hold the last kernel


@functools.cache
def _decomposed() -> tuple[Any, ...]:
    names = [name for name in dir(torch.ops.aten) if "upsample_" in name]
    known = [name for name in (*names, *_FAMILIES) if hasattr(torch.ops.aten, name)]
    packets = [getattr(torch.ops.aten, name) for name in known]
    ops = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return tuple(op for op in ops if any(key in op.py_kernels for key in _KEYS))


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    # Torch's own copies where nothing is dropped; in eager, a later write reaches the input too.
    if not (train and p):
        return x
    # Torch's own draws a mask where all is dropped; eager multiplies by zero.
    return x * x.new_zeros(()) if p == 1 else aten.native_dropout(x, p, train)[0]


# What CUDA runs where a CPU has other kernels: as in `SoftMax.cpp`, `attention.cpp` and
# `sdp_utils.cpp` of torch. Where it has cuDNN's fused attention, flash attention takes as much.


def _of_cuda(is_ampere: bool) -> dict[Any, Any]:
    """Kernels by op and key. `is_ampere` : or newer, with flash attention and bfloat16."""
    kernels: dict[Any, Any] = {
        aten.scaled_dot_product_attention.default: functools.partial(_attention, is_ampere),
        aten.softmax.int: functools.partial(_softmax, aten._softmax),
        aten.log_softmax.int: functools.partial(_softmax, aten._log_softmax),
    }
    kernels = {op: dict.fromkeys(_KEYS, kernel) for op, kernel in kernels.items()}
    return kernels | {_FUSED_NORM: {DispatchKey.AutogradCPU: DispatchKey.Autograd}}


def _softmax(op: Any, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    is_inside = x.dtype == torch.float16 and dtype == torch.float32  # the kernel itself converts
    return op(x if is_inside or dtype is None else aten.to.dtype(x, dtype), dim, is_inside)


def _attention(
    is_ampere: bool, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    of, width, columns, gqa = (query, key, value), query.shape[-1], key.shape[-2], "enable_gqa"
    is_half = query.dtype == torch.float16 or (is_ampere and query.dtype == torch.bfloat16)
    fits = all(t.dim() == 4 and t.stride(-1) == 1 and t.shape[0] == query.shape[0] for t in of)
    fits = fits and (options.get(gqa, False) or len({t.shape[1] for t in of}) == 1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype))
    is_flash = fits and is_half and is_ampere and mask is None and flash_sdp_enabled()
    is_flash = is_flash and {t.shape[-1] for t in of} == {width} and width <= 256
    if is_flash and not (is_causal and query.shape[-2] != columns):
        more, scale = -width % 8, options.get("scale") or width**-0.5
        padded = [functional.pad(t, (0, more)) if more else t for t in of]
        found = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)
        return found[0][..., :width] if more else found[0]
    fits = fits and (is_half or query.dtype == torch.float32) and mem_efficient_sdp_enabled()
    fits = fits and all(t.shape[-1] % (8 if is_half else 4) == 0 for t in of)
    if not fits or options.get(gqa, False) or (is_causal and mask is not None):
        given = *of, mask, dropout_p, is_causal
        return aten._scaled_dot_product_attention_math(*given, **options)[0]
    if mask is not None:
        is_known = isinstance(columns, int)  # pyright: ignore[reportUnnecessaryIsInstance]
        if is_known and columns % 8:  # its rows are aligned by a copy
            mask = functional.pad(mask, (0, -columns % 8))[..., :columns]
        mask = mask.expand(*query.shape[:3], columns)
    given = *of, mask, any(t.requires_grad for t in of), dropout_p, is_causal
    return aten._scaled_dot_product_efficient_attention(*given, scale=options.get("scale"))[0]
