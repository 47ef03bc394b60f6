"""Several ranks in one call: they agree at each point, and leave with the same outcome.

What decides how many collectives a rank runs is agreed on before the next. Any rank's error, a
`KeyboardInterrupt` too, is raised on all.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from remat.graph_capture import errors
from remat.graph_capture.errors import AgreementError, RematError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_Plan = TypeVar("_Plan")


class CollectiveCall(AbstractContextManager["CollectiveCall", None]):
    """The ranks of `group` in one call of `what`; all come to the same named points in order."""

    def __init__(self, group: ProcessGroup | None, what: str) -> None:
        self._group, self._what = group, what
        self._messages: RankMessages | None = None
        self._theirs: BaseException | None = None

    def __enter__(self) -> CollectiveCall:
        if self._group is not None and self._group.size() > 1:
            self._messages = RankMessages(self._group, self._what)
        return self

    def require_same_step(self, graph_hash: str, asked: Mapping[str, str] | None = None) -> None:
        """`asked` : what else must be the same, by its name in the error."""
        what, others = self.unlike({"step": graph_hash, **(asked or {})})
        if what == "step":
            raise AgreementError(
                "build the same model, and pass a batch of the same shapes, on all ranks: the "
                f"step captured on rank {others} is not that of rank 0"
            )
        if what:
            raise AgreementError(
                f"give the same {what} on all ranks: what rank {others} has is not what rank 0 has"
            )

    def unlike(self, mine: Mapping[str, str]) -> tuple[str, str]:
        """The first of these texts that differs between ranks, and which ranks differ from the
        first; two empty texts if none. All ranks give the same names, in one round."""
        # Rounds of one call have names of their own.
        name = f"alike/{next(iter(mine))}"
        of_ranks = self.gathered_texts(name, msgspec.json.encode(mine).decode())
        found = [msgspec.json.decode(text, type=dict[str, str]) for text in of_ranks]
        for what, first in found[0].items():
            if others := [str(rank) for rank, one in enumerate(found) if one.get(what) != first]:
                return what, ", ".join(others)
        return "", ""

    def require_same_order(self, order: str) -> None:
        if len(set(self.gathered_texts("order", order))) > 1:
            raise AgreementError(
                "make one plan for all ranks with remat.rematerialize(..., "
                "group=torch.distributed.group.WORLD), or rewrite to the same schedule on each: "
                "they would run collectives in different orders, and wait forever"
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

    def all_agree(self, name: str, said: bool) -> bool:
        return all(text == "yes" for text in self.gathered_texts(name, "yes" if said else "no"))

    def __exit__(self, kind: Any, error: BaseException | None, place: Any) -> None:
        if self._messages is None:
            return
        try:
            self._end(self._messages, error)
        except _store_errors() as lost:
            if error is None or isinstance(error, _store_errors()):
                raise AgreementError(  # it hides no error of this rank
                    "see the last output of the process that holds the ranks' store, usually the "
                    "first rank or torchrun: the store cannot be reached at the end of "
                    f"{self._what}, so that process has ended"
                ) from lost
            error.add_note(f"The other ranks were not told, as their store is gone: {lost}")
        finally:
            self._messages.close()  # else the thread would show life for a rank that has left

    def gathered_texts(self, name: str, mine: str) -> list[str]:
        if (messages := self._messages) is None:
            return [mine]
        if messages.rank:
            messages.post(f"{name}/{messages.rank}", mine)
            return msgspec.json.decode(self._awaited(name, 0), type=list[str])
        # The first rank gathers for all: each of the others awaits one rank, not all of them.
        texts = [mine, *(self._awaited(f"{name}/{rank}", rank) for rank in messages.others)]
        messages.post(name, msgspec.json.encode(texts).decode())
        return texts

    def _awaited(self, key: str, rank: int) -> str:
        messages = self._messages
        assert messages is not None
        text = functools.partial(_silent_text, self._what, messages.silent_s)
        found = messages.awaited(key, rank, text)
        if isinstance(found, RankFailure):
            self._theirs = error_of(found, self._what)
            raise self._theirs
        return found

    def _end(self, messages: RankMessages, error: BaseException | None) -> None:
        try:
            if error is None:
                self.gathered_texts("end", "")  # a rank that left could not be told of later errors
            elif error is not self._theirs:  # an error that came from another rank is known to all
                if (before := messages.failure()) is None:
                    messages.fail(error)
                # The earlier error is the cause. A Ctrl-C stays one.
                elif before.rank != messages.ranks[messages.rank] and isinstance(error, Exception):
                    raise error_of(before, self._what) from error
        finally:
            messages.leave()


def values_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Of their names and all their bits; of what is no plain tensor with storage, its shape."""
    from remat.rewriter.checking.outcomes import fingerprint  # one process does without
    from remat.rewriter.guards.forward import is_plain

    found = hashlib.sha256()
    for name, one in tensors:
        has_bits = is_plain(one) and not one.is_meta
        said = fingerprint(one) if has_bits else f"{type(one).__name__} {one.dtype} {one.shape}"
        found.update(f"{name} {said}\n".encode())
    return found.hexdigest()


def error_of(failure: RankFailure, what: str) -> Exception:
    """remat's own error keeps its class; any other is an `AgreementError`."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, RematError):
        return kind(f"{failure.text} (on rank {failure.rank})")
    said = f"{failure.kind}: {failure.text}" if failure.text else failure.kind
    return AgreementError(
        f"see the traceback of rank {failure.rank}: {what} ended there with {said} "
        f"({failure.place or 'unknown line'}), and no rank can go on without the others"
    )


def _silent_text(what: str, silent_s: float, rank: int, has_come: bool) -> str:
    if has_come:
        return (
            f"see the last output of rank {rank}, and start all ranks again: it has not been heard "
            f"of for {silent_s:.0f} s in {what}, so its process has ended or hangs"
        )
    return (
        f"call {what} on all ranks of the group, as often and in the same order: rank {rank} has "
        "not called it within the timeout of the group (timeout of init_process_group)"
    )


def _store_errors() -> type[Exception]:
    from torch.distributed import DistError

    return DistError


# Short texts in the group's store, beside the collectives. It needs no partner: a failed rank can
# say so while another waits. A thread shows that a rank lives through a long solve.

BEAT_S = 2.0  # seconds between two signs of life
SILENT_S = 60.0  # a rank that has shown none for so long has ended, or its process stands still
_LEAST_BEATS = 3  # that may be missing: a busy machine skips one
PAUSE_S = 0.02
_LAST_BEAT_S = 5.0  # longest wait for the last sign of life to reach the store
LINGER_S = 10.0  # how long a rank stays for its last word to be read

_calls = weakref.WeakKeyDictionary[Any, defaultdict[str, Iterator[int]]]()  # by group and purpose


class RankFailure(msgspec.Struct, frozen=True):
    """The error of one rank, for the others; `rank` among all, `kind` the name of its class."""

    rank: int
    kind: str
    text: str
    place: str = ""


class RankMessages:
    """Texts of one call; the n-th calls with the same `what` on all ranks belong together."""

    def __init__(self, group: ProcessGroup, what: str) -> None:
        import torch.distributed as dist  # one process does without

        from remat.graph_capture.torch_private.core import timeout_of

        calls = _calls.setdefault(group, defaultdict(itertools.count))
        store: Any = group.get_group_store()
        self._store: Any = dist.PrefixStore(f"remat/{what}/{next(calls[what])}", store)
        self.timeout_s = timeout_of(group).total_seconds()
        # Nobody waits longer for a rank that has ended than for one in a collective.
        self.silent_s = min(SILENT_S, max(self.timeout_s, _LEAST_BEATS * BEAT_S))
        self.rank, self.size = group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)
        self._lost = set[int]()
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._show_life, daemon=True)
        self._store.set(f"beat/{self.rank}", "0")  # others see at once that it has come
        self._beat.start()

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def post(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def read(self, key: str) -> str | None:
        # Asked first, since `get` waits until somebody posts.
        return self._store.get(key).decode() if self._store.check([key]) else None

    def first(self, key: str) -> str:
        # The store compares and sets in one request, so two ranks cannot both be first.
        return self._store.compare_set(key, "", str(self.rank)).decode()

    def fail(self, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        mine = RankFailure(self.ranks[self.rank], type(error).__name__, str(error), place)
        # The first error stays: later ones mostly follow from it.
        self._store.compare_set("failure", "", msgspec.json.encode(mine).decode())

    def awaited(
        self, key: str, rank: int, silent_text: Callable[[int, bool], str]
    ) -> str | RankFailure:
        """What a rank posts, or an error of any rank; `AgreementError` where that rank is silent.

        `silent_text`: of its number among all, and whether it has come to this call.
        """
        watch = RankWatch(self, rank)
        while (text := self.read(key)) is None:
            if failure := self.failure():
                return failure
            silent_s = watch.silent_s()
            # A rank that has not come may still be at the user's code: it has the group's timeout.
            if silent_s > (self.silent_s if watch.has_come else self.timeout_s):
                self._lost.add(rank)
                raise AgreementError(silent_text(self.ranks[rank], watch.has_come))
            time.sleep(PAUSE_S)
        return text

    def failure(self) -> RankFailure | None:
        text = self.read("failure")
        return None if text is None else msgspec.json.decode(text, type=RankFailure)

    def leave(self) -> None:
        """Say that this rank reads no more; wait `LINGER_S` at most for the others to say so."""
        self.post(f"left/{self.rank}", "")
        end = time.monotonic() + LINGER_S
        # A rank that never came reads nothing, nor does one that has ended.
        there = (rank for rank in self.others if rank not in self._lost)
        waited_for = [rank for rank in there if self.read(f"beat/{rank}") is not None]
        while waited_for and time.monotonic() < end:
            waited_for = [rank for rank in waited_for if self.read(f"left/{rank}") is None]
            time.sleep(PAUSE_S)

    def close(self) -> None:
        self._ended.set()
        self._beat.join(_LAST_BEAT_S)  # Torch's C++ aborts if a thread comes back at the end

    def _show_life(self) -> None:
        store = self._store.clone()  # a connection of its own: one serves a request at a time
        for number in itertools.count(1):
            if self._ended.wait(BEAT_S):
                return
            try:
                store.set(f"beat/{self.rank}", str(number))
            except RuntimeError:
                return  # The store has ended. Whoever reads from it next gets the error.


class RankWatch:
    def __init__(self, messages: RankMessages, rank: int) -> None:
        self._messages, self._rank = messages, rank
        self._last: str | None = None
        self._heard = time.monotonic()

    @property
    def has_come(self) -> bool:
        """Whether it has come to this call at all, as far as `silent_s` has seen."""
        return self._last is not None

    def silent_s(self) -> float:
        """Since its last sign; since the watch began, if there was none."""
        sign = self._messages.read(f"beat/{self._rank}")
        if sign != self._last:
            self._last, self._heard = sign, time.monotonic()  # changing numbers: clocks may differ
        return time.monotonic() - self._heard
