"""The times of many ops, taken in several passes over all of them.

A shared core changes its speed by a fifth for seconds on end. So the least time counts that another
pass confirms; an op without one is timed in a few more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from remat.graph_capture.devices.known_devices import CPU, OF_PRODUCTS, kind_of_target
from remat.graph_capture.devices.memory import is_out_of_memory
from remat.graph_capture.devices.meter import LoadAwareTimer, Meter, Run, have_agreed, least_agreed
from remat.graph_capture.distributed.collectives import local_runner, run_locally
from remat.graph_capture.joint.in_place_ops import calls_of, joined_op_names
from remat.graph_capture.joint.nodes import aten, is_alias_of_input, is_getitem, target_name
from remat.graph_capture.torch_private.core import OpOverload, pytree

KERNEL_ERRORS = RuntimeError, IndexError, ValueError, MemoryError
KernelError = RuntimeError | IndexError | ValueError | MemoryError  # how kernels refuse made data
_Failed = Callable[[str, KernelError], None]
_Times = dict[str, list[float]]  # microseconds that each op took, one a pass
MORE_PASSES = 2  # beyond the meter's own, where it has several, for ops whose times differ by then


def why_not_run(error: KernelError, otherwise: str) -> str:
    """Whether memory ran out, or `otherwise`, with the first line of what was said."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    why = "was not run: memory ran out" if is_out_of_memory(error) else otherwise
    return f"{why} ({said})"


class _OpTime(NamedTuple):
    cost_us: float
    away: float  # the part of its time that went to other programs
    queue_us: float  # as of `Meter.queue_us`


class ProgressCallback(Protocol):
    """Told how far work is: how much is done of what total, or in words what is done now."""

    def __call__(self, done: int = 0, total: int | None = None, *, text: str = "") -> None:
        """Show it."""
        ...


KEEP_S = 2.0  # seconds after which times are handed out to be kept, in case the process is ended


def times_us(
    made: Mapping[str, Callable[[], Run]], moved_bytes: Mapping[str, int], meter: Meter,
    failed: _Failed, *, first: Callable[[str, Run], None] = lambda _, run: run(),
    after: Callable[[int], None] = lambda _: None, between: Callable[[], None] | None = None,
    begun: Mapping[str, Sequence[float]] | None = None,
    keep: Callable[[_Times], None] = lambda _: None,
) -> dict[str, _OpTime]:  # fmt: skip
    """The time of each op that runs: the least over the passes that another one confirms.

    `made` makes an op's run with its inputs, and `first` must run it before it is timed. `failed`
    ops are not tried again. `after` gets the number timed so far, `between` follows each pass.
    `begun`: so many passes are left out. `keep` gets all times now and then, and at Ctrl-C."""
    found: _Times = {key: list((begun or {}).get(key, ()))[: meter.passes] for key in made}
    away, queue_us = dict[str, list[float]](), dict[str, float]()
    try:
        _take(found, away, queue_us, made, moved_bytes, meter, failed, first, after, between, keep)
    except BaseException:
        keep(found)  # Ctrl-C too: what was timed so far is not lost
        raise
    return {  # passes that do not agree leave a median, which a busy one may have given
        key: _OpTime(
            least_agreed(us),
            (min if have_agreed(us) else max)(away.get(key) or [0.0]),
            queue_us[key],
        )
        for key, us in found.items()
    }


def _take(
    found: _Times, away: dict[str, list[float]], queue_us: dict[str, float],
    made: Mapping[str, Callable[[], Run]], moved_bytes: Mapping[str, int], meter: Meter,
    failed: _Failed, first: Callable[[str, Run], None], after: Callable[[int], None],
    between: Callable[[], None] | None, keep: Callable[[_Times], None],
) -> None:  # fmt: skip
    kept_s = time.monotonic()
    is_here = meter.device == CPU  # while another device runs, this thread waits
    for number in range(meter.passes + (MORE_PASSES if meter.passes > 1 else 0)):
        for at, key in enumerate(made):
            # Further passes are only for ops whose two least times differ.
            if key in found and not (number >= meter.passes and have_agreed(found[key])):
                try:
                    run = made[key]()
                    if number == 0:  # `first` looks at layouts, so all run
                        first(key, run)
                        queue_us[key] = meter.queue_us(run)
                    if len(found[key]) <= number:  # else an earlier process took them
                        watch = LoadAwareTimer()
                        found[key].append(meter.median_us(run, moved_bytes[key]))
                        away.setdefault(key, []).append(watch.away if is_here else 0.0)
                    del run  # or its inputs would be there beside those of the next
                except KERNEL_ERRORS as error:
                    del found[key]
                    failed(key, error)
            if number < meter.passes:
                after(number * len(made) + at + 1)
            if time.monotonic() - kept_s > KEEP_S:
                keep(found)
                kept_s = time.monotonic()
        if between is not None and number < meter.passes:
            between()


# Made data to run a traced node on its own. A kernel that is given an index out of range, and does
# not look, writes to memory that is not its own. So random integers go only to kernels that check
# them, or stay below a known bound. What an op has made for its backward (places of a pooling,
# pivots, a seed) is taken from a run of it. All others are zero.

_BLOCK = 65_521  # elements of the random pattern that made data repeats; prime: no row is another
_LINE_BYTES = 64  # of the caches: no kernel's speed hangs on more than an address's place in a line
_CHECKED = (  # ops that raise where an index is out of range
    "aten.index.", "aten.index_put", "aten.index_select.", "aten.index_add", "aten.index_copy",
    "aten.gather.", "aten.scatter", "aten.take.", "aten.put", "aten.nll_loss",
)  # fmt: skip
_ASSERTIONS = ("aten._assert_async", "aten._functional_assert_async")  # if a tensor says False
_NORMS: dict[Any, int] = {  # the place of the weight among the arguments of each norm
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
    aten._native_batch_norm_legit_functional.default: 1,
    aten._native_batch_norm_legit.no_stats: 1,
}
_BOUND: dict[Any, Callable[[Any], int]] = {
    aten.embedding.default: lambda node: node.args[0].meta["val"].shape[0],
    aten.embedding_dense_backward.default: lambda node: node.args[2],
    aten._embedding_bag.default: lambda node: node.args[0].meta["val"].shape[0],
    aten._embedding_bag_backward.default: lambda node: node.args[6],
}  # rows of the table that each reads at the indices in its argument 1


def cost_key(node: fx.Node) -> str:
    """What determines a node's cost: op, shapes, strides, alignment, dtypes and scalars."""

    def described(leaf: Any) -> str:
        if isinstance(leaf, fx.Node):
            value = leaf.meta.get("val")
            return _described(value) if isinstance(value, Tensor) else repr(value)
        return repr(leaf)

    arguments = pytree.tree_map(described, (tuple(node.args), dict(node.kwargs)))
    return f"{target_name(node)}{arguments}"


def _described(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    # The steps of an unrolled loop read one tensor each at its own offset: one cost does for all.
    offset = tensor.storage_offset() % max(1, _LINE_BYTES // tensor.element_size())
    return f"{dtype}{list(tensor.shape)}/{list(tensor.stride())}+{offset}"


def sample_arguments(node: fx.Node, constants: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments like the node's, of made data. `constants` holds the tensors of ``get_attr``."""
    indices = node.args[1] if node.target in _BOUND else None

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf.op == "get_attr":
            return getattr(constants, str(leaf.target))  # real values, so kernels may trust them
        value = leaf.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        is_asserted, dtype = target_name(node).startswith(_ASSERTIONS), value.dtype
        is_number = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
        if is_number or is_asserted:
            is_factor = kind_of_target(target_name(node)) in OF_PRODUCTS
            tensor = sample_tensor(value, 1, is_factor=is_factor)
            tensor = tensor.to(_dtype_of_kernel(leaf, value))
            return tensor.fill_(1) if is_asserted else tensor
        if leaf is indices or _is_checked(node, leaf):
            return sample_tensor(value, _index_bound(node))
        if (source := _maker(leaf)) is None:
            return _as(value, _storage_for(value).zero_())
        found = run_locally(runner_of(source, constants))
        return found if source is leaf else found[leaf.args[1]]

    return pytree.tree_map(made, (tuple(node.args), dict(node.kwargs)))


def runner_of(node: fx.Node, constants: Any) -> Callable[[], Any]:
    args, kwargs = sample_arguments(node, constants)  # outside of the run: it is not timed
    target = local_runner(node)
    return lambda: target(*args, **kwargs)


def _is_checked(node: fx.Node, indices: fx.Node) -> bool:
    # All steps of a joined op that read them must check.
    calls = zip(joined_op_names(node), calls_of(node), strict=True)
    readers = (op for op, call in calls if indices in pytree.tree_leaves(call))
    return all(op.startswith(_CHECKED) for op in readers)


def _dtype_of_kernel(leaf: fx.Node, value: Tensor) -> torch.dtype:
    while is_alias_of_input(leaf):
        leaf = leaf.all_input_nodes[0]
    source = leaf.args[0] if is_getitem(leaf) else None
    if not isinstance(source, fx.Node) or source.target not in _NORMS or leaf.args[1] not in (1, 2):
        return value.dtype
    weight = source.args[_NORMS[source.target]]  # as precise as the weight, not as in the trace
    if value.device.type != CPU or not isinstance(weight, fx.Node):
        return value.dtype
    return weight.meta["val"].dtype


def _maker(leaf: fx.Node) -> fx.Node | None:
    """The op of torch that makes these integers, beside another result or of no tensor at all."""
    source = leaf.args[0] if is_getitem(leaf) else leaf
    if not isinstance(source, fx.Node) or not isinstance(source.target, OpOverload):
        return None
    return source if is_getitem(leaf) or not leaf.all_input_nodes else None


def _index_bound(node: fx.Node) -> int:
    if node.target in _BOUND:
        return max(1, int(_BOUND[node.target](node)))
    # An op that also makes what it writes to reads no tensor as large as that.
    values = [leaf.meta.get("val") for leaf in (*node.all_input_nodes, node)]
    floats = (one for one in values if isinstance(one, Tensor) and one.is_floating_point())
    return max(1, min((size for one in floats for size in one.shape), default=1))


def _storage_for(like: Tensor) -> Tensor:
    n_elements = like.untyped_storage().nbytes() // like.element_size()
    return torch.empty(n_elements, dtype=like.dtype, device=like.device)


def _as(like: Tensor, flat: Tensor) -> Tensor:
    return torch.as_strided(flat, like.shape, like.stride(), like.storage_offset())


def sample_tensor(like: Tensor, bound: int, *, is_factor: bool = False) -> Tensor:
    """`is_factor` : of products, which take more power, and so time, on numbers of both signs."""
    flat = _storage_for(like)
    # 0.1 to 0.9: probabilities, and no denormals, which are slow. A repeated block is quick.
    n, where = min(_BLOCK, flat.numel()), flat.device
    if flat.dtype == torch.bool:
        block = torch.rand(n, device=where) < 0.9
    elif is_factor:
        block = torch.randn(n, device=where).to(flat.dtype)
    elif flat.is_floating_point() or flat.is_complex():
        block = torch.rand(n, device=where).mul_(0.8).add_(0.1).to(flat.dtype)
    else:
        block = torch.randint(bound, (n,), device=where).to(flat.dtype)
    whole = flat.numel() // _BLOCK * _BLOCK
    if whole:
        flat[:whole].view(-1, _BLOCK).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])
    return _as(like, flat)
