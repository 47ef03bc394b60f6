"""Ranks that compile the same graph: an error of one reaches the others before they wait for it.

Dynamo compiles where a rank first meets a graph or a shape, so nobody knows whether the others
compile too. A rank that has compiled waits for those that are at it, and some seconds for others to
begin. A rank that then still has not begun runs code that it has, and is not waited for.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.nn.parallel import DistributedDataParallel

from remat.graph_capture.errors import AgreementError
from remat.graph_capture.over_ranks.collectives import collectives_in, groups_of
from remat.ranks.board import PAUSE_S, SILENT_S, Board, Watch
from remat.ranks.required_group import resolved
from remat.ranks.together import error_of, failure_of

BEGIN_S = 10.0
"""How long others may take to begin, once a rank has compiled."""
WHAT = 'torch.compile(backend="remat")'


@contextlib.contextmanager
def compiled_alike(gm: fx.GraphModule, inputs: Sequence[Any]) -> Generator[CompiledLater]:
    """Compile a graph in here; ranks that take part in its step come out together, or all fail.

    Raises
    ------
    AgreementError : another rank has failed to compile the graph; names it and its error.
    """
    later = CompiledLater(_groups(gm), _graph_key(gm, inputs))
    with _together(later.groups, f"compile/{later.key}"):
        yield later
    later.has_begun = True


class CompiledLater:
    """What is left to compile once forward is: torch compiles backward when it first runs.

    Attributes
    ----------
    has_begun : whether `compiled_alike` has ended. Torch may compile backward before.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], key: str) -> None:
        self.groups, self.key = groups, key
        self.has_begun = False

    def alike(self, compile_inner: Callable[..., Any]) -> Callable[..., Any]:
        """`compile_inner`, by which ranks come out of backward's compilation together too."""

        def compiled(*args: Any, **kwargs: Any) -> Any:
            if not (self.has_begun and kwargs.get("is_backward")):
                return compile_inner(*args, **kwargs)
            with _together(self.groups, f"backward/{self.key}"):
                return compile_inner(*args, **kwargs)

        return compiled


@contextlib.contextmanager
def _together(groups: Iterable[dist.ProcessGroup], what: str) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        boards = [Board(group, what) for group in groups]
        for board in boards:
            stack.callback(board.close)
        try:
            yield
        except BaseException as error:
            for board in boards:
                board.fail(failure_of(error, board.ranks[board.rank]))
                board.leave()
            raise
        for board in boards:
            _hear(board)


def _groups(gm: fx.GraphModule) -> list[dist.ProcessGroup]:
    """The groups of the graph's collectives, and that over which DDP will exchange gradients."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    ddp = DistributedDataParallel._get_active_ddp_module()
    of_ddp: list[Any] = [] if ddp is None else [ddp.process_group]
    found: list[Any] = [*of_ddp, *map(resolved, groups_of(collectives_in(gm)))]
    return [group for group in dict.fromkeys(found) if group.size() > 1]


def _graph_key(gm: fx.GraphModule, inputs: Iterable[Any]) -> str:
    """The same on ranks that compile the same graph for the same shapes."""
    shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in inputs]
    return hashlib.sha256(f"{gm.code}{shapes}{torch.is_grad_enabled()}".encode()).hexdigest()[:16]


def _hear(board: Board) -> None:
    """Wait for the ranks that compile; raise what one of them has failed with."""
    board.post(f"done/{board.rank}", "")
    end = time.monotonic() + BEGIN_S
    watches = {rank: Watch(board, rank) for rank in board.others}
    while watches:
        for rank, watch in list(watches.items()):
            if board.read(f"done/{rank}") is not None:
                del watches[rank]
            elif watch.silent_s() > SILENT_S:
                raise AgreementError(
                    f"rank {board.ranks[rank]} has not been heard of for {SILENT_S:.0f} s while it "
                    "compiled: its process has ended or stands still. See what it said last"
                )
            elif not watch.has_come and time.monotonic() > end:
                del watches[rank]
        if failure := board.failure():
            board.leave()
            raise error_of(failure, WHAT)
        time.sleep(PAUSE_S)
    board.leave()
