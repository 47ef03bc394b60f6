"""A block's options as those of a layer of the whole step."""

from __future__ import annotations

from collections.abc import Sequence

from remat.graph_capture.optimizer_step.microbatch import LayerOption
from remat.solver.blocks.options import BlockOption
from remat.solver.blocks.repeated import Block


def layer_option(
    option: BlockOption, block: Block, held_bytes: int, back_bytes: int, *, turns: bool
) -> LayerOption:
    """A block's option, with what each phase takes beside what the whole step's graph counts.

    The block's own graph holds what others read until the block is done. In the whole step that is
    a value, which may be gone by then.
    """
    turn = block.stop - block.start
    saved_bytes = 0 if turns else option.saved_bytes - held_bytes
    beside = 0 if turns else saved_bytes + held_bytes
    forward, backward = option.live_bytes[: turn + 1], option.live_bytes[turn:]
    if turns:
        forward, backward = option.live_bytes[:0], option.live_bytes
        back_bytes += held_bytes
    return LayerOption(
        saved_bytes=saved_bytes,
        extra_us=option.extra_us,
        forward_workspace_bytes=max(int(forward.max(initial=0)) - beside, 0),
        backward_workspace_bytes=max(int(backward.max()) - beside - back_bytes, 0),
        recomputed=option.recomputed,
    )


def worth_having(options: Sequence[LayerOption]) -> list[LayerOption]:
    """Those that save less, or need less in some phase, than each faster one."""
    kept: list[LayerOption] = []
    for one in sorted(options, key=lambda option: (option.extra_us, option.saved_bytes)):
        is_worse = any(
            other.saved_bytes <= one.saved_bytes
            and other.forward_workspace_bytes <= one.forward_workspace_bytes
            and other.backward_workspace_bytes <= one.backward_workspace_bytes
            for other in kept
        )
        if not is_worse:
            kept.append(one)
    return kept
