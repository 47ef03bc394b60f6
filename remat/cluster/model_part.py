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
import torch.distributed as dist
from torch import Tensor, nn

from remat.cluster.capture.known_values import on_meta
from remat.cluster.capture.model_chain import leaf_on_meta, state_on_meta
from remat.cluster.capture.rank_graph import Passes
from remat.graph_capture.errors import CaptureError, StateChangedError
from remat.graph_capture.torch_private.core import pytree
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


class _Follower:
    """Attributes that are set on a part reach the copy of its model that runs in its place."""

    def __init__(self, copied: nn.Module) -> None:
        self._copied = copied
        self._pairs: list[tuple[nn.Module, nn.Module, dict[str, Any]]] | None = None

    def follow(self, part: nn.Module) -> None:
        """To be called once when the part is made, and then before each use of the copy."""
        if self._pairs is None:
            own = dict(part.named_modules())
            pairs = [(own.get(path), one) for path, one in self._copied.named_modules()]
            self._pairs = [
                (a, b, _own_attributes(a)) for a, b in pairs if a is not None and a is not b
            ]
            for one, copied, _ in self._pairs:
                # Tries have run the copy: what it counts begins anew.
                copied.__dict__.update(
                    {n: v for n, v in _own_attributes(one).items() if _is_plain(v)}
                )
        for i, (one, copied, before) in enumerate(self._pairs):
            now = _own_attributes(one)
            new = {
                name: value for name, value in now.items() if before.get(name, self) is not value
            }
            if new:
                copied.__dict__.update(new)
                self._pairs[i] = one, copied, now


def _is_plain(value: object) -> bool:
    """Whether a copy on another device may share it, as a configuration that is changed later."""
    return not any(isinstance(leaf, nn.Module | Tensor) for leaf in pytree.tree_leaves(value))


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes that its class or its user has set, and its mode."""
    return {n: value for n, value in module.__dict__.items() if n not in _OF_EACH_MODULE}


_OF_EACH_MODULE = {*nn.Module().__dict__, "_remat_run"} - {"training"}


class Before:
    def __init__(self, model: nn.Module, first_block: nn.Module) -> None:
        self.module = with_replaced(model, {first_block: _Leaves()})
        self.follow = _Follower(self.module).follow

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
        args: tuple[Any, ...], *, looks_at_data: bool = False,
    ) -> None:  # fmt: skip
        self._given, self.name = _Resumes(), type(model).__name__
        self._looks_at_data = looks_at_data
        places = {block: Passes() for block in blocks} | {blocks[-1]: self._given}
        self._shell, self._args = _copied_on_meta(model, places, of_behind, args)
        self.follow = _Follower(self._shell).follow

    def __call__(self, border: Tensor) -> Any:
        given = self._given
        given.border = border
        with given.on_meta:
            # Until `_Resumes` is called, which closes it.
            given.on_meta.enter_context(on_meta(self._looks_at_data))
            return self._shell(*self._args)


class Numbers:
    """What a later stage's blocks are given beside tensors, which are on the meta device here."""

    def __init__(
        self, model: nn.Module, first_block: nn.Module, args: tuple[Any, ...], *,
        looks_at_data: bool = False,
    ) -> None:  # fmt: skip
        self._looks_at_data = looks_at_data
        shell, self._args = _copied_on_meta(model, {first_block: _Leaves()}, (), args)
        self._before = Before(shell, nn.Identity())
        self.follow = self._before.follow

    def __call__(self) -> Arrival:
        with torch.no_grad(), on_meta(self._looks_at_data):
            return self._before(*self._args)


def _copied_on_meta(
    model: nn.Module, places: Mapping[nn.Module, nn.Module], kept: Sequence[nn.Module],
    args: tuple[Any, ...],
) -> tuple[nn.Module, tuple[Any, ...]]:  # fmt: skip
    """A copy of a model without storage, other modules in places of some, and its arguments."""
    # What `deepcopy` finds in its memo it takes as it is.
    memo: dict[int, Any] = {id(block): other for block, other in places.items()}
    memo |= {id(module): module for module in kept}
    memo |= state_on_meta(model, trains=False)
    for value in (value for one in model.modules() for value in _own_attributes(one).values()):
        if _is_plain(value):
            memo.setdefault(id(value), value)
    with torch.no_grad():
        return copy.deepcopy(model, memo), pytree.tree_map(leaf_on_meta, args)


def arrival_of(before: Before, args: tuple[Any, ...]) -> Arrival:
    """The first block's call for a microbatch."""
    with torch.no_grad():
        return _called(before, args)


def call_like(before: Before, args: tuple[Any, ...]) -> Arrival:
    """The first block's call for a microbatch, with leaves of autograd's graph in it."""
    found = _called(before, args)
    alone = pytree.tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, Tensor) else leaf, (found.border, found.args_, found.kwargs),
    )  # fmt: skip
    return Arrival(*alone)


def _called(before: Before, args: tuple[Any, ...]) -> Arrival:
    """Without using up any of the user's random numbers."""
    devices = {leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)}
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        return before(*args)


class Beside:
    """What blocks are given beside the border: planned tensors, and what else the step says.

    Parameters
    ----------
    given : what the blocks are planned with. made : the same as `before` makes it, uncut.
    numbers : makes what is no tensor where there is no `before`; None where all are tensors.
    """

    def __init__(self, given: Arrival, made: Arrival, numbers: Numbers | None) -> None:
        self._given, self._spec = pytree.tree_flatten((given.args_, given.kwargs))
        self._made = pytree.tree_leaves((made.args_, made.kwargs))
        self.numbers = numbers
        self._differing: list[Tensor] = []

    def now(self, found: Arrival | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keyword arguments for a microbatch."""
        leaves = list(self._given)
        if found is None and self.numbers is not None:
            own = self.numbers()
            made, spec = pytree.tree_flatten((own.args_, own.kwargs))
            if spec != self._spec:
                raise StateChangedError(_OTHERWISE)
            for i, (was, one) in enumerate(zip(self._made, made, strict=True)):
                leaves[i] = one if is_number(was) else leaves[i]
        if found is not None:
            made, spec = pytree.tree_flatten((found.args_, found.kwargs))
            if spec != self._spec or any(map(_is_other, self._made, made)):
                raise StateChangedError(_OTHERWISE)
            for i, (was, one) in enumerate(zip(self._made, made, strict=True)):
                if not isinstance(one, Tensor):
                    leaves[i] = one
                elif not one.is_meta:
                    # NaN is not itself.
                    self._differing.append((was.ne(one) & was.eq(was)).any())
        return pytree.tree_unflatten(leaves, self._spec)

    def differs(self) -> Tensor | None:
        """Whether some tensor since was not as planned; None where blocks are given none."""
        # All together: a look at each would keep the device waiting.
        differing, self._differing = self._differing, []
        planned = next((leaf for leaf in self._given if isinstance(leaf, Tensor)), None)
        if planned is None:
            return None
        none = torch.zeros((), dtype=torch.bool, device=planned.device)
        return torch.stack([none, *differing]).any().int()


_OTHERWISE = (
    "plan with --cp 1 and --pp 1, or compute it in the blocks: forward gives its blocks a tensor "
    "that is not as it was when the model was split, and other ranks have the old one"
)


def is_number(leaf: object) -> bool:
    """Whether a later stage makes it itself. Masks may be there without values alone."""
    return not (leaf is None or isinstance(leaf, Tensor))


def _is_other(was: object, now: object) -> bool:
    if isinstance(was, Tensor) and isinstance(now, Tensor):
        return was.shape != now.shape or was.dtype != now.dtype
    return isinstance(was, Tensor) or isinstance(now, Tensor)


TARGET = "remat_target"  # the keyword by which a last stage is given its microbatch of the target


@dataclass(frozen=True)
class WholeRun:
    """Where a rank has all tokens and all blocks: the model's own forward, and the loss."""

    blocks: tuple[nn.Module, ...]
    loss_fn: Callable[..., Any] | None
    followers = ()

    def __call__(self, part: ModelPart, args: tuple[Any, ...], target: Any) -> Any:
        return apply_loss(self.loss_fn, super(ModelPart, part).forward(*args), target)


@dataclass(frozen=True)
class StageRun:
    """What a stage runs; `before` and `behind` are None where it lacks that end of the model."""

    before: Callable[..., Arrival] | None
    blocks: tuple[nn.Module, ...]
    behind: Behind | None
    beside: Beside
    loss_fn: Callable[..., Any] | None
    followers: tuple[Callable[[nn.Module], None], ...] = ()

    def __call__(self, part: nn.Module, args: tuple[Any, ...], target: Any) -> Any:
        for follow in self.followers:
            follow(part)
        found = None if self.before is None else self.before(*args)
        x: Tensor = args[0] if found is None else found.border
        args, kwargs = self.beside.now(found)
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x if self.behind is None else apply_loss(self.loss_fn, self.behind(x), target)


class ModelPart(nn.Module):
    """What one stage has of a model: the modules and names that are its own, and no others."""

    _remat_run: StageRun | WholeRun

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The border that the stage sends, [microbatch, ...], or on the last stage the loss."""
        return self._remat_run(self, args, kwargs.pop(TARGET, None))

    def require_same_calls(self, group: Any = None) -> None:
        """`StateChangedError` where blocks should have been given other tensors since.

        On all ranks of a group, where it is found on one.
        """
        run = self._remat_run
        differs = run.beside.differs() if isinstance(run, StageRun) else None
        if differs is not None:
            if group is not None:
                dist.all_reduce(differs, dist.ReduceOp.MAX, group)
            if bool(differs):
                raise StateChangedError(_OTHERWISE)


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
    for follow in run.followers:
        follow(part)
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


def drawn_like(tensor: Tensor, seed: int) -> Tensor:
    """Numbers to try a block with, in place of a border."""
    # A stream of its own leaves the user's random numbers as they are.
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=stream).to(tensor.device, tensor.dtype)
