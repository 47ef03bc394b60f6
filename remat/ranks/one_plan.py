"""One plan for a graph that several ranks compile: the first rank that comes makes it for all.

Each rank has prices of its own, measured or kept on its disk, so plans that ranks made by
themselves could differ. Dynamo compiles where a rank first meets a graph, so nobody knows who else
will compile it, or when. So nobody is waited for, except one that is at it: the first rank that
comes to a graph plans it and leaves the plan in the store. A rank that comes later takes it from
there. Ranks with other graphs, as those of a pipeline, never meet.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch.distributed as dist

from remat.graph_capture.errors import AgreementError
from remat.ranks.board import PAUSE_S, SILENT_S, Board, Watch
from remat.ranks.compiling import WHAT
from remat.ranks.together import error_of, failure_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Plan = TypeVar("Plan")


class OnePlan:
    """The plan of one graph, on one rank; without a board, this rank is alone.

    Attributes
    ----------
    leader : the rank, among all, that makes the plan; None where this rank is alone.
    """

    def __init__(self, board: Board | None) -> None:
        self._board = board
        self.leader = None if board is None else board.ranks[int(board.first("leader"))]

    @property
    def is_made_here(self) -> bool:
        """Whether this rank makes the plan."""
        board = self._board
        return board is None or board.ranks[board.rank] == self.leader

    def post(self, plan: object) -> None:
        """Leave the plan, a msgspec struct, for those that come later."""
        if self._board is not None:
            self._board.post("plan", msgspec.json.encode(plan).decode())

    def theirs(self, kind: type[Plan]) -> Plan:
        """The plan of the rank that makes it, waited for.

        Raises
        ------
        AgreementError : that rank has ended, or stands still. Its own error is raised here too.
        """
        board, leader = self._board, self.leader
        assert board is not None
        assert leader is not None
        watch = Watch(board, board.ranks.index(leader))
        while (text := board.read("plan")) is None:
            if failure := board.failure():
                board.leave()
                raise error_of(failure, WHAT)
            if watch.silent_s() > SILENT_S:
                raise AgreementError(
                    f"rank {leader} has not been heard of for {SILENT_S:.0f} s while it planned "
                    "the graph that this rank compiles too: its process has ended or stands still. "
                    "See what it said last"
                )
            time.sleep(PAUSE_S)
        return msgspec.json.decode(text, type=kind)


@contextlib.contextmanager
def one_plan(key: str) -> Generator[OnePlan]:
    """The plan of the graph of `key`, among all ranks; an error in here reaches those that wait."""
    group = _all_ranks()
    if group is None:
        yield OnePlan(None)
        return
    board = Board(group, f"plan/{key}")
    one = OnePlan(board)
    try:
        yield one
    except BaseException as error:
        if one.is_made_here:
            board.fail(failure_of(error, board.ranks[board.rank]))
            board.leave()
        raise
    finally:
        board.close()


def is_alone() -> bool:
    """Whether no other rank can compile what this one does."""
    return _all_ranks() is None


def _all_ranks() -> ProcessGroup | None:
    """The group of all ranks; None where there is one rank, or no group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD
    return group if group is not None and group.size() > 1 else None
