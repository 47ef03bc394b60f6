"""What forward has hooks do with the tensors that autograd saves: refused, where it is not exact.

`torch.utils.checkpoint` is one such hook: what it covers is noted, as the unmodified step makes it
again. Buffers that forward writes inside of it are refused.

Eager runs what a checkpoint covers twice, and so writes such a buffer twice: a batch norm counts
each batch double. A plan runs forward as it would be without the checkpoint, and writes it once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torchs_checkpoint

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.provenance import Provenance, line_of_user, path_in_model

_C: Any = torch._C
_Hook: Any = torchs_checkpoint._checkpoint_hook  # pyright: ignore[reportPrivateUsage]


def is_inside_checkpoint() -> bool:
    """Whether what runs now saves its tensors to a checkpoint, which will compute them again."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and hooks[0].__module__ == "torch.utils.checkpoint"


@contextlib.contextmanager
def checkpointed_modules(path: Mapping[int, str]) -> Generator[set[str]]:
    """The set to which the path of each module is added that a checkpoint runs.

    `path` is as of `Provenance`: by the identity of modules.
    """
    found: set[str] = set()

    def note(module: nn.Module, args: Any) -> None:
        if id(module) in path and is_inside_checkpoint():
            found.add(path[id(module)])

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@contextlib.contextmanager
def checkpoints_noted(provenance: Provenance) -> Generator[None]:
    """Number the checkpoints that forward enters, on the nodes of what they cover.

    One within another is a part of it: to make the outer one again is to make both.
    """
    enter, leave, own = _Hook.__enter__, _Hook.__exit__, dict(vars(_Hook))
    depth = entered = 0

    def noted_enter(hook: Any) -> Any:
        nonlocal depth, entered
        result = enter(hook)
        depth, entered = depth + 1, entered + (depth == 0)
        provenance.checkpoint = entered
        return result

    def noted_leave(hook: Any, *what: Any) -> Any:
        nonlocal depth
        depth -= 1
        provenance.checkpoint = entered if depth else 0
        return leave(hook, *what)

    _Hook.__enter__, _Hook.__exit__ = noted_enter, noted_leave
    try:
        yield
    finally:
        for name in ("__enter__", "__exit__"):
            if name in own:
                setattr(_Hook, name, own[name])
            else:  # it is that of a base class
                delattr(_Hook, name)


def refuse_checkpointed_writes(graph: fx.Graph, results: int, paths: set[str]) -> None:
    """Raise `CaptureError` if forward writes to a buffer of a module that a checkpoint covers.

    Parameters
    ----------
    results : how many of the joint graph's outputs are forward's.
    paths : as of `checkpointed_modules`.
    """
    for what in graph.output_node().meta["desc"][:results]:
        buffer = str(getattr(getattr(what, "mutated_input", None), "target", ""))
        module = buffer.rpartition(".")[0]
        if buffer and module in paths:
            raise CaptureError(
                f"forward writes to buffer {path_in_model(buffer)} inside torch.utils.checkpoint: "
                f"eager runs {path_in_model(module) or 'the model'} twice there, and writes it "
                "twice. A plan decides itself what is computed again: call the module without "
                "checkpoint(), and plan that. Buffers are then written once a step"
            )


@contextlib.contextmanager
def no_packing(kind: str) -> Generator[None]:
    """Refuse functions of the user's that pack what autograd saves, while forward runs.

    Those of torch, as `save_on_cpu` and a checkpoint's, give back the bits that they were given.

    Raises
    ------
    CaptureError : forward has autograd save by one; names the line.
    """
    kinds: Any = saved_tensors_hooks
    enter = kinds.__enter__

    def enter_torchs_own(hooks: saved_tensors_hooks) -> Any:
        owner = type(hooks)
        if owner is saved_tensors_hooks or not owner.__module__.startswith("torch."):
            raise CaptureError(
                f"forward of {kind} has autograd pack what it saves{line_of_user()}, and a step "
                "of a plan saves other tensors, as they are. Leave it out: the plan decides what "
                "is kept and what is computed again"
            )
        return enter(hooks)

    kinds.__enter__ = enter_torchs_own
    try:
        yield
    finally:
        kinds.__enter__ = enter
