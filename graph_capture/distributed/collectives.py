"""Ops in which other ranks take part: collectives, what waits for them, and ranks that are fake.

Each rank must run them as often and in the same order as the others, or all wait for ever. What one
rank does alone, such as timing, runs stand-ins. A trace has a result twice, as the collective
returns it and as it is once somebody has waited; both are one storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.autograd import Function

from remat.graph_capture.distributed.sharding import NAMESPACES
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Op
from remat.graph_capture.joint.nodes import TORCHS_NAMESPACES, argument, tensors_of
from remat.graph_capture.torch_private.core import (
    REDUCE_OP_TO_STR,
    DispatchKey,
    FakeWork,
    OpOverload,
    OpOverloadPacket,
    OpWatcher,
    ProcessGroup,
    Work,
    c10d_ops,
    fake_store,
    has_kernel,
    pytree,
)

ALL_RANKS_RUN = "other ranks take part in it"
RETURNED = f"it makes an output of the step, and {ALL_RANKS_RUN}"
_WAIT = "wait_tensor"
_THROUGH_A_BUFFER = ("all_gather_into_tensor", "reduce_scatter_tensor")

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # shape, strides


def is_wait(node: fx.Node) -> bool:
    return _namespace(node) in NAMESPACES and op_name(node) == _WAIT


def is_collective(node: fx.Node) -> bool:
    """Whether other ranks must run the op of the node too."""
    return _namespace(node) in NAMESPACES and op_name(node) != _WAIT


def waits_late(node: fx.Node) -> bool:
    """Whether `node` may be waited for where its result is first read, and not at once.

    A sum works on a copy of its own. Others hold what they read until then, or, on a CPU, a buffer:
    no predicted peak counts these beside later ops."""
    is_sum = _namespace(node) == "_c10d_functional" and op_name(node) == "all_reduce"
    return is_sum and all(map(is_wait, node.users))


def wait_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes that wait for what `node` returns, in the order of the waits."""
    waits = [user for user in node.users if is_wait(user)]
    # Code that waits for what torch has waited for already does so twice.
    return [one for wait in waits for one in (wait, *wait_nodes(wait))]


def skip_wait(node: fx.Node) -> fx.Node:
    while is_wait(node):
        node = node.all_input_nodes[0]
    return node


def collectives_in(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if is_collective(node)]


def with_returned_run_once(
    ops: Iterable[Op], node_of_op: Mapping[str, fx.Node], ends: Collection[str]
) -> tuple[Op, ...]:
    """`ops`, of which the collectives that make a value of `ends`, the outputs, run once."""
    returned = set(ends)

    def pinned(op: Op) -> Op:
        node = node_of_op.get(op.name)
        if node is None or not is_collective(node) or returned.isdisjoint(op.outputs):
            return op
        return msgspec.structs.replace(op, no_recompute=op.no_recompute or RETURNED)

    return tuple(map(pinned, ops))


def is_collective_target(target: str) -> bool:
    """Whether the target of an op of a graph, such as ``aten.mm.default``, is a collective."""
    space, _, name = target.partition(".")
    return space in NAMESPACES and name.partition(".")[0] != _WAIT


def groups_of(nodes: Iterable[fx.Node]) -> tuple[Any, ...]:
    """The distinct groups of some collectives, by name or as they are, in their order."""
    named = (argument(node, "group_name", _overload(node)) for node in nodes)
    return tuple(dict.fromkeys(group for group in named if group is not None))


def members_of(node: fx.Node) -> Sequence[int]:
    """The ranks of its group, by their numbers among all; this one alone if it names no group."""
    found = [dist.get_process_group_ranks(resolved_group(group)) for group in groups_of([node])]
    return sorted(set[int]().union(*found)) or [0]


def any_rank(collectives: Iterable[fx.Node], said: bool, device: str) -> bool:
    """Whether one of the ranks says so that these collectives bring together. All must ask."""
    flag = torch.tensor(int(said), device=device)
    for group in groups_of(collectives):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=resolved_group(group))
    return bool(flag.item())


def resolved_group(group: Any) -> Any:
    named: Any = dist.distributed_c10d
    # In a graph, a functional collective has its group by name.
    return named._resolve_process_group(group) if isinstance(group, str) else group


def local_runner(node: fx.Node) -> Callable[..., Any]:
    """What runs the op of `node` without other ranks: a collective's results are made up."""
    target = node.target
    assert callable(target)
    if not is_collective(node):
        return target
    made = _layouts(node), _copied_bytes(node)
    return lambda *_args, **_kwargs: _made_up(*made)


def without_other_ranks(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm` itself, its collectives replaced by stand-ins that take the same memory."""
    if found := collectives_in(gm):
        for node in found:
            made = _layouts(node), _copied_bytes(node)
            node.target, node.args, node.kwargs = _made_up, made, {}
        gm.recompile()
    return gm


def op_name(node: fx.Node) -> str:
    return str(getattr(_overload(node), "_opname", ""))


def _namespace(node: fx.Node) -> str:
    return str(getattr(_overload(node), "namespace", "")) if node.op == "call_function" else ""


def _overload(node: fx.Node) -> Any:
    target = node.target
    # Dynamo's graphs call the packet of an op's overloads.
    return getattr(target, "default", target) if isinstance(target, OpOverloadPacket) else target


def _layouts(node: fx.Node) -> Any:
    found: list[_Layout | None] = [
        None if t is None else (tuple(t.shape), tuple(t.stride()), t.dtype, t.device)
        for t in tensors_of(node)
    ]
    return found if isinstance(node.meta.get("val"), (tuple, list)) else found[0]


def _copied_bytes(node: fx.Node) -> int:
    made = [t for t in tensors_of(node) if t is not None]
    if any(t.device.type != "cpu" for t in made):
        return 0
    read = [t for source in node.all_input_nodes for t in tensors_of(source) if t is not None]
    name = op_name(node)  # gloo, on a CPU, gathers, scatters and coalesces in one buffer
    if not name.startswith(_THROUGH_A_BUFFER) and not name.endswith("coalesced"):
        return 0
    return sum(t.nbytes for t in (read if name.startswith("reduce_scatter") else made))


def _made_up(layouts: Any, copied_bytes: int) -> Any:
    made = [_zeros(*one) for one in layouts] if isinstance(layouts, list) else _zeros(*layouts)
    torch.empty(copied_bytes, dtype=torch.uint8)  # as gloo's buffer, so that peaks agree
    return made


def _zeros(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


# `dist.all_reduce` and others that write to arguments, in functional form: autograd sees neither.

NAMESPACE = "c10d"
NAMES = {  # of the ops that have a functional form here: what users call them by
    "allreduce_": "all_reduce", "broadcast_": "broadcast",
    "_allgather_base_": "all_gather_into_tensor", "_reduce_scatter_base_": "reduce_scatter_tensor",
}  # fmt: skip


def run_functionally(func: Any, args: tuple[Any, ...]) -> Any:
    """The results of an op of `NAMES`, run by a functional collective; None for an unknown sum."""
    return _FORMS[func._opname](*args)


def _all_reduce(tensors: list[Tensor], boxed: Any, op: Any, *_: Any) -> Any:
    if not (name := _reduction(op)):
        return None
    for tensor in tensors:
        _write(tensor, c10d_ops.all_reduce(tensor, name, _group(boxed).group_name))
    return tensors, _done()


def _broadcast(tensors: list[Tensor], boxed: Any, root: int, *_: Any) -> Any:
    for tensor in tensors:
        _write(tensor, c10d_ops.broadcast(tensor, root, _group(boxed).group_name))
    return tensors, _done()


def _all_gather(output: Tensor, given: Tensor, boxed: Any, *_: Any) -> Any:
    group = _group(boxed)
    _write(output, c10d_ops.all_gather_into_tensor(given, group.size(), group.group_name))
    return output, _done()


def _reduce_scatter(output: Tensor, given: Tensor, boxed: Any, op: Any, *_: Any) -> Any:
    if not (name := _reduction(op)):
        return None
    group = _group(boxed)
    _write(output, c10d_ops.reduce_scatter_tensor(given, name, group.size(), group.group_name))
    return output, _done()


_FORMS: dict[str, Callable[..., Any]] = {
    "allreduce_": _all_reduce, "broadcast_": _broadcast, "_allgather_base_": _all_gather,
    "_reduce_scatter_base_": _reduce_scatter,
}  # fmt: skip


def _write(tensor: Tensor, found: Any) -> None:
    tensor.copy_(c10d_ops.wait_tensor(found).view(tensor.shape))


def _group(boxed: Any) -> dist.ProcessGroup:
    return ProcessGroup.unbox(boxed) if not isinstance(boxed, ProcessGroup) else boxed


def _reduction(boxed: Any) -> str:
    """How functional collectives call a way to reduce; empty for one that they lack."""
    number = int(boxed.op())
    known: dict[Any, str] = dict(REDUCE_OP_TO_STR)
    return next((name for op, name in known.items() if int(op) == number), "")


def _done() -> Any:
    return Work.boxed(FakeWork())  # `_write` has waited


_SENT = "AsyncCollectiveTensor"


class _Arrived(Function):
    """The tensor that has arrived; its gradient is that of the one that was sent."""

    @staticmethod
    def forward(ctx: Any, sent: Any) -> Tensor:
        return sent.trigger_wait().detach()  # another object, as autograd notes its history on it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def is_in_flight(leaf: object) -> bool:
    """Whether a collective may still write to it."""
    return type(leaf).__name__ == _SENT  # told by the name, as importing the class takes long


def wait_all(tree: Any) -> Any:
    """The tree with each such tensor as a plain one, once it has arrived."""
    # Eager waits where an op first reads one. Traced or compiled, a step takes plain tensors: torch
    # 2.11 fails at others, and later releases wait op by op.
    return pytree.tree_map(lambda leaf: _Arrived.apply(leaf) if is_in_flight(leaf) else leaf, tree)


# torch's fake group: collectives do nothing, and one process traces one rank of a thousand.

_BACKEND = "fake"
_WORLD = 4096  # ranks of the fake world. It has no threads and no memory of its own.


class FakeGroups:
    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Any] = {}

    def group(self, ranks: int, apart: int = 1) -> Any:
        """The group of rank 0 with so many ranks, of which neighbours lie so far apart."""
        key = ranks, apart
        if key not in self._known:
            self._known[key] = dist.new_group([apart * i for i in range(ranks)])
        return self._known[key]

    def has(self, named: tuple[Any, ...]) -> bool:
        """Whether groups, as a graph names them, were made here."""
        return {group.group_name for group in self._known.values()}.issuperset(named)


@contextlib.contextmanager
def fake_ranks(world_size: int = _WORLD) -> Generator[FakeGroups]:
    """In the block this process is rank 0 of so many."""
    if dist.is_initialized():
        raise CaptureError(
            "plan the cluster in a process of its own, or before init_process_group: it needs a "
            "fake process group, and this process has a real one"
        )
    dist.init_process_group(_BACKEND, rank=0, world_size=world_size, store=fake_store())
    try:
        yield FakeGroups()
    finally:
        dist.destroy_process_group()


def is_fake(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == _BACKEND


_ALIASES = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")  # for kernels of several
_Result = TypeVar("_Result")


class NeedsOtherRanksError(RuntimeError):
    """An op was run alone that communicates with other ranks."""


class _LocalExecution(OpWatcher):
    """Fails where a collective would wait for other ranks, also inside of an op of somebody's."""

    supports_higher_order_operators = True

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_collective_target(str(func)):
            raise NeedsOtherRanksError(
                f"{func} waits for other ranks, and ops are timed on one alone"
            )
        if (key := _kernel_of(func, pytree.tree_leaves((args, kwargs)))) is None:
            return func(*args, **kwargs)
        with self:  # off in here; on again, it sees what others' kernels run
            return func._op_dk(key, *args, **kwargs)


def _kernel_of(func: Any, read: list[Any]) -> DispatchKey | None:
    """Where the kernel of an op is that is not torch's; None of torch's, and of one without."""
    tensors = [leaf for leaf in read if isinstance(leaf, Tensor)]
    if not isinstance(func, OpOverload) or func.namespace in TORCHS_NAMESPACES or not tensors:
        return None
    own = "CUDA" if any(tensor.is_cuda for tensor in tensors) else "CPU"
    for key in (own, *_ALIASES):  # one for all devices has an alias; another key ends the process
        if has_kernel(func.name(), key):
            return getattr(DispatchKey, key)
    return None


def run_locally(run: Callable[[], _Result]) -> _Result:
    """What `run` returns on one rank; a collective raises, where it would wait for ever."""
    with _LocalExecution():
        return run()
