"""The first process of HiGHS that is asked something dies before it answers."""

from __future__ import annotations

from typing import Any

import pytest

from remat.solver.backends import processes


def kill_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the process that answers next, once."""
    answer, calls = processes._Process.answer, list[object]()

    def killed_first(self: Any, call: Any) -> Any:
        calls.append(call)
        if len(calls) == 1:
            self._popen.kill()
            self._popen.wait()
        return answer(self, call)

    monkeypatch.setattr(processes._Process, "answer", killed_first)
