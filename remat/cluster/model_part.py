"""The part of a model that one stage of a pipeline has, as a module with the model's names.

Blocks run one after another with the arguments that the model gives to all of them. A first stage
runs what comes before its blocks; a last one what follows them, and the loss, so that no result of
the model outlives its microbatch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from remat.cluster.capture.model_chain import leaf_on_meta, state_on_meta
from remat.cluster.capture.rank_graph import SEQUENCE, Passes
from remat.cluster.capture.watching import WAY_OUT
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.torch_private.core import OpWatcher, pytree
from remat.graph_capture.tracing.step_module import apply_loss
from remat.rewriter.user_module.own_forward import shell_with, with_replaced

# Whatever a model's forward does around its blocks is run as it stands, so no convention is asked
# of it. Forward is left at the first block by an exception. What follows the last block is reached
# with everything before it on the meta device, where it costs nothing, and with the border that the
# last block has made in place of the meta one.


# No `Exception`: a forward may catch those.
class Arrival(BaseException):
    """The call of the first block; all blocks are given its arguments beside the border."""

    def __init__(self, border: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(border, args, kwargs)  # a copy is made of these
        self.border, self.args_, self.kwargs = border, args, kwargs


class _Leaves(nn.Module):
    """In the place of the first block: ends forward there."""

    def forward(self, border: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise Arrival(border, args, kwargs)


class _Resumes(nn.Module):
    """In the place of the last block: what it would return; ends what runs on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.border: Tensor | None = None
        self.on_meta = contextlib.ExitStack()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.on_meta.close()
        border, self.border = self.border, None
        assert border is not None
        return border


class Before:
    def __init__(self, model: nn.Module, first_block: nn.Module) -> None:
        self.module = with_replaced(model, {first_block: _Leaves()})

    def __call__(self, *args: Any, **kwargs: Any) -> Arrival:
        try:
            self.module(*args, **kwargs)
        except Arrival as found:
            # Its traceback would keep the frames of forward, and all that they name.
            return found.with_traceback(None)
        raise CaptureError(
            "name the blocks that each forward runs with --blocks: forward of "
            f"{type(self.module).__name__} does not reach its first block"
        )


class Behind:
    """What a model runs behind its last block; modules `of_behind` stay as they are."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], of_behind: Sequence[nn.Module],
        args: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self._given = _Resumes()
        # What `deepcopy` finds in its memo it takes as it is.
        memo: dict[int, Any] = {id(block): Passes() for block in blocks}
        memo |= {id(blocks[-1]): self._given} | {id(module): module for module in of_behind}
        memo |= state_on_meta(model, trains=False)
        self._shell = copy.deepcopy(model, memo)
        with torch.no_grad():
            self._args = pytree.tree_map(leaf_on_meta, args)

    def __call__(self, border: Tensor) -> Any:
        given = self._given
        given.border = border
        with given.on_meta:
            # Until `_Resumes` is called, which closes it.
            given.on_meta.enter_context(torch.device("meta"))
            return self._shell(*self._args)


class _DependsOn(OpWatcher):
    """Follows what is computed from some tensors: from their contents, not from their shapes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        # Held, so that no other tensor gets the id of one.
        self.known = {id(tensor): tensor for tensor in tensors}

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if any(id(leaf) in self.known for leaf in pytree.tree_leaves((args, kwargs))):
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            self.known.update((id(tensor), tensor) for tensor in made)
        return result


def arrival_of(before: Before, model: nn.Module, args: tuple[Any, ...], path: str) -> Arrival:
    """The first block's call for a microbatch; `CaptureError` if later stages cannot make it."""
    batch = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    with torch.no_grad(), _DependsOn([*batch, *model.parameters()]) as watched:
        found = before(*args)
    named = {f"argument {i + 1}": leaf for i, leaf in enumerate(found.args_)} | found.kwargs
    for name, given in named.items():
        # Later stages have neither the batch nor the parameters that it is computed from.
        if any(id(leaf) in watched.known for leaf in pytree.tree_leaves(given)):
            raise CaptureError(
                f"compute {name} in the blocks, or plan without stages with --pp 1: block {path} "
                "gets it, computed from the batch or from parameters, and later stages of a "
                "pipeline have neither"
            )
    return found


def call_like(before: Before, args: tuple[Any, ...]) -> Arrival:
    """As the model would call its first block with a microbatch; no random numbers are used up."""
    devices = {leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)}
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        found = before(*args)
    alone = pytree.tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, Tensor) else leaf, (found.border, found.args_, found.kwargs),
    )  # fmt: skip
    return Arrival(*alone)


TARGET = "remat_target"  # the keyword by which a last stage is given its microbatch of the target


@dataclass(frozen=True)
class WholeRun:
    """Where a rank has all tokens and all blocks: the model's own forward, and the loss."""

    blocks: tuple[nn.Module, ...]
    loss_fn: Callable[..., Any] | None

    def __call__(self, part: ModelPart, args: tuple[Any, ...], target: Any) -> Any:
        return apply_loss(self.loss_fn, super(ModelPart, part).forward(*args), target)


@dataclass(frozen=True)
class StageRun:
    """What a stage runs; `before` and `behind` are None where it lacks that end of the model."""

    before: Callable[..., Arrival] | None
    blocks: tuple[nn.Module, ...]
    behind: Behind | None
    given: Arrival
    loss_fn: Callable[..., Any] | None

    def __call__(self, part: ModelPart, args: tuple[Any, ...], target: Any) -> Any:
        x: Tensor = args[0] if self.before is None else self.before(*args).border
        for block in self.blocks:
            x = block(x, *self.given.args_, **self.given.kwargs)
        return x if self.behind is None else apply_loss(self.loss_fn, self.behind(x), target)


class ModelPart(nn.Module):
    """What one stage has of a model: the modules and names that are its own, and no others."""

    _remat_run: StageRun | WholeRun

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The border that the stage sends, [microbatch, ...], or on the last stage the loss."""
        return self._remat_run(self, args, kwargs.pop(TARGET, None))


def model_part(
    model: nn.Module, kept: Mapping[str, nn.Module], run: StageRun | WholeRun
) -> ModelPart:
    """The part of `model` that holds `kept`, by path."""
    part = _pruned_module(model, "", kept)
    # Of a class that derives from the model's, so that `isinstance` holds.
    part.__class__ = type(f"{type(model).__name__}Part", (ModelPart, type(model)), {})
    assert isinstance(part, ModelPart)
    # As a plain attribute: its modules are registered under their own names already.
    part.__dict__["_remat_run"] = run
    return part


def _pruned_module(module: nn.Module, path: str, kept: Mapping[str, nn.Module]) -> nn.Module:
    children: dict[str, nn.Module | None] = {}
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        if at in kept:
            children[name] = kept[at]
        elif any(one.startswith(f"{at}.") for one in kept):
            children[name] = _pruned_module(child, at, kept)
    return shell_with(module, children)


def beside_blocks(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Module]:
    """The outermost modules in which no block lies, by path."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in (*found, *blocks))
        holds = not path or any(block.startswith(f"{path}.") for block in blocks)
        if not (is_inside or holds or path in blocks):
            found[path] = module
    return found


# Ranks are given whole sequences, and each takes its own tokens. What runs before the blocks runs
# on these alone where it treats each token by itself, as an embedding does. Where it knows
# positions it runs on all tokens, and its result is cut.


@dataclass(frozen=True)
class SequencePart:
    """The `at`-th of `count` equal parts of sequences of `seq` tokens."""

    seq: int
    at: int
    count: int

    def of(self, batch: Any) -> Any:
        """A batch whose tensors of [batch, seq, ...] are cut; all else is as it was."""
        return pytree.tree_map(
            lambda leaf: self.along(leaf, SEQUENCE) if self.counts_tokens(leaf) else leaf, batch
        )

    def along(self, tensor: Tensor, dim: int) -> Tensor:
        # In one piece, as a whole batch is: the model's code may view it.
        return tensor.chunk(self.count, dim)[self.at].contiguous()

    def counts_tokens(self, leaf: object) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > SEQUENCE and (
            leaf.shape[SEQUENCE] == self.seq
        )  # fmt: skip

    def loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda result, *target: loss_fn(result, *self.of(target))


def cut_dimension(whole: object, part: object, sequence: SequencePart, name: str) -> int | None:
    """The dimension of an argument that counts tokens, or None; `CaptureError` if several do."""
    if not (isinstance(whole, Tensor) and isinstance(part, Tensor)):
        return None
    pairs = zip(whole.shape, part.shape, strict=True) if whole.dim() == part.dim() else ()
    found = [dim for dim, (of_all, own) in enumerate(pairs) if of_all != own]
    if len(found) > 1 or whole.dim() != part.dim():
        raise CaptureError(
            f"give blocks one {name} for each token, or {WAY_OUT}: it is {list(whole.shape)} for "
            f"{sequence.seq} tokens and {list(part.shape)} for a context parallel rank's"
        )
    return found[0] if found else None


def drawn_like(tensor: Tensor, seed: int) -> Tensor:
    """Numbers to try a block with, in place of a border."""
    # A stream of its own leaves the user's random numbers as they are.
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=stream).to(tensor.device, tensor.dtype)
