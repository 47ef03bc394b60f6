"""The module that is traced: the user's model, followed by the loss if there is one."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from remat.graph_capture.distributed.dtensors import is_distributed
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.constant_folding import ConstantFolder, TraceSizes
from remat.graph_capture.joint.nodes import mark_forward
from remat.graph_capture.joint.output_aliasing import views_told_apart
from remat.graph_capture.joint.provenance import (
    COVERED_KEY,
    Provenance,
    line_of_user,
    path_in_model,
)
from remat.graph_capture.python_state.executed_code import ExecutedCode
from remat.graph_capture.python_state.module_hooks import ALL_HOOKS
from remat.graph_capture.python_state.state_slots import PLAIN
from remat.graph_capture.python_state.tensor_attributes import StandIns
from remat.graph_capture.refusals import refuse_subclass
from remat.graph_capture.torch_private.core import CheckpointHook, pytree, saved_tensor_hooks
from remat.graph_capture.tracing.attribute_writes import ForwardWrites
from remat.graph_capture.tracing.left_out import Outputs, names_left_out, used_alone
from remat.graph_capture.tracing.outputs import (
    DuplicateOutputs,
    distinct_results,
    flatten_dataclasses,
)
from remat.graph_capture.tracing.restore import GradientOrder, no_seed, require_unmoved, streams
from remat.graph_capture.tracing.signature import (
    Signature,
    argument_name,
    leaves_with_paths,
    unknown_leaf_message,
)


def is_inside_checkpoint() -> bool:
    hooks = saved_tensor_hooks(True)
    if COVERED_KEY in fx_traceback.current_meta.get("custom", {}):
        return True
    return bool(hooks) and hooks[0].__module__ == "torch.utils.checkpoint"


@contextlib.contextmanager
def checkpointed_modules(path: Mapping[int, str]) -> Generator[set[str]]:
    """The set to which the path of each module is added that a checkpoint runs."""
    found: set[str] = set()

    def note(module: nn.Module, args: Any) -> None:
        if id(module) in path and is_inside_checkpoint():  # a hook sees all modules of the process
            found.add(path[id(module)])

    with nn.modules.module.register_module_forward_pre_hook(note):
        yield found


@contextlib.contextmanager
def checkpoints_noted(provenance: Provenance) -> Generator[None]:
    """Number the checkpoints that forward enters, on the nodes of what they cover."""
    enter, leave = CheckpointHook.__enter__, CheckpointHook.__exit__
    own = dict(vars(CheckpointHook))
    depth = entered = 0

    def noted_enter(hook: Any) -> Any:
        nonlocal depth, entered
        result = enter(hook)
        depth, entered = depth + 1, entered + (depth == 0)  # to make the outer again makes both
        provenance.checkpoint = entered
        return result

    def noted_leave(hook: Any, *what: Any) -> Any:
        nonlocal depth
        depth -= 1
        provenance.checkpoint = entered if depth else 0
        return leave(hook, *what)

    CheckpointHook.__enter__, CheckpointHook.__exit__ = noted_enter, noted_leave
    try:
        yield
    finally:
        for name in ("__enter__", "__exit__"):
            delattr(CheckpointHook, name)
            if name in own:  # else it is that of a base class
                setattr(CheckpointHook, name, own[name])


def refuse_checkpointed_writes(graph: fx.Graph, results: int, paths: set[str]) -> None:
    """`CaptureError` if forward writes to a buffer under a checkpoint; its `results` come first."""
    for what in graph.output_node().meta["desc"][:results]:  # a batch norm would count twice
        buffer = str(getattr(getattr(what, "mutated_input", None), "target", ""))
        module = buffer.rpartition(".")[0]
        if buffer and module in paths:
            raise CaptureError(
                "call the module without torch.utils.checkpoint: a plan itself decides what to "
                "recompute.\n"
                f"Forward writes to buffer {path_in_model(buffer)} inside checkpoint, where eager "
                f"runs {path_in_model(module) or 'the model'} twice and writes it twice; planned, "
                "it is written once a step"
            )


@contextlib.contextmanager
def _no_packing(kind: str) -> Generator[None]:
    """Refuse functions of the user's that pack what autograd saves, while forward runs."""
    kinds: Any = saved_tensors_hooks
    enter = kinds.__enter__

    def enter_torchs_own(hooks: saved_tensors_hooks) -> Any:
        owner = type(hooks)
        # Torch's own, as `save_on_cpu` and a checkpoint's, give back the bits that they were given.
        if owner is saved_tensors_hooks or not owner.__module__.startswith("torch."):
            raise CaptureError(
                "leave out saved tensor hooks, as the plan decides what is kept: forward of "
                f"{kind} has autograd pack what it saves{line_of_user()}, and a plan's step saves "
                "other tensors, as they are"
            )
        return enter(hooks)

    kinds.__enter__ = enter_torchs_own
    try:
        yield
    finally:
        kinds.__enter__ = enter


LossFunction = Callable[..., Any]


class StepModule(nn.Module):
    """As in `torch.distributed.pipelining`, `loss_fn` takes the output, and the target if there is
    one. Tensors that forward sets on attributes come as the second of a pair."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction | None, writes: ForwardWrites,
        ran: ExecutedCode | None = None, over: TraceSizes | None = None,
        signature: Signature | None = None, outputs: Outputs | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.loss_fn, self._outputs = model, loss_fn, outputs
        self.left_out: tuple[str, ...] = ()
        self._writes, self._ran, self._over, self._signature = writes, ran, over, signature
        on_batch = zip(signature.names, signature.attributes, strict=True) if signature else ()
        self._stand_ins = StandIns(self, list(on_batch))
        self._casts_once = torch.is_autocast_cache_enabled()  # AOTAutograd switches it off
        self.duplicate_outputs: DuplicateOutputs | None = None  # those of the last run
        self.known, self.gradient_order = ConstantFolder(), GradientOrder()
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []  # with a copy of each

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        self._writes.begin()  # forward runs more than once, and each run begins alike
        self.gradient_order.watch(self.parameters())
        tables = (t for m in self.modules() for t in (m._parameters, m._buffers) if t)
        self._tables = [(table, dict(table)) for table in tables]
        batch = leaves_with_paths((args, kwargs, target))
        named = [(argument_name(path), leaf) for path, leaf in batch]
        self.known = ConstantFolder(named, self._over)
        for place, number in (self._signature.held_numbers if self._signature else {}).items():
            if number is not None:
                self.known.hold(batch[place][1], number)
        self._stand_ins.give(self, [leaf for _, leaf in batch])
        recorded = self._ran.recorded() if self._ran else contextlib.nullcontext()
        if self._signature and self._signature.as_one:  # forward may ask if two are one
            leaves, spec = pytree.tree_flatten((args, kwargs, target))
            firsts = [leaves[i] for i in self._signature.firsts]
            args, kwargs, target = pytree.tree_unflatten(firsts, spec)
        with _autocast_cache(enabled=self._casts_once), self.known, recorded:
            return self._run(args, kwargs, target)

    @contextlib.contextmanager
    def as_in_forward(self) -> Generator[None]:
        """With the parameters and buffers that the last forward had in the trace."""
        now = [(table, dict(table)) for table, _ in self._tables]
        try:
            for table, then in self._tables:
                table.update(then)
            yield
        finally:
            for table, before in now:
                table.update(before)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        stand, before = streams(), _state(self.model)
        kind = type(self.model).__name__
        with no_seed(kind), _no_packing(kind), without_own_hooks(self.model):
            output = self.model(*args, **kwargs)
            if any(vars(self.model)[name] for name in ALL_HOOKS):
                raise CaptureError(
                    f"register the hook outside forward, before the first step: forward of {kind} "
                    "registers one on the model itself, which its next call would run"
                )
        output = used_alone(output, self._outputs)
        self.left_out = names_left_out(output)
        now = _state(self.model)
        replaced = [name for name, tensor in before.items() if now.get(name) is not tensor]
        if replaced:
            raise CaptureError(
                "write into it instead: self.name.copy_(...) under torch.no_grad(). If only the "
                "first call does it, call the model once on a batch, then plan.\n"
                f"Forward of {kind} puts another tensor in the place of {', '.join(replaced)}, "
                "which a graph cannot do"
            )
        result = flatten_dataclasses(apply_loss(self.loss_fn, output, target))
        if self.known.failure is not None and not torch.compiler.is_compiling():
            raise self.known.failure  # the user's code has caught what eager would not raise

        # Runs forward once more, to find the line that draws random numbers.
        def again() -> Any:
            output = used_alone(self.model(*args, **kwargs), self._outputs)
            return apply_loss(self.loss_fn, output, target)

        self._stand_ins.require_unwritten(kind)
        require_unmoved(kind, stand, again)
        _require_known(kind, result)
        mutated = self._writes.end()
        for tensor in filter(is_distributed, mutated):
            refuse_subclass(f"what forward of {kind} sets on an attribute", tensor)
        mark_forward()
        returned = (result, mutated) if self._writes.mutated else result
        told = views_told_apart(returned)
        distinct, self.duplicate_outputs = distinct_results(told, len(pytree.tree_leaves(result)))
        return distinct


def _require_known(kind: str, result: Any) -> None:
    for path, leaf in leaves_with_paths(result):
        what = f"the result{pytree.keystr(path)} of {kind}"
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise CaptureError(unknown_leaf_message(what, leaf))
        if isinstance(leaf, Tensor) and is_distributed(leaf):
            refuse_subclass(what, leaf)


@contextlib.contextmanager
def _autocast_cache(*, enabled: bool) -> Generator[None]:
    """Tell forward what it is told in eager: whether autocast keeps what it has cast."""
    before = torch.is_autocast_cache_enabled()  # off in AOTAutograd, on for a region in forward
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()  # no tensor of a trace stays there


@contextlib.contextmanager
def without_own_hooks(model: nn.Module) -> Generator[None]:
    before = {name: vars(model)[name] for name in ALL_HOOKS}  # each call runs them around the step
    try:
        vars(model).update({name: OrderedDict() for name in ALL_HOOKS})
        yield
    finally:
        vars(model).update(before)


def _state(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        f"{path}.{name}".lstrip("."): tensor
        for path, module in model.named_modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
    }


def with_loss(model: nn.Module, loss_fn: LossFunction | None) -> nn.Module:
    """The module whose parameters and buffers a step has: the model, or a pair with its loss."""
    if not isinstance(loss_fn, nn.Module):
        return model
    pair = nn.Module()
    pair.model, pair.loss_fn = model, loss_fn
    return pair


def apply_loss(loss_fn: LossFunction | None, output: Any, target: Any) -> Any:
    if loss_fn is None:
        return output
    return loss_fn(output) if target is None else loss_fn(output, target)
