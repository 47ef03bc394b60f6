"""A user's model as the chain of a plan, looked at without storage before it is cut."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from remat.cluster.capture.model_chain import (
    ChainModel,
    ChainShape,
    keep_no_cache,
    leaf_on_meta,
    refuse_stages,
    state_on_meta,
)
from remat.cluster.capture.tokens_over_ranks import WAY_OUT
from remat.cluster.capture.watching import watch
from remat.cluster.model_part import beside_blocks
from remat.cluster.plan_file import MAKE_AGAIN, ClusterFile
from remat.graph_capture.errors import CaptureError, PlanError
from remat.graph_capture.torch_private.core import CallWatcher, pytree
from remat.graph_capture.tracing.fake_tensors import has_storage


def layers_of_stages(plan: ClusterFile) -> list[tuple[str, ...]]:
    """Paths of blocks: the first virtual stage of each rank, then the second."""
    return [stage.layers[i] for i in range(plan.virtual_stages) for stage in plan.stages]


@dataclass(frozen=True)
class WholeChain:
    """A model whose forward is a chain; `before` and `behind` are the modules beside its blocks.

    `of_loss` : parameters that the loss reads beside the model's. `looks_at_data` : forward cannot
    run on the meta device but as code that is compiled.
    """

    model: nn.Module
    blocks: dict[str, nn.Module]
    before: dict[str, nn.Module]
    behind: dict[str, nn.Module]
    of_loss: dict[str, Tensor]
    looks_at_data: bool


def whole_chain(
    model: nn.Module, plan: ClusterFile, args: tuple[Any, ...],
    loss_fn: Callable[..., Any] | None, target: Any,
) -> WholeChain:  # fmt: skip
    """The chain of the plan's blocks.

    `PlanError` : the model has not the plan's blocks. `CaptureError` : it is no chain; two stages
    would share weights; or parameters lie beside the blocks in no module of their own.
    """
    blocks = _blocks(model, plan)
    keep_no_cache(model)
    # A forward of a copy without storage shows the chain, and takes no memory.
    meta = copy.deepcopy(model, state_on_meta(model))
    of_meta = {path: meta.get_submodule(path) for path in blocks}
    on_meta = pytree.tree_map(leaf_on_meta, (args, target))
    loss = _WatchedLoss(loss_fn, model)
    chain = ChainModel(meta, of_meta, on_meta[0], {}, loss_fn and loss, on_meta[1])
    called: list[str] = []
    others = beside_blocks(meta, list(blocks))
    shape = _watched(chain, others, called)
    if shape.unrun:
        raise CaptureError(shape.unrun)
    ranks = plan.parallelism.context_parallel_degree
    if ranks > 1 and shape.unshared:
        raise CaptureError(
            f"{WAY_OUT}: {ranks} context parallel ranks cannot share attention that "
            f"{shape.unshared}"
        )
    stages = plan.parallelism.pipeline_parallel_degree
    if shape.unsent and (ranks > 1 or stages > 1):
        raise CaptureError(shape.unsent)
    if stages > 1:
        refuse_stages(chain, shape)
    _refuse_loose(model, {*blocks, *others})
    own = beside_blocks(model, list(blocks))
    behind = {path: module for path, module in own.items() if path in called}
    before = {path: module for path, module in own.items() if path not in called}
    return WholeChain(model, blocks, before, behind, loss.named(), shape.looks_at_data)


class _WatchedLoss(CallWatcher):
    """A loss function, and the parameters that it reads of its own."""

    def __init__(self, loss_fn: Callable[..., Any] | None, model: nn.Module) -> None:
        super().__init__()
        self._loss_fn = loss_fn
        self._of_model = {id(p) for p in model.parameters()}
        self._found = dict[int, Tensor]()

    def __call__(self, *given: Any) -> Any:
        assert self._loss_fn is not None
        with self, contextlib.suppress(NotImplementedError, RuntimeError):
            return self._loss_fn(*given)
        # It looks at numbers, which there are none of on the meta device.
        return None

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*pytree.tree_map(self._noted, args), **pytree.tree_map(self._noted, kwargs))

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_meta:
            return leaf
        if leaf.is_leaf and leaf.requires_grad and id(leaf) not in self._of_model:
            self._found[id(leaf)] = leaf
        # What the loss holds has a device; what it is given here has none.
        return leaf.to("meta")

    def named(self) -> dict[str, Tensor]:
        own = self._loss_fn.named_parameters() if isinstance(self._loss_fn, nn.Module) else ()
        found: dict[str, Tensor] = {f"loss_fn.{name}": p for name, p in own if p.requires_grad}
        known = {id(p) for p in found.values()}
        others = [p for p in self._found.values() if id(p) not in known]
        return found | {f"loss_fn.{i}": p for i, p in enumerate(others)}


def _watched(chain: ChainModel, others: dict[str, nn.Module], called: list[str]) -> ChainShape:
    """What forward shows; `called` gets the modules that it runs behind the last block alone."""
    arrived, before = list[bool](), set[str]()

    def begin(*_: Any) -> None:
        for one in (arrived, before, called):
            one.clear()  # forward may be run once more

    def note(path: str, *_: Any) -> None:
        if not arrived:
            before.add(path)
        # What runs on both sides belongs before the blocks.
        elif path not in before:
            called.append(path)

    last = chain.blocks[chain.last_path]
    with ExitStack() as hooks:
        hooks.enter_context(chain.model.register_forward_pre_hook(begin))
        hooks.enter_context(last.register_forward_hook(lambda *_: arrived.append(True)))
        for path, module in others.items():
            # A container such as a `ModuleList` is not called itself.
            for one in module.modules():
                hooks.enter_context(one.register_forward_pre_hook(partial(note, path)))
        return watch(chain)


def _blocks(model: nn.Module, plan: ClusterFile) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    places = [path for layers in layers_of_stages(plan) for path in layers]
    missing = [path for path in places if path not in modules]
    if missing:
        raise PlanError(
            f"build the model that was planned, or {MAKE_AGAIN}: the plan's block {missing[0]} is "
            f"not in this {type(model).__name__}, and the plan is for {plan.model}"
        )
    return {path: modules[path] for path in places}


def _refuse_loose(model: nn.Module, inside: set[str]) -> None:
    for name, _ in _state(model):
        owner = name.rpartition(".")[0]
        if not any(owner == path or owner.startswith(f"{path}.") for path in inside):
            raise CaptureError(
                f"move {name} into a module that forward calls: it lies beside the blocks in no "
                "module of its own, so it belongs to no stage"
            )


# A model that no host holds is built on the meta device. Each rank then has storage and values for
# the modules of its own stages alone, from a function of the user's. What comes before the blocks
# is there on all ranks for a moment, since it says what blocks are called with.


Materialize = Callable[[str, nn.Module], object]
"""Gives a module, at a path of the model, storage and values."""


def materialize_modules(modules: Mapping[str, nn.Module], materialize: Materialize | None) -> None:
    """For modules without storage; `PlanError` where one then has none, or is another."""
    tied = _tied_places(modules.values())
    for path, module in modules.items():
        if has_storage(module):
            continue
        before = _facts(module)
        if materialize is not None:
            materialize(path, module)
        _refuse_other(path, before, module)
    # Tied parameters stay tied: the first module that has one gives it its values.
    for (held, name), *others in tied:
        for other, other_name in others:
            other[other_name] = held[name]


def state_by_path(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for path, module in modules.items():
        yield from ((f"{path} {name}", tensor) for name, tensor in _state(module))


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _tied_places(modules: Iterable[nn.Module]) -> list[list[tuple[dict[str, Any], str]]]:
    """Of each tensor that stands in several places: the modules' own dicts, and its names there."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in dict.fromkeys(inner for one in modules for inner in one.modules()):
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((held, name))
    return [group for group in places.values() if len(group) > 1]


def _facts(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in _state(module)}


def _refuse_other(path: str, before: dict[str, tuple[Any, ...]], module: nn.Module) -> None:
    if not has_storage(module):
        name = next(name for name, tensor in _state(module) if tensor.is_meta)
        raise PlanError(
            "call module.to_empty(device=...) in materialize, and then give each parameter and "
            f"buffer its values: it left {path}.{name} without storage"
        )
    after = _facts(module)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise PlanError(
                f"give {path}.{name} only other values in materialize: it is now "
                f"{_facts_text(after.get(name))}, and was {_facts_text(before.get(name))}"
            )


def _facts_text(facts: tuple[Any, ...] | None) -> str:
    if facts is None:
        return "missing"
    shape, dtype, trains = facts
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{'' if trains else ', frozen'}"
