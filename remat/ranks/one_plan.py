"""One plan for a graph that several ranks compile: the first rank that comes makes it for all.

Ranks' costs differ, and none knows who else will compile a graph: the first leaves its plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, fx

from remat.graph_capture.distributed.collectives import collectives_in, groups_of, resolved_group
from remat.graph_capture.errors import AgreementError
from remat.graph_capture.torch_private.core import active_ddp_module
from remat.ranks.collective_call import (
    PAUSE_S,
    RankFailure,
    RankMessages,
    RankWatch,
    error_of,
)

# A rank's error reaches those that compile the same graph before a collective. A rank that has
# compiled waits for those at it, and some seconds for others to begin.

_BEGIN_S = 10.0  # how long others may take to begin, once a rank has compiled
_WHAT = 'torch.compile(backend="remat")'


@contextlib.contextmanager
def compiled_alike(gm: fx.GraphModule, inputs: Sequence[Any]) -> Generator[CompiledLater]:
    """Ranks that compile a graph in here come out together, or all with `AgreementError`."""
    shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in inputs]
    # The same on ranks that compile the same graph for the same shapes, with gradients or without.
    text = f"{gm.code}{shapes}{torch.is_grad_enabled()}"
    later = CompiledLater(_groups(gm), hashlib.sha256(text.encode()).hexdigest()[:16])
    with _together(later.groups, f"compile/{later.key}"):
        yield later
    later.has_begun = True


class CompiledLater:
    """Backward, which torch compiles when it first runs; `has_begun` once forward is compiled."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], key: str) -> None:
        self.groups, self.key = groups, key
        self.has_begun = False

    def alike(self, compile_inner: Callable[..., Any]) -> Callable[..., Any]:
        """`compile_inner`, by which ranks come out of backward's compilation together too."""

        def compiled(*args: Any, **kwargs: Any) -> Any:
            if not (self.has_begun and kwargs.get("is_backward")):
                return compile_inner(*args, **kwargs)  # an outer `compiled_alike` tells the others
            with _together(self.groups, f"backward/{self.key}"):
                return compile_inner(*args, **kwargs)

        return compiled


@contextlib.contextmanager
def _together(groups: Iterable[dist.ProcessGroup], what: str) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        of_groups = [RankMessages(group, what) for group in groups]
        for messages in of_groups:
            stack.callback(messages.close)
        try:
            yield
        except BaseException as error:  # Ctrl-C too: the others would wait
            for messages in of_groups:
                messages.fail(error)
                messages.leave()
            raise
        for messages in of_groups:
            _hear(messages)


def _groups(gm: fx.GraphModule) -> list[dist.ProcessGroup]:
    """The groups that this rank will meet others in once it runs the graph."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    ddp = active_ddp_module()
    # DDP's reductions are in no graph, and its ranks wait there too.
    of_ddp: list[Any] = [] if ddp is None else [ddp.process_group]
    found: list[Any] = [*of_ddp, *map(resolved_group, groups_of(collectives_in(gm)))]
    # A dict keeps the order, which is the same on all ranks.
    return [group for group in dict.fromkeys(found) if group.size() > 1]


def _hear(messages: RankMessages) -> None:
    """Wait for the ranks that compile; raise what one of them has failed with."""
    messages.post(f"done/{messages.rank}", "")
    end = time.monotonic() + _BEGIN_S
    watches = {rank: RankWatch(messages, rank) for rank in messages.others}
    while watches:
        for rank, watch in list(watches.items()):
            if messages.read(f"done/{rank}") is not None:
                del watches[rank]
            elif watch.silent_s() > messages.silent_s:
                raise AgreementError(_stuck_text(messages, messages.ranks[rank], "it compiled"))
            elif not watch.has_come and time.monotonic() > end:  # it has the code: it will not come
                del watches[rank]
        if failure := messages.failure():  # a rank that fails is never done
            messages.leave()
            raise error_of(failure, _WHAT)
        time.sleep(PAUSE_S)
    messages.leave()


_Plan = TypeVar("_Plan")


class OnePlan:
    """The plan of one graph; `leader` is the rank, among all, that makes it, None if alone."""

    def __init__(self, messages: RankMessages | None) -> None:
        self._messages = messages
        self.leader = None if messages is None else messages.ranks[int(messages.first("leader"))]

    @property
    def is_made_here(self) -> bool:
        messages = self._messages
        return messages is None or messages.ranks[messages.rank] == self.leader

    def post(self, plan: object) -> None:
        if self._messages is not None:
            self._messages.post("plan", msgspec.json.encode(plan).decode())

    def theirs(self, kind: type[_Plan]) -> _Plan:
        """Waited for; `AgreementError` where that rank has failed, has ended, or stands still."""
        messages, leader = self._messages, self.leader
        assert messages is not None
        assert leader is not None
        doing = "it planned the graph that this rank compiles too"
        place = messages.ranks.index(leader)
        text = messages.awaited("plan", place, lambda rank, _: _stuck_text(messages, rank, doing))
        if isinstance(text, RankFailure):
            messages.leave()
            raise error_of(text, _WHAT)
        return msgspec.json.decode(text, type=kind)


def _stuck_text(messages: RankMessages, rank: int, doing: str) -> str:
    return (
        f"see the last output of rank {rank}: it has not been heard of for "
        f"{messages.silent_s:.0f} s while {doing}, so its process has ended or hangs"
    )


@contextlib.contextmanager
def one_plan(key: str) -> Generator[OnePlan]:
    """The plan of the graph of `key`; an error in here reaches the ranks that wait for it."""
    if (group := _all_ranks()) is None:
        yield OnePlan(None)
        return
    messages = RankMessages(group, f"plan/{key}")
    one = OnePlan(messages)
    try:
        yield one
    except BaseException as error:
        if one.is_made_here:  # nobody waits for a rank that follows
            messages.fail(error)
            messages.leave()
        raise
    finally:
        messages.close()


def is_alone() -> bool:
    return _all_ranks() is None


def _all_ranks() -> dist.ProcessGroup | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD  # torch types WORLD as None where no group is initialised
    return group if group is not None and group.size() > 1 else None
