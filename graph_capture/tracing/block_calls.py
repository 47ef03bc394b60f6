"""How a model calls some of its submodules: the inputs of each, noted while it is traced."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch.utils._pytree as pytree
from torch import nn

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Resident
from remat.graph_capture.joint.trace_errors import refuse_subclass
from remat.graph_capture.over_ranks.dtensors import is_distributed
from remat.graph_capture.refuse import refuse_all_frozen, refuse_module
from remat.graph_capture.tracing.recipe import Recipe, autocast_state
from remat.graph_capture.tracing.signature import Signature

SHOWN = 5
"""Module paths that an error shows."""


@dataclass
class BlockCalls:
    """What the blocks were called with in the last forward that was watched.

    Attributes
    ----------
    blocks : by module path. signatures : of the calls of each block, in order.
    autocast : the state at the call of each block.
    """

    blocks: dict[str, nn.Module]
    signatures: dict[str, list[Signature]] = field(default_factory=dict[str, list[Signature]])
    autocast: dict[str, Any] = field(default_factory=dict[str, Any])

    def recipes(self) -> dict[str, Recipe]:
        """How to trace each block by itself, in the order in which they ran.

        Raises
        ------
        CaptureError : a block is not called once a step, or under an autocast of its own.
        """
        for path, block in self.blocks.items():
            count = len(self.signatures.get(path, ()))
            if count != 1:
                raise CaptureError(
                    f"block {path} ({type(block).__name__}) is called {count} times in a step, and "
                    "a block's plan is for one call: narrow the pattern to blocks that are called "
                    "once, or plan the whole model with remat.rematerialize"
                )
            if self.autocast[path] != autocast_state():
                raise CaptureError(
                    f"block {path} runs under an autocast that forward enters by itself: enter it "
                    "around the whole step instead, as torch's documentation shows"
                )
        return {path: self._recipe(path, found[0]) for path, found in self.signatures.items()}

    def _recipe(self, path: str, signature: Signature) -> Recipe:
        name = type(self.blocks[path]).__name__
        return Recipe(name, signature, None, Resident(), self.autocast[path])


def matching_blocks(model: nn.Module, pattern: str, device: str) -> dict[str, nn.Module]:
    """The submodules whose path matches a glob, by path; none lies inside another.

    Of two that match, the outer one is the block. They are captured on `device`.

    Raises
    ------
    CaptureError : the glob matches nothing; a block cannot be captured.
    """
    if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CaptureError(
            f"blocks are named by a glob, such as 'model.layers.*', not by a "
            f"{type(pattern).__name__}: give it first, and the batch after it, as args=(...)"
        )
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not inside and fnmatch.fnmatchcase(path, pattern):
            found[path] = module
    if not found:
        raise CaptureError(_nothing_matched(model, pattern))
    for path, block in found.items():
        try:
            refuse_module(block, device)
            refuse_all_frozen(block)
        except CaptureError as error:
            raise CaptureError(f"block {path}: {error}").caused_by(error) from None
    return found


def _nothing_matched(model: nn.Module, pattern: str) -> str:
    paths = [path for path, _ in model.named_modules() if path]
    shown = ", ".join(paths[:SHOWN]) or "none"
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return (
        f"pattern '{pattern}' matches no submodule of {type(model).__name__}; these are {shown}"
        f"{more}. Blocks are named by their paths, such as 'model.layers.*'"
    )


@contextlib.contextmanager
def watching_calls(model: nn.Module, blocks: dict[str, nn.Module]) -> Generator[BlockCalls]:
    """Note how forward calls `blocks` meanwhile; each call of the model starts anew."""
    calls = BlockCalls(blocks)

    def start() -> None:
        calls.signatures.clear()
        calls.autocast.clear()

    with contextlib.ExitStack() as stack:
        stack.enter_context(_told_first(model, lambda args, kwargs: start()))
        for path, block in blocks.items():
            stack.enter_context(_told_first(block, _noting(calls, path)))
        yield calls


def _noting(calls: BlockCalls, path: str) -> Callable[[Any, Any], None]:
    def note(args: Any, kwargs: Any) -> None:
        for leaf in filter(is_distributed, pytree.tree_leaves((args, kwargs))):
            refuse_subclass(f"an argument of block {path}", leaf)
        calls.signatures.setdefault(path, []).append(Signature((args, kwargs, None)))
        calls.autocast[path] = autocast_state()

    return note


@contextlib.contextmanager
def _told_first(module: nn.Module, tell: Callable[[Any, Any], None]) -> Generator[None]:
    """Call `tell` with the arguments of each forward of `module`, before it runs."""
    own = vars(module).get("forward")
    run = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        tell(args, kwargs)
        return run(*args, **kwargs)

    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own
