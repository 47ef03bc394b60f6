"""What waits between the two parts of backward, over the rewritten blocks of one stage."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from remat.graph_capture.errors import RewriteError
from remat.rewriter.split_backward.waiting import SplitCode, SplitRun, Waiting


class WeightsQueue:
    """W of the blocks whose backward has run, until a runner takes it."""

    def __init__(self) -> None:
        self._left: list[Waiting] = []

    def leave(self, waiting: Waiting) -> None:
        """Keep what waits until it is taken."""
        self._left.append(waiting)

    def take(self) -> Callable[[], None]:
        """What runs W of all that waits now, once."""
        left, self._left = self._left, []

        def finish() -> None:
            while left:
                left.pop(0).finish()

        return finish

    def require_taken(self, what: str) -> None:
        """Raise `RewriteError` if gradients of weights of an earlier backward would be lost."""
        if self._left:
            kind = self._left[0].code.kind
            self._left = []
            raise RewriteError(
                f"{what}, and gradients of weights of the rewritten {kind} were not added yet: "
                "call dw_builder()() after each backward, as PipelineStage(..., dw_builder=...) "
                "does, or call together() first to train without a pipeline"
            )


class StepSplit:
    """How one rewritten block begins a forward whose backward is split."""

    def __init__(self, code: SplitCode, queue: WeightsQueue) -> None:
        self.code, self.queue = code, queue

    def begin(self, state: list[Tensor], used: list[Tensor]) -> tuple[list[Tensor], SplitRun]:
        """The state for the compiled step, and what its backward is told to be.

        Parameters
        ----------
        state : parameters and buffers. used : the same, without those that get no gradient.

        Raises
        ------
        RewriteError : gradients of an earlier backward were not added, or DDP runs around it.
        """
        if DistributedDataParallel._get_active_ddp_module() is not None:
            raise RewriteError(
                f"DistributedDataParallel would reduce the gradients of {self.code.kind} before "
                "those of its weights are made, in the second part of its backward: wrap it by "
                "torch.distributed.fsdp.fully_shard, which pipelines reduce at the end of a step"
            )
        self.queue.require_taken("another forward begins")
        run = SplitRun(self.code, state, self.queue.leave)
        return run.as_inputs(used), run
