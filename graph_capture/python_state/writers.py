"""Who wrote to a place while forward was traced: forward, or a thread beside it.

A library may have a thread that counts or collects at any moment. What forward itself writes, code
of its own thread stores: by name, or in a container or a namespace that it reaches.
"""

from __future__ import annotations

import dis
import enum
import threading
from types import CodeType

from remat.graph_capture.python_state.hidden import Hidden, Stream
from remat.graph_capture.python_state.module_hooks import ModuleHooks
from remat.graph_capture.python_state.places import Entry, Place, Slot
from remat.graph_capture.python_state.ran import CodeThatRan

_BY_TEXT = frozenset(
    {"setattr", "delattr", "globals", "vars", "exec", "eval", "__dict__", "__setattr__"}
)
"""Names by which code writes to a namespace without naming what it writes."""


class Writer(enum.Enum):
    """Who has changed a place."""

    FORWARD = enum.auto()
    """Or nobody knows."""
    THREAD = enum.auto()
    """And forward may have read it."""


def writer_of(place: Place | Hidden | Stream, ran: CodeThatRan) -> Writer:
    """Who has changed `place`, by the code that forward ran, all of it."""
    if isinstance(place, (Hidden, Stream, ModuleHooks)):
        return Writer.FORWARD
    name = place.key if isinstance(place, (Entry, Slot)) else None
    own = ran.own_codes()
    if any(name in code.co_names and name in _names_stored_by(code) for code in own):
        return Writer.FORWARD
    by_text = any(not _BY_TEXT.isdisjoint(code.co_names) for code in own)
    if not isinstance(name, str) or by_text or threading.active_count() == 1:
        return Writer.FORWARD
    return Writer.THREAD


def other_threads() -> str:
    """The names of the threads that run beside this one."""
    own = threading.current_thread()
    return ", ".join(sorted(one.name for one in threading.enumerate() if one is not own))


def _names_stored_by(code: CodeType) -> set[object]:
    found = dis.get_instructions(code)
    return {one.argval for one in found if one.opname.startswith(("STORE_", "DELETE_"))}
