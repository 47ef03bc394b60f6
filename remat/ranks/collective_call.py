"""Several ranks in one call: they agree at each point, and leave with the same outcome.

What decides how many collectives a rank runs, or whether it goes on at all, is agreed here before
the next collective. An error of any kind on one rank, a `KeyboardInterrupt` too, is raised on all.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import msgspec

from remat.graph_capture import errors
from remat.graph_capture.errors import AgreementError, RematError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from remat.ranks.rank_messages import RankFailure, RankMessages

_Plan = TypeVar("_Plan")


class CollectiveCall(AbstractContextManager["CollectiveCall", None]):
    """The ranks of `group` in one call of the function `what`; without a group, this rank alone.

    Every point that is agreed on has a name, and all ranks come to the same points in one order.
    """

    def __init__(self, group: ProcessGroup | None, what: str) -> None:
        self._group, self._what = group, what
        self._messages: RankMessages | None = None
        self._theirs: BaseException | None = None

    def __enter__(self) -> CollectiveCall:
        if self._group is not None and self._group.size() > 1:
            # Imports torch.distributed, which one process does without.
            from remat.ranks.rank_messages import RankMessages

            self._messages = RankMessages(self._group, self._what)
        return self

    def require_same_step(self, graph_hash: str) -> None:
        """Raise `AgreementError` on every rank where ranks have another step than the first."""
        hashes = self._exchanged("step", graph_hash)
        others = [str(rank) for rank, found in enumerate(hashes) if found != hashes[0]]
        if others:
            raise AgreementError(
                f"the step captured on rank {', '.join(others)} is not that of rank 0, so no plan "
                "can serve both: build the same model, and pass a batch of the same shapes, on all "
                "ranks"
            )

    def require_same_order(self, order: str) -> None:
        """Raise `AgreementError` on every rank where ranks run collectives in different orders."""
        if len(set(self._exchanged("order", order))) > 1:
            raise AgreementError(
                "the plans of the ranks run their collectives in different orders, or one of them "
                "more often, and all would wait for ever: make one plan for all of them by "
                "remat.rematerialize(..., group=torch.distributed.group.WORLD), or rewrite to the "
                "same schedule on each"
            )

    def from_first(self, make: Callable[[], _Plan], kind: type[_Plan]) -> _Plan:
        """What `make` returns on the first rank; `kind` is a msgspec struct."""
        if self._messages is None:
            return make()
        if self._messages.rank == 0:
            made = make()
            self._messages.post("plan", msgspec.json.encode(made).decode())
            return made
        return msgspec.json.decode(self._awaited("plan", 0), type=kind)

    def gathered_texts(self, name: str, mine: str) -> list[str]:
        return self._exchanged(name, mine)

    def all_agree(self, name: str, said: bool) -> bool:
        return all(text == "yes" for text in self._exchanged(name, "yes" if said else "no"))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> None:
        if self._messages is None:
            return
        try:
            self._end(self._messages, error)
        except _store_errors() as lost:
            if error is None or isinstance(error, _store_errors()):
                # No error of this rank's own is hidden by this one.
                raise _gone(self._what) from lost
            error.add_note(f"The other ranks were not told, as their store is gone: {lost}")
        finally:
            # Else the thread would show life for a rank that has left.
            self._messages.close()

    def _exchanged(self, name: str, mine: str) -> list[str]:
        """The texts of all ranks, in order."""
        messages = self._messages
        if messages is None:
            return [mine]
        if messages.rank:
            messages.post(f"{name}/{messages.rank}", mine)
            return msgspec.json.decode(self._awaited(name, 0), type=list[str])
        # The first rank gathers for all: each of the others awaits one rank, not all of them.
        texts = [mine, *(self._awaited(f"{name}/{rank}", rank) for rank in messages.others)]
        messages.post(name, msgspec.json.encode(texts).decode())
        return texts

    def _awaited(self, key: str, rank: int) -> str:
        from remat.ranks.rank_messages import PAUSE_S, SILENT_S, RankWatch

        messages = self._messages
        assert messages is not None
        watch = RankWatch(messages, rank)
        while (text := messages.read(key)) is None:
            if failure := messages.failure():
                self._theirs = error_of(failure, self._what)
                raise self._theirs
            silent_s = watch.silent_s()
            # A rank that has not come may still be at the user's code: it has the group's timeout.
            if silent_s > (SILENT_S if watch.has_come else messages.timeout_s):
                raise AgreementError(_silent_text(self._what, messages.ranks[rank], watch.has_come))
            time.sleep(PAUSE_S)
        return text

    def _end(self, messages: RankMessages, error: BaseException | None) -> None:
        try:
            if error is None:
                # A rank that left early could not be told of an error of a later one.
                self._exchanged("end", "")
            # An error that came from another rank is known to all.
            elif error is not self._theirs:
                self._tell(messages, error)
        finally:
            messages.leave()

    def _tell(self, messages: RankMessages, error: BaseException) -> None:
        before = messages.failure()
        if before is None:
            messages.fail(failure_of(error, messages.ranks[messages.rank]))
        # The earlier error is the cause. A Ctrl-C stays one.
        elif before.rank != messages.ranks[messages.rank] and isinstance(error, Exception):
            raise error_of(before, self._what) from error


def failure_of(error: BaseException, rank: int) -> RankFailure:
    from remat.ranks.rank_messages import RankFailure

    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return RankFailure(rank, type(error).__name__, str(error), place)


def error_of(failure: RankFailure, what: str) -> Exception:
    """remat's own error keeps its class; any other is an `AgreementError`."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, RematError):
        return kind(f"{failure.text} (on rank {failure.rank})")
    said = f"{failure.kind}: {failure.text}" if failure.text else failure.kind
    return AgreementError(
        f"{what} ended on rank {failure.rank} with {said} ({failure.place or 'unknown line'}). All "
        "ranks end with it, as none can go on without the others: see the traceback of that rank"
    )


def _silent_text(what: str, rank: int, has_come: bool) -> str:
    from remat.ranks.rank_messages import SILENT_S

    if has_come:
        return (
            f"rank {rank} has not been heard of for {SILENT_S:.0f} s in {what}: its process has "
            "ended or stands still. See what it said last, and start all ranks again"
        )
    return (
        f"rank {rank} has not called {what}, which all ranks of the group must call, within the "
        "timeout of the group (timeout of init_process_group). Call it on all of them, as often "
        "and in the same order"
    )


def _store_errors() -> type[Exception]:
    from torch.distributed import DistError

    return DistError


def _gone(what: str) -> AgreementError:
    return AgreementError(
        f"the ranks' store cannot be reached any more at the end of {what}: the process that holds "
        "it, most often the first rank or torchrun, has ended. See what it said last"
    )
