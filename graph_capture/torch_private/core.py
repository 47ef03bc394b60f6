"""Private parts that `import torch` brings along, and the collectives that a graph can hold."""

# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._C._distributed_c10d import FakeWork, ProcessGroup, Work
from torch._C._profiler import RecordScope
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._guards import CompileContext, TracingContext, compile_context, detect_fake_mode, tracing
from torch._higher_order_ops import effects as _effects
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims_common import (
    compute_elementwise_output_strides,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import _functional_collectives as _collectives
from torch.distributed._functional_collectives import REDUCE_OP_TO_STR
from torch.nn.modules import module as _modules
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack

from remat.graph_capture.errors import RewriteError

_C: Any = torch._C

# Autograd's engine, autocast and the profiler.

current_graph_task_id: Callable[[], int] = _C._current_graph_task_id
"""Of the pass of autograd's engine that this thread runs; -1 outside of one."""
keeps_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
will_execute_node: Callable[[Any], bool] = _C._will_engine_execute_node
saved_tensor_hooks: Callable[[bool], Any] = _C._autograd._top_saved_tensors_default_hooks
DisableAutocast: Any = _C._DisableAutocast
DisableTorchFunction: Any = _C.DisableTorchFunction
innermost_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack
"""That of `torch.func` in which code runs, such as `vmap`, or None."""

storage_of_pointer: Callable[[int], Any] = torch.UntypedStorage._new_with_weak_ptr
"""The storage to which a `StorageWeakRef` has a pointer, or None where it is gone."""


def outside_of_transforms(tensor: Any) -> Any:
    """The tensor for which one stands inside of `torch.func`'s transforms, such as `vmap`."""
    while isinstance(tensor, Tensor) and _C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _C._functorch.get_unwrapped(tensor)
    return tensor


def module_of_op(op: Any) -> str:
    """The module of the Python function that `torch.library.custom_op` made an op of, or ""."""
    known = OPDEFS.get(getattr(op, "_name", "").partition(".")[0])
    return str(known._init_fn.__module__) if known is not None else ""


BackwardFunction: Any = torch.autograd.function.BackwardCFunction


@contextlib.contextmanager
def reentrant_checkpoints() -> Generator[None]:
    """Let torch's own run in a trace, which asks for single gradients."""
    autograd: Any = torch.autograd
    before, autograd._is_checkpoint_valid = autograd._is_checkpoint_valid, lambda: True
    try:
        yield
    finally:
        autograd._is_checkpoint_valid = before


_KEYS = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()


def as_outside_of_ops() -> Any:
    """In a kernel of an op, have code run as it does elsewhere: it may differentiate itself."""
    return _C._ForceDispatchKeyGuard(*_KEYS)


_FunctionMeta: Any = type(torch.autograd.Function)
SINGLE_LEVEL_SETUP: Any = torch.autograd.function._SingleLevelFunction.setup_context
"""What a `Function` has whose forward is given `ctx`."""


@contextlib.contextmanager
def calls_of_functions(stand_in: Callable[[Any], dict[str, Any]]) -> Generator[None]:
    """In each call of a `Function`, have the attributes that `stand_in` gives for its class taken
    for those of the class. `apply` reads them, under whatever name it is bound, once each:
    `_backward_cls` at the begin, then forward, then setup_context, if the class has its own."""
    before = vars(_FunctionMeta).get("__getattribute__")
    of_class = before or type.__getattribute__
    calls = dict[Any, dict[str, Any]]()

    def read(kind: Any, name: str) -> Any:
        if name == "_backward_cls":
            calls[kind] = stand_in(kind)
        given = calls.get(kind, {})
        if name not in given or (name == "setup_context" and "forward" in given):
            return of_class(kind, name)
        return given.pop(name)

    _FunctionMeta.__getattribute__ = read
    try:
        yield
    finally:
        del _FunctionMeta.__getattribute__
        if before is not None:
            _FunctionMeta.__getattribute__ = before


prepare_profiler: Callable[..., None] = _C._autograd._prepare_profiler
enable_profiler: Callable[..., None] = _C._autograd._enable_profiler
disable_profiler: Callable[[], Any] = _C._autograd._disable_profiler
RecordFunctionFast: Any = _C._profiler._RecordFunctionFast


def queue_callback(callback: Callable[[], Any]) -> None:
    """Have autograd's engine call this at the end of its pass."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


# Ops, and who sees them.

OP_NAMESPACES: tuple[Any, ...] = (
    _C._VariableFunctions, Tensor, _C._nn, _C._linalg, _C._special, _C._fft,
)  # fmt: skip
"""Where torch's parsers for single ops are: quicker than those of `torch.ops`."""
has_kernel: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key
dispatch_keys: Callable[[Tensor], Any] = _C._dispatch_keys
from_functional: Callable[[Tensor], Tensor] = torch._from_functional_tensor
is_functorch_wrapped: Callable[[Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor
SelectiveCheckpointMode: Any = _checkpoint._CachingTorchDispatchMode
CheckpointHook: Any = _checkpoint._checkpoint_hook


def empty_like_of(kind: type[Tensor], like: Tensor, device: torch.device) -> Any:
    """An instance of a subclass with the shape and dtype of `like`, and no storage."""
    made: Any = Tensor._make_wrapper_subclass
    return made(kind, like.shape, strides=like.stride(), dtype=like.dtype, device=device)


def functional_mode() -> Any:
    """The mode that makes a trace functional; None outside of one."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FUNCTIONAL)


_CHECKING_OPS = ("aten::_linalg_check_errors",)  # they only raise an error for some values


@contextlib.contextmanager
def checks_kept() -> Generator[None]:
    """While tracing, let torch know that these ops have an effect."""
    # torch 2.11 drops them, as nothing reads them: `torch.linalg.cholesky` would go on with NaN
    # where eager raises. In the graph, they are refused (`refusals.py`).
    torchs: Any = _effects
    with contextlib.ExitStack() as stack:
        for op in _CHECKING_OPS:
            if torchs._get_effect(op) is None:  # later releases know of it themselves
                ordered = torchs._EffectType.ORDERED
                stack.callback(torchs._register_effectful_op(op, ordered).destroy)
        yield


# Collectives of a graph, which return what `torch.distributed` writes in place.

_in_graphs: Any = _collectives
c10d_ops: Any = torch.ops._c10d_functional
all_to_all_autograd: Any = _in_graphs.all_to_all_single_autograd
# Torch 2.13 gave these two another name.
all_gather_autograd: Any = getattr(_in_graphs, "all_gather_single_autograd", None) or (
    _in_graphs.all_gather_tensor_autograd
)
reduce_scatter_autograd: Any = getattr(_in_graphs, "reduce_scatter_single_autograd", None) or (
    _in_graphs.reduce_scatter_tensor_autograd
)


@contextlib.contextmanager
def torchs_ring(is_causal: bool) -> Generator[Any]:
    """Torch's ring attention, whose keys and values go from rank to rank in the block."""
    from torch.distributed.tensor.experimental import _context_parallel

    ring: Any = _context_parallel._attention  # its public face takes DTensors, on CUDA alone
    options, kept = ring._cp_options, {**vars(ring._cp_options)}
    options.enable_load_balance = is_causal
    options.rotate_method = ring._RotateMethod.ALL_TO_ALL  # gathered, they would all be held
    try:
        yield ring
    finally:
        vars(options).update(kept)


def fake_store() -> Any:
    """The store of the fake process group, whose backend is registered with it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# What torch is told.


_ROUNDED = "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"
_KINDS = [name.replace("cudnn", "cuda").split(".") for name in _ROUNDED]
PRECISIONS = tuple(f"torch.backends.{name}.fp32_precision" for name in _ROUNDED)


def precision_settings() -> tuple[str, ...]:
    """Of `PRECISIONS`: what float32 may be rounded to, whichever of torch's two APIs set it."""
    asked = _C._get_fp32_precision_getter  # what the older API asks raises after the newer one
    return tuple([asked(*one).replace("none", "ieee") for one in _KINDS])


KERNEL_SETTINGS = (
    "torch.backends.mkldnn.enabled", "torch.backends.cudnn.enabled",
    "torch.backends.cuda.flash_sdp_enabled()", "torch.backends.cuda.mem_efficient_sdp_enabled()",
    "torch.backends.cuda.math_sdp_enabled()", "torch.backends.cuda.cudnn_sdp_enabled()",
    "the order of torch.nn.attention.sdpa_kernel", *PRECISIONS,
)  # fmt: skip


def kernel_settings() -> tuple[Any, ...]:
    """Of `KERNEL_SETTINGS`."""
    return (  # `torch.backends` answers the same in ten times the time, 7 us, and each step asks
        _C._get_mkldnn_enabled(), _C._get_cudnn_enabled(), _C._get_flash_sdp_enabled(),
        _C._get_mem_efficient_sdp_enabled(), _C._get_math_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(), tuple(_C._get_sdp_priority_order()), *precision_settings(),
    )  # fmt: skip


fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def compiling_and_exporting(*flags: bool) -> Generator[None]:
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag, compiler._is_exporting_flag = flags
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


# Modules and their hooks.

module_call_code: Any = nn.Module._call_impl.__code__  # calls each module's forward
has_global_hook: Callable[[], Any] = _modules._has_any_global_hook


def global_hooks() -> Iterator[Callable[..., Any]]:
    of_forward = (_modules._global_forward_pre_hooks, _modules._global_forward_hooks)
    of_backward = (_modules._global_backward_pre_hooks, _modules._global_backward_hooks)
    for table in (*of_forward, *of_backward):
        yield from table.values()


def active_ddp_module() -> Any:
    """The `DistributedDataParallel` whose forward runs; None outside of one."""
    return DistributedDataParallel._get_active_ddp_module()


def timeout_of(group: Any) -> timedelta:
    """Of a group's collectives; its store has that of the default group, whatever its own."""
    own = [group._get_backend(device) for device in getattr(group, "_device_types", ())]
    options: list[Any] = [getattr(one, "options", None) for one in own]  # a fake group has none
    found = [one._timeout for one in options if hasattr(one, "_timeout")]
    return min(found, default=group.get_group_store().timeout)


# CUDA. A build without it lacks some of these functions, so they are looked up when called.


def clear_cublas_workspaces() -> None:
    _C._cuda_clearCublasWorkspaces()


def storage_uses(tensor: Tensor) -> int:
    """How many tensors hold its storage, and one or two more, always as many."""
    return _C._storage_Use_Count(tensor.untyped_storage()._cdata)


def cuda_sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)


def takes_cudnn_batch_norm(*inputs: Tensor, eps: float) -> bool:
    """`inputs` : input, weight, bias, running mean and variance, in training."""
    return _C._select_batch_norm_backend(*inputs, True, eps) == _C._BatchNormBackend.Cudnn


def cudnn_batch_norm_reserve_bytes(x: Tensor) -> int:
    return _C._get_cudnn_batch_norm_reserve_space_size(x, True)


# Private parts of AOTAutograd and Inductor change with releases: one untested may do otherwise.

OLDEST, NEWEST = "2.11.0", "2.14.1"  # both are tested (`make test-versions`), and one between


def requirement() -> str:
    """What pip is asked for: every patch of the minor releases from `OLDEST` to `NEWEST`."""
    (major, oldest), (_, newest) = _minor(OLDEST), _minor(NEWEST)
    return f"torch>={major}.{oldest},<{major}.{newest + 1}"


def refused_release(version: str) -> str:
    """Why a release of torch is refused; empty for one that is not."""
    if _minor(OLDEST) <= _minor(version) <= _minor(NEWEST):
        return ""
    return (
        f'pip install "{requirement()}", or take a release of remat for torch {version}: plans '
        f"are tested with torch {OLDEST} to {NEWEST}, and {version} is installed"
    )


def _minor(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)  # unreadable: before the oldest


def require_tested_release() -> None:
    if reason := refused_release(importlib.metadata.version("torch")):
        raise RewriteError(reason)


def loses_gradients() -> bool:
    """Whether dynamo drops the backward of an `autograd.Function` that writes to its result."""
    return _minor(torch.__version__) < (2, 12)  # of `y = x.clone(); y.mul_(3); return y`


def holds_tangents() -> bool:
    """Whether torch holds the gradients that a compiled backward is given until it has ended."""
    # Later releases than 2.11 hand them over in a list, from which each goes once it was read.
    return not hasattr(torch.autograd.Function, "boxed_grads_call")


# Modes that see each op, or each call of torch's functions, and run it in their way.


class _Watcher:
    """Has `on_op` in the place of each call. Calls that it makes itself are not seen."""

    @abstractmethod
    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` returns: with something done before, after or instead."""


class OpWatcher(_Watcher, TorchDispatchMode):
    """Sees ops below autograd, those of backward too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.on_op(func, args, kwargs or {})


class CallWatcher(_Watcher, TorchFunctionMode):
    """Sees torch's functions and methods of tensors as the user's code calls them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.on_op(func, args, kwargs or {})


class TraceObserver(OpWatcher):
    """Sees each op that forward runs while it is traced, and is no part of the trace."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else torch would run compiled code uncompiled, and not refuse it

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True
