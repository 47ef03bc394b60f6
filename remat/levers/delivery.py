"""A plan's step in one arena: its requests are recorded, placed, and served from their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from remat.schedules.layout import CPU_ALIGNMENT_BYTES
from remat.solver.layout.placing import place_buffers

if TYPE_CHECKING:
    from torch import nn

    from remat.rewriter.arena.arena import Arena


def use_arena(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
) -> Arena:
    """Serve the training steps of a rewritten module on a CPU from one arena.

    Two steps run, of which the second is recorded; gradients, buffers, the batch and the random
    streams are put back as they were. Each request gets a place near the least arena, and each
    training step from then on is served from it. Bits are the same, page faults end. What is not
    as recorded is served by torch's allocator, and counted (`Arena.counts`).

    torch's allocator for the CPU is wrapped for the rest of the process, which changes nothing for
    other tensors. The first call compiles the wrapper, in a few seconds, into the cache folder.

    Parameters
    ----------
    module : of `rematerialize` or `rewrite`, in training mode, before it is wrapped. Copies that
        are made of it share the arena; what is pickled has none.
    args, kwargs, target : a batch, as the module is called with.
    loss_fn : where the module returns no loss, the one that you apply to what it returns, with the
        target if there is one. Without it, the layout of its gradients is guessed.

    Returns
    -------
    Arena : to look at what it serves, and to close. The module holds it too.

    Raises
    ------
    ArenaError : no C++ compiler is found, or the module has no step to record.
    DeviceError : the module is not on a CPU.
    """
    from remat.rewriter.arena.arena import Arena, record_step, require_arena_fits
    from remat.rewriter.arena.library import arena_library

    rewritten = require_arena_fits(module)
    # Compiled before a step runs, as there may be no compiler.
    arena_library()
    requests = record_step(rewritten, args, kwargs, loss_fn, target)
    layout = place_buffers(requests.buffers, alignment_bytes=CPU_ALIGNMENT_BYTES)
    return Arena(rewritten._remat_compiled_step.memory, requests, layout)
